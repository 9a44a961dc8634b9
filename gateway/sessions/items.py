"""Items and chat messages: the same conversation in the two shapes that clients and templates speak.

    chat message                              items
    system / developer / user {content}       message
    assistant {reasoning_content, content,    reasoning, message, function_call...
               tool_calls}
    tool {tool_call_id, content}              function_call_output

Knows no tokens, no store, no HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import orjson

from compression.conversation import Item
from compression.conversation import open_calls as open_calls
from gateway.errors import BadRequest, Unprocessable

ROLES = ("system", "developer", "user", "assistant", "tool")
EMPTY_MEANING = b"\0" * 32
NOTHING_CALLED: Mapping[str, str] = {}
MAX_NAME = 256  # characters of a name or of a tool call's id
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal"}


def message(role: str, content: Any, **more: Any) -> Item:
    return Item("message", {"type": "message", "role": role, "content": content, **more})


def function_call(call_id: str, name: str, arguments: str) -> Item:
    return Item("function_call", {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments})


def function_call_output(call_id: str, output: Any) -> Item:
    return Item("function_call_output", {"type": "function_call_output", "call_id": call_id, "output": output})


def reasoning(text: str) -> Item:
    content = [{"type": "reasoning_text", "text": text}]
    return Item("reasoning", {"type": "reasoning", "summary": [], "content": content})


def items_from_messages(messages: Sequence[Mapping[str, Any]], *, param: str = "messages") -> list[Item]:
    """Chat messages as items; raises BadRequest that names the place of what is wrong."""
    items: list[Item] = []
    for i, msg in enumerate(messages):
        items += _items_of(msg, f"{param}[{i}]")
    return items


def _items_of(msg: Mapping[str, Any], where: str) -> list[Item]:
    role = msg.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    content = _checked_content(msg.get("content"), f"{where}.content")
    if role == "tool":
        call_id = msg.get("tool_call_id")
        if not _short(call_id):
            raise BadRequest(
                f"{where}.tool_call_id must be a string of 1 to {MAX_NAME} characters", param=f"{where}.tool_call_id"
            )
        return [function_call_output(call_id, "" if content is None else content)]
    if role != "assistant":
        if content is None:
            raise BadRequest(f"{where}.content is missing", param=f"{where}.content")
        return [message(role, content, **_name_of(msg, where))]
    thought = msg.get("reasoning_content") or msg.get("reasoning")
    calls = _tool_calls(msg.get("tool_calls"), where)
    if content is None and not calls:
        raise BadRequest(f"{where} has neither content nor tool_calls", param=f"{where}.content")
    out = [reasoning(thought)] if isinstance(thought, str) and thought else []
    if content not in (None, "", []) or not calls:
        out.append(message("assistant", content, **_name_of(msg, where)))
    return out + calls


def _name_of(msg: Mapping[str, Any], where: str) -> dict[str, str]:
    name = msg.get("name")
    if name is None:
        return {}
    if not _short(name):
        raise BadRequest(f"{where}.name must be a string of 1 to {MAX_NAME} characters", param=f"{where}.name")
    return {"name": name}


def _checked_content(content: Any, where: str) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or a list of parts", param=where)
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise BadRequest(f"{where}[{i}] must be an object with a type", param=f"{where}[{i}].type")
        if kind in _TEXT_PARTS:
            text = part.get("refusal" if kind == "refusal" else "text")
            if not isinstance(text, str):
                raise BadRequest(f"{where}[{i}] of type {kind} needs a text", param=f"{where}[{i}]")
        elif kind in ("image_url", "input_image"):
            _check_image(part, f"{where}[{i}]")
        else:
            raise BadRequest(f"{where}[{i}].type {kind!r:.60} is not known here", param=f"{where}[{i}].type")
    return content


def _check_image(part: Mapping[str, Any], where: str) -> None:
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    if not isinstance(url, str) or not url.startswith(("data:image/", "https://", "http://")):
        raise BadRequest(f"{where}.image_url must be a data: or http(s) URL", param=f"{where}.image_url")


def _tool_calls(calls: Any, where: str) -> list[Item]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise BadRequest(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    out = []
    for i, call in enumerate(calls):
        at = f"{where}.tool_calls[{i}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not _short(function.get("name")):
            raise BadRequest(f"{at}.function.name must be a string of 1 to {MAX_NAME} characters", param=at)
        arguments = function.get("arguments", "")
        if not isinstance(arguments, str):
            raise BadRequest(f"{at}.function.arguments must be a string of JSON", param=f"{at}.function.arguments")
        if not _short(call.get("id")):
            raise BadRequest(f"{at}.id must be a string of 1 to {MAX_NAME} characters", param=f"{at}.id")
        out.append(function_call(call["id"], function["name"], arguments))
    return out


def parse_items(values: Any, *, param: str = "input", first: int = 0) -> list[Item]:
    """Items as the REST API takes them: a string (one user message), or a list of items or of chat messages."""
    if isinstance(values, str):
        return [message("user", values)]
    if not isinstance(values, list) or not values:
        raise BadRequest(f"{param} must be a string or a non-empty list of items", param=param)
    out: list[Item] = []
    for i, value in enumerate(values, first):
        where = f"{param}[{i}]"
        if not isinstance(value, dict):
            raise BadRequest(f"{where} must be an object", param=where)
        kind = value.get("type", "message")
        if kind == "message":
            out += _items_of(value, where)
        elif kind in ("function_call", "function_call_output"):
            out.append(_call_item(kind, value, where))
        elif kind == "reasoning":
            out.append(_reasoning_item(value, where))
        else:
            raise BadRequest(f"{where}.type {kind!r:.60} is not known here", param=f"{where}.type")
    return out


def check_answerable(items: Sequence[Item], *, param: str) -> None:
    """A turn ends in something to answer: raises BadRequest where its last item is the assistant's own."""
    last = items[-1]
    if last.type in ("function_call", "reasoning") or last.role == "assistant":
        raise BadRequest("the last message is the assistant's: there is nothing to answer", param=param)


