"""What an OpenAI request says: ChatPrompt and Sampling as JSON fields. Builds values, sends nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from engines.contract import ChatPrompt, Grammar, Sampling, Unsupported

# Fields of Sampling by the name that OpenAI's chat API has for them, with the value that means "not asked for".
_FIELDS: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
}
OPENAI_SAMPLING = frozenset(
    {"temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs"}
)
ALL_SAMPLING = OPENAI_SAMPLING | {"top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos"}


def chat_fields(prompt: ChatPrompt) -> dict[str, Any]:
    """The prompt's fields, those that were given."""
    fields: dict[str, Any] = {"messages": list(prompt.messages)}
    if prompt.tools:
        fields["tools"] = list(prompt.tools)
    for name in ("tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort"):
        if (value := getattr(prompt, name)) is not None:
            fields[name] = value
    return fields


def sampling_fields(
    sampling: Sampling, honoured: frozenset[str], *, replica: str, explicit: bool, renamed: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Sampling's fields. `explicit` sends defaults too, for servers that would put their own in their place.

    Raises Unsupported for a field that was asked for and is not among the `honoured`.
    """
    fields: dict[str, Any] = {"temperature": sampling.temperature}
    for name, off in _FIELDS.items():
        value = getattr(sampling, name)
        if value != off and name not in honoured:
            raise Unsupported(f"{replica} does not take {name}", param=name, replica=replica)
        if name in honoured and value is not None and (explicit or value != off):
            fields[renamed.get(name, name)] = value
    for name in ("stop", "stop_token_ids", "logit_bias"):
        value = getattr(sampling, name)
        if not value:
            continue
        if name in honoured:
            fields[name] = {str(k): v for k, v in value.items()} if name == "logit_bias" else list(value)
        elif name != "stop_token_ids":  # in chat mode the server knows its template's stop ids itself
            raise Unsupported(f"{replica} does not take {name}", param=name, replica=replica)
    if sampling.logprobs is not None and "logprobs" not in honoured:
        raise Unsupported(f"{replica} gives no logprobs", param="logprobs", replica=replica)
    return fields


def chat_logprobs(sampling: Sampling) -> dict[str, Any]:
    """Chat's way to ask for logprobs."""
    if sampling.logprobs is None:
        return {}
    return {"logprobs": True, "top_logprobs": sampling.logprobs}


def response_format(grammar: Grammar, *, replica: str) -> dict[str, Any]:
    """`response_format` for a grammar that has one. Raises Unsupported."""
    if grammar.kind == "json_object":
        return {"type": "json_object"}
    if grammar.kind == "json_schema":
        schema = orjson.loads(grammar.text)
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    raise Unsupported(f"{replica} takes no {grammar.kind} grammar", param="response_format", replica=replica)
