"""Short ways to say a turn in a test."""

from __future__ import annotations

from typing import Any

from compression.conversation import Item
from gateway.store.records import BeginTurn, FinishTurn, NewSession, TurnTokens

TENANT, SESSION, OWNER = "acme", "s1", "gw/1"


def said(text: str, role: str = "user") -> tuple[Item, ...]:
    return (Item("message", {"type": "message", "role": role, "content": text}),)


def session(id: str = SESSION, **other: Any) -> NewSession:
    return NewSession(id=id, tenant_id=other.pop("tenant_id", TENANT), model="small", **other)


def begin(turn_id: str, head: str | None = None, **other: Any) -> BeginTurn:
    given = {
        "tenant_id": TENANT,
        "session_id": SESSION,
        "owner": OWNER,
        "lease_s": 5.0,
        "input": said(f"ask {turn_id}"),
    }
    return BeginTurn(turn_id=turn_id, model="small", expected_head=head, **(given | other))


def finish(turn_id: str, fence: int, **other: Any) -> FinishTurn:
    given: dict[str, Any] = {
        "tenant_id": TENANT,
        "session_id": SESSION,
        "status": "completed",
        "output": said(f"answer {turn_id}", "assistant"),
        "finish_reason": "stop",
        "tokens": None,
        "meaning": None,
        "usage": {},
        "placement": {},
        "prefix_report": {},
    }
    return FinishTurn(turn_id=turn_id, fence=fence, **(given | other))


def ids(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def tokens(base: int, prompt: bytes, output: bytes, **other: Any) -> TurnTokens:
    path = base + (len(prompt) + len(output)) // 4
    return TurnTokens("fp", base, prompt, output, path, b"digest-%d" % path, **other)
