"""Whether what is kept can be sent: no tool answer without its call, and templates that take it and show all of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.compaction.context import Context, plain_messages
from bench.compaction.generate import TOOLS
from compression.conversation import Item
from compression.view import Placement
from gateway.sessions.items import messages_from_items
from gateway.sessions.messages import Traits, normalise, traits_of
from gateway.sessions.placing import chosen_placement
from gateway.sessions.template import ChatTemplate, TemplateRefused

NOW = datetime(2026, 11, 29, tzinfo=UTC)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL_SPECS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks a record up by its key",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
    for name in TOOLS
]


@dataclass(frozen=True, slots=True)
class Family:
    """A model's template, and where a summary stands in it."""

    name: str
    template: ChatTemplate
    traits: Traits
    system: bool
    placement: Placement

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: bool) -> str:
        """Raises TemplateRefused."""
        given = messages if self.system else [each for each in messages if each["role"] != "system"]
        return self.template.render(
            normalise(given, self.traits), tools=TOOL_SPECS if tools else (), options={}, generation=True
        )


def families(files: Iterable[Path]) -> list[Family]:
    """A family of each template file."""
    return [_family(file.stem, file.read_text()) for file in sorted(files)]


def _family(name: str, source: str) -> Family:
    template = ChatTemplate(source, special_tokens=SPECIAL, clock=lambda: NOW)
    traits = traits_of(template)

    def plainly(messages: Sequence[Mapping[str, Any]]) -> str:
        return template.render(normalise(messages, traits), options={}, generation=True)

    try:
        plainly([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])
        system = True
    except TemplateRefused:
        system = False
    return Family(name, template, traits, system, chosen_placement(plainly))


def orphans(items: Iterable[Item]) -> int:
    """Tool answers without their call before them, and calls that are never answered."""
    waiting: set[str] = set()
    found = 0
    for item in items:
        if item.type == "function_call":
            waiting.add(item.payload["call_id"])
        elif item.type == "function_call_output":
            found += item.payload["call_id"] not in waiting
            waiting.discard(item.payload["call_id"])
    return found + len(waiting)


def failures(family: Family, system: str, context: Callable[[Placement], Context]) -> list[str]:
    """What is wrong with a context in this family's template, with a next message after it."""
    made = context(family.placement)
    tools = any(item.type == "function_call" for item in made.items) and family.traits.tools
    messages = _named(messages_from_items(made.items)) if tools else _alternating(plain_messages(made.items))
    told = system + made.system
    asked = [{"role": "system", "content": told}, *messages, {"role": "user", "content": "And what now?"}]
    try:
        shown = _letters(family.render(asked, tools=tools))
    except TemplateRefused as refused:
        return [f"{family.name}: refused: {refused.message[:200]}"]
    missing = [
        f"{family.name}: left out of message {at}: {each['content'][:60]!r}"
        for at, each in enumerate(asked)
        if each.get("content") and not _shown(each, shown, system=family.system)
    ]
    return missing[:3]


def _shown(said: Mapping[str, Any], shown: str, *, system: bool) -> bool:
    if said["role"] == "system":
        return not system or _letters(said["content"]) in shown
    if said["role"] == "tool":  # a template may write it as JSON, with escapes
        return all(word in shown for word in re.findall(r"[a-z0-9]{4,}", said["content"].casefold())[:3])
    return _letters(said["content"]) in shown


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.casefold())


def _named(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A tool's answer says which tool it is of, as a client of chat completions says it."""
    names = {call["id"]: call["function"]["name"] for each in messages for call in each.get("tool_calls", ())}
    return [{**each, "name": names[each["tool_call_id"]]} if each["role"] == "tool" else each for each in messages]


def _alternating(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls that were made plain text leave two messages of one role in a row: they become one."""
    joined: list[dict[str, Any]] = []
    for each in messages:
        if joined and joined[-1]["role"] == each["role"]:
            joined[-1] = {**each, "content": f"{joined[-1]['content']}\n{each['content']}"}
        else:
            joined.append(each)
    return joined
