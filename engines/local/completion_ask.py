"""The fields of OpenAI's `POST /v1/completions` as values, each within its bounds. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from engines.contract import Grammar, RequestRefused, Sampling, Unsupported
from engines.local import checks
from engines.local.wire import REQUEST_ID

MAX_PROMPTS = 32
OWN_FIELDS = frozenset({
    "model", "prompt", "n", "best_of", "echo", "suffix", "stream", "stream_options", "user", "add_special_tokens",
    "return_token_ids", "cache_salt", "priority", "request_id", "response_format", "skip_special_tokens",
})  # fmt: skip
KNOWN = (checks.SAMPLING_FIELDS - {"grammar"}) | OWN_FIELDS
DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, slots=True)
class Ask:
    """The request, its fields within their bounds. A prompt is text or ids."""

    model: str
    prompts: tuple[str | list[int], ...]
    sampling: Sampling
    stream: bool
    include_usage: bool
    add_special_tokens: bool
    return_token_ids: bool
    salt: str
    priority: int
    request_id: str | None


def read_ask(fields: Mapping[str, Any], vocab: int) -> Ask:
    """Raises RequestRefused naming the field."""
    checks.unknown(fields, KNOWN)
    for name in ("n", "best_of"):
        if checks.whole(fields, name, 1, 128, 1) != 1:
            raise Unsupported(f"{name}: one answer a prompt; ask again for another", param=name)
    if checks.flag(fields, "echo") or not checks.flag(fields, "skip_special_tokens", True):
        name = "echo" if fields.get("echo") else "skip_special_tokens"
        raise Unsupported(f"{name}: not supported", param=name)
    if fields.get("suffix") not in (None, ""):
        raise Unsupported("suffix: not supported", param="suffix")
    model = checks.text(fields, "model", checks.PRINTABLE, None)
    if model is None:
        raise checks.refuse("model", "is required")
    options = checks.mapping(fields, "stream_options") or {}
    checks.unknown(options, {"include_usage"}, "stream_options.")
    return Ask(
        model=model,
        prompts=_prompts(fields.get("prompt"), vocab),
        sampling=_sampling(fields, vocab),
        stream=checks.flag(fields, "stream"),
        include_usage=checks.flag(options, "include_usage"),
        add_special_tokens=checks.flag(fields, "add_special_tokens", True),
        return_token_ids=checks.flag(fields, "return_token_ids"),
        salt=checks.text(fields, "cache_salt", checks.SALT, ""),
        priority=checks.whole(fields, "priority", -(1 << 20), 1 << 20, 0),
        request_id=checks.text(fields, "request_id", REQUEST_ID, None),
    )


def _prompts(value: Any, vocab: int) -> tuple[str | list[int], ...]:
    if isinstance(value, str):
        prompts: tuple[Any, ...] = (value,)
    elif isinstance(value, list) and value:
        prompts = (value,) if type(value[0]) is int else tuple(value)
    else:
        raise checks.refuse("prompt", "must be a string, a list of token ids, or a list of either")
    if len(prompts) > MAX_PROMPTS:
        raise checks.refuse("prompt", f"at most {MAX_PROMPTS} prompts")
    for prompt in prompts:
        if not prompt:
            raise checks.refuse("prompt", "an empty prompt")
        if not isinstance(prompt, str):
            checks.ids(prompt, vocab, "prompt")
    return prompts


def _sampling(fields: Mapping[str, Any], vocab: int) -> Sampling:
    given = {name: value for name, value in fields.items() if name in checks.SAMPLING_FIELDS}
    given.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    if given.get("top_k") == -1:  # vLLM's "off"
        given["top_k"] = 0
    if (grammar := _grammar(fields)) is not None:
        given["grammar"] = {"kind": grammar.kind, "text": grammar.text}
    return checks.sampling(given, vocab)


def _grammar(fields: Mapping[str, Any]) -> Grammar | None:
    wanted = checks.mapping(fields, "response_format")
    match wanted:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar("json_object")
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return Grammar("json_schema", orjson.dumps(schema).decode())
        case _:
            raise RequestRefused("response_format: must be text, json_object or json_schema", param="response_format")
