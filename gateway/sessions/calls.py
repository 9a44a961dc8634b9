"""Tool calls as models write them, read from complete text. Arguments keep the characters that the model wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"[\s;,]*")
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]")


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments`: JSON text of an object, as generated. `id`: the model's own, where it writes one."""

    name: str
    arguments: str
    id: str | None = None


def read_call(text: str) -> Call | None:
    """`{"name": .., "arguments" | "parameters": {..}}` and nothing else; None where it is not that."""
    found = _call_at(text, _SPACE.match(text).end())  # type: ignore[union-attr]
    if found is None or text[found[1] :].strip():
        return None
    return found[0]


def read_calls(text: str, *, known: Collection[str] | None = None) -> list[Call] | None:
    """One call or several with `;` or `,` between them; None where anything else stands there.

    `known`: names of the tools; a text that calls another is no call.
    """
    calls: list[Call] = []
    at = _SPACE.match(text).end()  # type: ignore[union-attr]
    while at < len(text):
        found = _call_at(text, at)
        if found is None or (known is not None and found[0].name not in known):
            return None
        calls.append(found[0])
        at = _SEPARATOR.match(text, found[1]).end()  # type: ignore[union-attr]
    return calls or None


def read_list(text: str) -> list[Call] | None:
    """`[{"name": .., "arguments": .., "id": ..}, ..]` and nothing else."""
    body = text.strip()
    if not (body.startswith("[") and body.endswith("]")):
        return None
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return None
    return read_calls(body[1:-1])


def read_named(text: str) -> list[Call] | None:
    """`name[ARGS]{..}`, perhaps with `[CALL_ID]id` before the arguments; several after one another."""
    calls: list[Call] = []
    at = 0
    while text[at:].strip():
        head = _NAMED.match(text, at)
        if head is None:
            return None
        start = _SPACE.match(text, head.end()).end()  # type: ignore[union-attr]
        end = _object_end(text, start)
        if end is None:
            return None
        calls.append(Call(head[1], text[start:end], head[2]))
        at = _SPACE.match(text, end).end()  # type: ignore[union-attr]
        at += len("[TOOL_CALLS]") if text.startswith("[TOOL_CALLS]", at) else 0
    return calls or None


def read_object(text: str) -> str | None:
    """The text of a JSON object, with nothing around it but white space; None where it is not that."""
    body = text.strip()
    return body if body and _object_end(body, 0) == len(body) else None


def _object_end(text: str, start: int) -> int | None:
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return end if isinstance(value, dict) else None


def _call_at(text: str, start: int) -> tuple[Call, int] | None:
    """The call whose object begins at `start`, and where it ends."""
    end = _object_end(text, start)
    if end is None:
        return None
    members = _members(text, start)
    try:
        name = json.loads(members["name"])
        id = json.loads(members["id"]) if "id" in members else None
        f"{name}{id}".encode()  # half of a surrogate pair is no name
    except (KeyError, ValueError):
        return None
    arguments = members.get("arguments", members.get("parameters", "{}"))
    if arguments.startswith('"'):  # an object that was serialised twice
        arguments = json.loads(arguments)
    if arguments == "null":
        arguments = "{}"
    if not isinstance(name, str) or not name or read_object(arguments) is None:
        return None
    return Call(name, arguments.strip(), id if isinstance(id, str) else None), end


def _members(text: str, start: int) -> dict[str, str]:
    """Key -> text of the value, for the valid JSON object at `start`."""
    members: dict[str, str] = {}
    at = _skip(text, start + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)  # past the colon
        _, at = _DECODER.raw_decode(text, begin)
        members[key] = text[begin:at]
        at = _skip(text, at)
        at = _skip(text, at + 1) if text[at] == "," else at
    return members


def _skip(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]
