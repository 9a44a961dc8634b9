"""Instructions and tools that hold for one response, beside those that a session has for good. Plain functions.

A turn keeps what it was asked with in its metadata, under RESPONSE: a response shows it, and a compaction renders the
path as its last turn sent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.store.records import SessionRecord, TurnRecord

RESPONSE = "response"  # in a turn's metadata: what the response was asked with
Tools = tuple[dict[str, Any], ...]


def system_of(session: SessionRecord | None, instructions: str | None) -> str | None:
    """The system prompt of a turn: the session's own, and the instructions that hold for this turn."""
    parts = [part for part in (session.system if session is not None else None, instructions) if part is not None]
    return "\n\n".join(parts) if parts else None


def tools_of(session: SessionRecord | None, named: Tools) -> Tools:
    """Those of the request; where it names none, the session's."""
    return named or (tuple(dict(tool) for tool in session.tools) if session is not None else ())


def chat_tools(tools: Iterable[Mapping[str, Any]]) -> Tools:
    """Functions as the Responses API has them, in the shape that templates and engines take."""
    return tuple(
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        for tool in tools
    )


def standing_terms(session: SessionRecord, last: TurnRecord | None) -> tuple[str | None, Tools]:
    """System prompt and tools that the path to `last` was sent with."""
    asked: Mapping[str, Any] = (last.metadata.get(RESPONSE) or {}) if last is not None else {}
    return system_of(session, asked.get("instructions")), tools_of(session, chat_tools(asked.get("tools") or ()))
