"""Chat-completions messages as model templates expect them, and what a template does with each role.

Templates differ in small ways: whether content may be a list of parts, which key holds the reasoning, whether a
developer message is known. `Traits` are learnt from the template by rendering probes. Knows no tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from compression.statements import HALF_OF_A_PAIR
from gateway.sessions.template import ChatTemplate, Message, NotText, TemplateRefused

PROBE = "5b7e1f0c93"  # a word that no template writes of itself
REPR_OF_PARTS = ("{'type': 'text'", '{"type": "text"')  # a template that prints the list itself
SHORT_ID = 9  # letters and digits, as Mistral's templates demand
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
MAX_ARGUMENT_DEPTH = 64  # as deep as a request's own JSON may be


@dataclass(frozen=True, slots=True)
class Traits:
    """What a template can read. `parts`: content as a list of text parts, each written whole.

    `short_ids`: ids of tool calls must have nine letters and digits; others are replaced by a digest of that form.
    """

    parts: bool
    tools: bool
    short_ids: bool
    developer: bool
    reasoning_key: str  # the message key that the template reads for what the model thought


def traits_of(template: ChatTemplate) -> Traits:
    """Learn a template's traits by rendering small conversations."""

    parts = [{"type": "text", "text": f"{PROBE}1"}, {"type": "text", "text": f"{PROBE}2"}]
    developer = {"role": "developer", "content": PROBE}
    user = {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": PROBE, "description": "x", "parameters": {"type": "object"}}}
    tools = [tool] if _renders(template, [user], PROBE, tools=[tool]) else []

    def calls(id: str) -> bool:
        call = {"id": id, "type": "function", "function": {"name": f"{PROBE}7", "arguments": {}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": id, "name": f"{PROBE}7", "content": "x"}
        return _renders(template, [user, calling, result], f"{PROBE}7", tools=tools)

    keys = [key for key in ("reasoning_content", "thinking", "reasoning") if f".{key}" in template.source]
    keys += [key for key in ("reasoning_content", "reasoning", "thinking") if f"'{key}'" in template.source]
    return Traits(
        parts=_renders(template, [{"role": "user", "content": parts}], f"{PROBE}1", f"{PROBE}2"),
        tools=bool(tools),
        short_ids=bool(tools) and not calls("call_0123456789") and calls("abcdef012"),
        developer=_renders(template, [developer, {"role": "user", "content": "x"}], PROBE),
        reasoning_key=keys[0] if keys else "reasoning_content",
    )


def _renders(
    template: ChatTemplate, messages: Sequence[Message], *words: str, tools: Sequence[Mapping[str, Any]] = ()
) -> bool:
    try:
        text = template.render(messages, tools=tools, options={}, generation=False)
    except TemplateRefused:
        return False
    return all(word in text for word in words) and not any(mark in text for mark in REPR_OF_PARTS)


def normalise(messages: Sequence[Message], traits: Traits) -> list[dict[str, Any]]:
    """Messages in the one form that this template reads; what is empty or unknown to it is left out."""
    return [_normal(message, traits) for message in messages]


def _normal(message: Message, traits: Traits) -> dict[str, Any]:
    normal = {key: value for key, value in message.items() if value is not None and key != "reasoning_content"}
    normal["content"] = _content(message.get("content"), traits)
    if normal.get("role") == "developer" and not traits.developer:
        normal["role"] = "system"
    if reasoning := message.get("reasoning_content"):
        normal[traits.reasoning_key] = reasoning
    if calls := message.get("tool_calls"):
        normal["tool_calls"] = [_call(call, traits) for call in calls]
    else:
        normal.pop("tool_calls", None)
    if traits.short_ids and "tool_call_id" in normal:
        normal["tool_call_id"] = _short_id(normal["tool_call_id"])
    return normal


def _content(content: Any, traits: Traits) -> Any:
    """A string; or a list of parts where the template takes them. None reads as no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = [_part_text(part) for part in content]
    if traits.parts and len(texts) != 1:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text")
    if kind == "refusal":
        return str(part.get("refusal", ""))
    if kind not in TEXT_PARTS:
        raise NotText(f"A message part of type {kind!r} cannot be sent as token ids.", param="messages")
    return str(part.get("text", ""))


def _call(call: Mapping[str, Any], traits: Traits) -> dict[str, Any]:
    """Arguments as an object, which is what templates serialise; left as they are where they are not one that a
    template can write: what is nested too deep, or holds half of a surrogate pair, is text."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict) and _writable(parsed, MAX_ARGUMENT_DEPTH):
            function["arguments"] = parsed
    id = {"id": _short_id(call["id"])} if traits.short_ids and "id" in call else {}
    return {**call, **id, "type": call.get("type", "function"), "function": function}


def _writable(value: Any, depth: int) -> bool:
    if isinstance(value, str):
        return value.isascii() or HALF_OF_A_PAIR.search(value) is None
    if isinstance(value, dict):
        return depth > 0 and all(_writable(key, 0) and _writable(inner, depth - 1) for key, inner in value.items())
    if isinstance(value, list):
        return depth > 0 and all(_writable(inner, depth - 1) for inner in value)
    return True


def _short_id(id: str) -> str:
    if len(id) == SHORT_ID and id.isalnum() and id.isascii():
        return id
    return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:SHORT_ID]


class RoleCheck:
    """Refuses a role that the template would leave out in silence. Each pattern of roles is tried once."""

    def __init__(self, *, limit: int = 4096) -> None:
        self._known: set[tuple[str, str]] = set()
        self._limit = limit

    def check(self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> None:
        """Raises TemplateRefused with the role. O(messages) for roles, one more rendering for a new pattern."""
        roles = [str(message.get("role")) for message in messages]
        kinds = [
            f"{role} calling" if message.get("tool_calls") else role
            for role, message in zip(roles, messages, strict=True)
        ]
        steps = {("", kinds[0]), *pairwise(kinds)} if kinds else set()
        if steps <= self._known:
            return
        skeleton = [_skeleton(number, message) for number, message in enumerate(messages)]
        text = render(skeleton)
        for number, role in enumerate(roles):
            calls = messages[number].get("tool_calls") or ()
            word = f"{PROBE}-{number}-"
            if role != "assistant" and word not in text and not _led(number, role, skeleton, word, render):
                raise TemplateRefused(
                    f"The model's chat template leaves out message {number}, of role {role!r}.",
                    param=f"messages.{number}.role",
                )
            if any(call["function"]["name"] not in text for call in calls):
                raise TemplateRefused(
                    f"The model's chat template leaves out the tool calls of message {number}.",
                    param=f"messages.{number}.tool_calls",
                )
        if len(self._known) < self._limit:
            self._known |= steps


def _skeleton(number: int, message: Message) -> Message:
    """The same message with a word of its own for its content."""
    kept = {key: value for key, value in message.items() if key in ("role", "tool_calls", "tool_call_id", "name")}
    return {**kept, "content": f"{PROBE}-{number}-"}


def _led(
    number: int, role: str, skeleton: Sequence[Message], word: str, render: Callable[[Sequence[Message]], str]
) -> bool:
    """Whether it is the leading system message of a template that knows one, and leaves it out after tool results.

    Mistral's templates do so: the system text goes with a last user message only. The model was trained on that.
    """
    return number == 0 and role == "system" and word in render([skeleton[0], {"role": "user", "content": "x"}])
