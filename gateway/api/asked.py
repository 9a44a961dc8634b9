"""Checked bodies as the turn's own words: sampling, tools, formats. Plain functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import unquote

import orjson
from pydantic import BaseModel

from gateway.api.schemas import AnswerFields, ChatBody, SamplingFields
from gateway.errors import BadRequest
from gateway.sessions.command import Shape

MAX_SCHEMA_BYTES = 65_536
MAX_TOOLS_BYTES = 262_144  # all tools of a request together

# Fields of OpenAI's chat completions that change the answer and that no replica is asked for here.
REFUSED = ("functions", "function_call", "audio", "prediction", "web_search_options", "best_of", "suffix", "echo")


def shape_of(body: SamplingFields, *, max_tokens: int | None, logprobs: bool | None, top: int | None) -> Shape:
    if top is not None and not logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    top_k = None if body.top_k in (None, -1) else body.top_k
    return Shape(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=top_k,
        min_p=body.min_p,
        seed=body.seed,
        stop=stop,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias={int(k): v for k, v in (body.logit_bias or {}).items()},
        logprobs=(top or 0) if logprobs else None,
    )


def chat_shape(body: ChatBody) -> Shape:
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise BadRequest("max_tokens and max_completion_tokens say different things", param="max_completion_tokens")
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return shape_of(body, max_tokens=asked, logprobs=body.logprobs, top=body.top_logprobs)


def unsupported(param: str, message: str) -> BadRequest:
    return BadRequest(message, code="unsupported_parameter", param=param)


def refuse_unsupported(raw: dict[str, Any]) -> None:
    """Fields that would change the answer are refused by name, never ignored."""
    for name in REFUSED:
        if raw.get(name) not in (None, False, [], {}):
            raise unsupported(name, f"{name} is not supported here")
    if raw.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities", "only the modality text is supported")


def refuse_but(raw: Mapping[str, Any], fine: Mapping[str, tuple[Any, ...]], *, tools: str) -> None:
    """`fine`: fields that change what is done, with the values that do not; `tools`: the one type of tool that there
    is. Raises BadRequest for any other value or tool."""
    for name, values in fine.items():
        if raw.get(name) is not None and raw[name] not in values:
            raise unsupported(name, f"{name} is not supported here")
    asked = raw.get("tools")
    for i, tool in enumerate(asked if isinstance(asked, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != tools:
            raise unsupported(
                f"tools[{i}].type", f"tools[{i}]: no {kind[:64]!r} tools are run here, only functions of your own"
            )


def plain(value: BaseModel | None) -> dict[str, Any] | None:
    return value.model_dump(by_alias=True, exclude_none=True) if value is not None else None


def tools_of(tools: list[Any] | None) -> tuple[dict[str, Any], ...]:
    return checked_tools(tuple(cast("dict[str, Any]", plain(tool)) for tool in tools or ()))


def checked_tools(found: tuple[dict[str, Any], ...], *, at: str = ".function") -> tuple[dict[str, Any], ...]:
    """Tools in the chat shape; `at`: where in a tool of the request its function stands. Raises BadRequest."""
    names = [tool["function"]["name"] for tool in found]
    if len(set(names)) < len(names):
        raise BadRequest("two tools have one name", param="tools")
    size = len(orjson.dumps(found)) if found else 0
    if size > MAX_TOOLS_BYTES:
        raise BadRequest(f"the tools have {size} bytes of at most {MAX_TOOLS_BYTES}", param="tools")
    for i, tool in enumerate(found):
        check_references(tool["function"].get("parameters"), f"tools[{i}]{at}.parameters")
    return found


def choice_of(body: ChatBody | AnswerFields, tools: tuple[dict[str, Any], ...]) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        if choice in ("required", "auto") and not tools:
            raise BadRequest(f"tool_choice {choice!r} needs tools", param="tool_choice")
        return choice
    name = choice.function.name
    if name not in {tool["function"]["name"] for tool in tools}:
        raise BadRequest(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return plain(choice)


def format_of(body: ChatBody | AnswerFields) -> dict[str, Any] | None:
    asked = body.response_format
    if asked is None:
        return None
    if asked.type == "json_schema":
        if asked.json_schema is None:
            raise BadRequest("response_format of type json_schema needs json_schema", param="response_format")
        check_schema(asked.json_schema, "response_format.json_schema")
    return plain(asked)


def check_schema(spec: BaseModel, where: str) -> None:
    """A field with a JSON schema in `schema`. Raises BadRequest for one that is too big, or refers to nowhere."""
    size = len(spec.model_dump_json(by_alias=True))
    if size > MAX_SCHEMA_BYTES:
        raise BadRequest(f"the JSON schema has {size} bytes of at most {MAX_SCHEMA_BYTES}", param=where)
    check_references(spec.model_dump(by_alias=True)["schema"], f"{where}.schema")


def check_references(schema: Any, where: str) -> None:
    """Every $ref of a JSON schema leads within it to something that is no $ref. Raises BadRequest.

    A schema may contain itself (a tree of nodes); one that is nothing but itself describes nothing, and expanding it
    never ends. References to other documents are never followed.
    """
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            left.extend(node.values())
            seen: set[str] = set()
            while isinstance(node, dict) and isinstance(reference := node.get("$ref"), str):
                if reference in seen:
                    raise BadRequest(f"{where}: $ref {reference[:64]!r} leads back to itself", param=where)
                seen.add(reference)
                node = _referred(schema, reference, where)
        elif isinstance(node, list):
            left.extend(node)


def _referred(schema: Any, reference: str, where: str) -> Any:
    """What a JSON pointer (RFC 6901) in a fragment names."""
    found = schema
    try:
        if reference.partition("#")[0]:
            raise KeyError(reference)
        for part in unquote(reference.removeprefix("#")).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found[int(part)] if isinstance(found, list) else found[part]
    except (KeyError, IndexError, ValueError, TypeError):
        raise BadRequest(f"{where}: $ref {reference[:64]!r} leads nowhere within the schema", param=where) from None
    return found
