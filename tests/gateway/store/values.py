"""Short ways to say a turn in a test."""

from __future__ import annotations

from typing import Any

from compression.conversation import Item
from gateway.store.compaction_records import NewCompaction
from gateway.store.records import BeginTurn, Begun, FinishTurn, NewSession, TurnTokens
from gateway.store.sessions import Store

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


async def talk(store: Store, *turn_ids: str, parent: str | None = None, **other: Any) -> None:
    """Answered turns, one below the other from `parent` on, the last one the head; the session is made where it is not.

    `other` may name another tenant and session.
    """
    create = session(other.get("session_id", SESSION), tenant_id=other.get("tenant_id", TENANT))
    for turn_id in turn_ids:
        begun = await store.begin_turn(begin(turn_id, parent=parent, create=create, **other))
        assert isinstance(begun, Begun), begun
        await store.finish_turn(finish(turn_id, begun.fence, **other))
        parent = turn_id


def compaction(id: str, head: str, view_version: int, base: str | None = None, **other: Any) -> NewCompaction:
    given: dict[str, Any] = {
        "tenant_id": TENANT,
        "session_id": SESSION,
        "trigger": "background",
        "plan": {"way": "summarize"},
        "owner": OWNER,
        "deadline_s": 60.0,
    }
    return NewCompaction(id=id, base_id=base, head_turn_id=head, view_version=view_version, **(given | other))


def committing(anchor: str, expected_view: int, **other: Any) -> dict[str, Any]:
    """What `commit_compaction` takes beside the names."""
    made: dict[str, Any] = {"view": {"segments": [{"text": "..."}]}, "plan": {"way": "summarize"}, "report": {}}
    return made | {"anchor_turn_id": anchor, "expected_view": expected_view} | other


async def compact(store: Store, id: str, anchor: str, head: str) -> int:
    """Begin and commit a compaction of the path to `head` on the view that stands there; the new view_version."""
    standing = await store.view_of(TENANT, SESSION, head)
    base = standing.compaction and standing.compaction.id
    assert await store.begin_compaction(compaction(id, head, standing.view_version, base)) is not None
    return await store.commit_compaction(TENANT, SESSION, id, **committing(anchor, standing.view_version))