def _short(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and 1 <= len(value) <= MAX_NAME


def _reasoning_item(value: Mapping[str, Any], where: str) -> Item:
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        parts = value.get(name)
        whole = isinstance(parts, list) and all(
            isinstance(part, dict) and part.get("type") == kind and isinstance(part.get("text"), str) for part in parts
        )
        if parts is not None and not whole:
            raise BadRequest(f"{where}.{name} must be a list of {kind} parts", param=f"{where}.{name}")
    return Item("reasoning", dict(value))


def _call_item(kind: str, value: Mapping[str, Any], where: str) -> Item:
    if not _short(value.get("call_id")):
        raise BadRequest(f"{where}.call_id must be a string of 1 to {MAX_NAME} characters", param=f"{where}.call_id")
    if kind == "function_call":
        if not _short(value.get("name")) or not isinstance(value.get("arguments"), str):
            raise BadRequest(f"{where} needs name (at most {MAX_NAME} characters) and arguments, strings", param=where)
        return function_call(value["call_id"], value["name"], value["arguments"])
    output = _checked_content(value.get("output"), f"{where}.output")
    if output is None:
        raise BadRequest(f"{where}.output is missing", param=f"{where}.output")
    return function_call_output(value["call_id"], output)


def split_system(items: Sequence[Item]) -> tuple[str | None, list[Item]]:
    """The system and developer messages at the front, joined, and the rest."""
    n = 0
    while n < len(items) and items[n].type == "message" and items[n].role in ("system", "developer"):
        n += 1
    return ("\n\n".join(item.text for item in items[:n]) if n else None), list(items[n:])


def has_images(items: Iterable[Item]) -> bool:
    def parts(item: Item) -> Any:
        return item.payload.get("output" if item.type == "function_call_output" else "content")

    return any(
        isinstance(found := parts(item), list) and any(p.get("type") in ("image_url", "input_image") for p in found)
        for item in items
    )


def check_pairs(waiting: Mapping[str, str], items: Sequence[Item], *, param: str = "input") -> None:
    """Every tool output answers an open call, and no user message is put before an open call's output."""
    left = dict(waiting)
    for item in items:
        if item.type == "function_call":
            left[item.payload["call_id"]] = item.payload["name"]
        elif item.type == "function_call_output":
            if left.pop(item.payload["call_id"], None) is None:
                shown = item.payload["call_id"][:64]
                raise Unprocessable(
                    f"tool output for call {shown!r} matches no open tool call",
                    code="tool_output_unmatched",
                    param=param,
                )
        elif item.role == "user" and left:
            raise Unprocessable(
                f"tool call {next(iter(left))[:64]!r} has no output yet", code="tool_output_missing", param=param
            )
    if left and items and not (items[-1].type == "function_call"):
        raise Unprocessable(
            f"tool call {next(iter(left))[:64]!r} has no output yet", code="tool_output_missing", param=param
        )


def names_of_calls(items: Iterable[Item]) -> dict[str, str]:
    """Call id -> function name, of all calls."""
    return {item.payload["call_id"]: item.payload["name"] for item in items if item.type == "function_call"}


def messages_from_items(items: Iterable[Item], called: Mapping[str, str] = NOTHING_CALLED) -> list[dict[str, Any]]:
    """Items as chat messages; what the assistant said, thought and called in a row becomes one message.

    A tool message names the function that it answers, as some templates write it: of a call among the items, else of
    what was `called` before them (id -> name).
    """
    names = dict(called)
    out: list[dict[str, Any]] = []
    open_message: dict[str, Any] | None = None
    for item in items:
        if item.type == "function_call_output":
            open_message = None
            call_id = item.payload["call_id"]
            named = {"name": names[call_id]} if call_id in names else {}
            result = {"role": "tool", "tool_call_id": call_id, "content": _plain(item.payload.get("output"))}
            out.append({**result, **named})
        elif item.type == "message" and item.role != "assistant":
            open_message = None
            named = {"name": item.payload["name"]} if "name" in item.payload else {}
            out.append({"role": item.role, "content": _plain(item.payload.get("content")), **named})
        else:
            if open_message is None or (item.type == "message" and open_message["content"] is not None):
                open_message = {"role": "assistant", "content": None}
                out.append(open_message)
            if item.type == "function_call":
                names[item.payload["call_id"]] = item.payload["name"]
            _add_assistant(open_message, item)
    for msg in out:
        if msg["role"] == "assistant" and msg["content"] is None and "tool_calls" not in msg:
            msg["content"] = ""
    return out


def _add_assistant(msg: dict[str, Any], item: Item) -> None:
    if item.type == "function_call":
        call = {"name": item.payload["name"], "arguments": item.payload["arguments"]}
        msg.setdefault("tool_calls", []).append({"id": item.payload["call_id"], "type": "function", "function": call})
    elif item.type == "reasoning":
        msg["reasoning_content"] = item.text
    else:
        msg["content"] = _plain(item.payload.get("content"))


def _plain(content: Any) -> Any:
    """Content as chat templates take it: a string where all parts are text, else parts in chat form."""
    if not isinstance(content, list):
        return content
    if all(part.get("type") in _TEXT_PARTS for part in content):
        return "".join(part.get("text", part.get("refusal", "")) for part in content)
    return [_chat_part(part) for part in content]


def _chat_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") in _TEXT_PARTS:
        return {"type": "text", "text": part.get("text", part.get("refusal", ""))}
    url = part.get("image_url")
    return {"type": "image_url", "image_url": url if isinstance(url, Mapping) else {"url": url}}


def meaning(parent: bytes, items: Iterable[Item]) -> bytes:
    """Digest of a conversation by what it means: reasoning left out, tool arguments normalised, edges trimmed.

    Two clients that send the same history with other ids, spacing or key order get the same digest.
    """
    digest = parent
    for item in items:
        if item.type == "reasoning":
            continue
        digest = hashlib.sha256(digest + orjson.dumps(_meaning_of(item))).digest()
    return digest


def root_meaning(system: str | None) -> bytes:
    return hashlib.sha256(b"system\0" + system.strip().encode()).digest() if system else EMPTY_MEANING


def _meaning_of(item: Item) -> list[Any]:
    if item.type == "function_call":
        return ["call", item.payload["name"], _canonical(item.payload["arguments"])]
    if item.type == "function_call_output":
        return ["output", _canonical_content(item.payload.get("output"))]
    role = "system" if item.role == "developer" else item.role
    return [role, _canonical_content(item.payload.get("content"))]


def _canonical(arguments: str) -> str:
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # it reads deeper nesting than it writes
        return arguments.strip()


def _canonical_content(content: Any) -> Any:
    plain = _plain(content)
    if isinstance(plain, str):
        return plain.strip()
    return [part.get("text", part.get("image_url")) for part in plain] if plain else ""
