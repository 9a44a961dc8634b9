"""Chat-completions messages as model templates expect them, and what a template does with each role.

Templates differ in small ways: whether content may be a list of parts, which key holds the reasoning, whether a
developer message is known. `Traits` are learnt from the template by rendering probes. Knows no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gateway.sessions.template import ChatTemplate, Message, NotText, TemplateRefused

PROBE = "5b7e1f0c93"  # a word that no template writes of itself
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


@dataclass(frozen=True, slots=True)
class Traits:
    """What a template can read. `parts`: content as a list of text parts, each written whole."""

    parts: bool
    developer: bool
    reasoning_key: str  # the message key that the template reads for what the model thought


def traits_of(template: ChatTemplate) -> Traits:
    """Learn a template's traits by rendering three small conversations."""

    parts = [{"type": "text", "text": f"{PROBE}1"}, {"type": "text", "text": f"{PROBE}2"}]
    developer = {"role": "developer", "content": PROBE}
    keys = [key for key in ("reasoning_content", "thinking", "reasoning") if f".{key}" in template.source]
    keys += [key for key in ("reasoning_content", "reasoning", "thinking") if f"'{key}'" in template.source]
    return Traits(
        parts=_renders(template, [{"role": "user", "content": parts}], f"{PROBE}1", f"{PROBE}2"),
        developer=_renders(template, [developer, {"role": "user", "content": "x"}], PROBE),
        reasoning_key=keys[0] if keys else "reasoning_content",
    )


def _renders(template: ChatTemplate, messages: Sequence[Message], *words: str) -> bool:
    try:
        text = template.render(messages, options={}, generation=False)
    except TemplateRefused:
        return False
    return all(word in text for word in words) and "'type'" not in text and '"type"' not in text


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
        normal["tool_calls"] = [_call(call) for call in calls]
    else:
        normal.pop("tool_calls", None)
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


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as an object, which is what templates serialise; left as they are where they are not one."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return {**call, "type": call.get("type", "function"), "function": function}


class RoleCheck:
    """Refuses a role that the template would leave out in silence. Each pattern of roles is tried once."""

    def __init__(self, *, limit: int = 4096) -> None:
        self._known: set[tuple[str, str]] = set()
        self._limit = limit

    def check(self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> None:
        """Raises TemplateRefused with the role. O(messages) for roles, one more rendering for a new pattern."""
        roles = [str(message.get("role")) for message in messages]
        steps = {("", roles[0]), *pairwise(roles)} if roles else set()
        if steps <= self._known:
            return
        skeleton = [_skeleton(number, message) for number, message in enumerate(messages)]
        text = render(skeleton)
        for number, role in enumerate(roles):
            if role != "assistant" and f"{PROBE}-{number}-" not in text:
                raise TemplateRefused(
                    f"The model's chat template leaves out message {number}, of role {role!r}.",
                    param=f"messages.{number}.role",
                )
        if len(self._known) < self._limit:
            self._known |= steps


def _skeleton(number: int, message: Message) -> Message:
    """The same message with a word of its own for its content."""
    kept = {key: value for key, value in message.items() if key in ("role", "tool_calls", "tool_call_id", "name")}
    return {**kept, "content": f"{PROBE}-{number}-"}
