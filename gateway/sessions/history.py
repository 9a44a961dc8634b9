"""What a new turn of a session goes on from: the session, its head, and how to read the history where it is needed.

A turn costs the same at any length: only the head's record is read; items and ids are loaded when a prompt has to be
rendered anew or sent as messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compression.conversation import Item
from gateway.errors import NotFound
from gateway.fleet.placement import Pin
from gateway.sessions.items import root_meaning
from gateway.sessions.prompt import Head
from gateway.store.records import HEAD, SessionRecord, TurnRecord
from gateway.store.sessions import Store

TAIL = "tail"  # in a stored turn's metadata: what the next turn must know of this one's end


@dataclass(frozen=True, slots=True)
class History:
    """`head` of a stateless turn or an empty session is empty."""

    head: Head = field(default_factory=Head)
    session: SessionRecord | None = None
    last: TurnRecord | None = None  # without items
    open_calls: Mapping[str, str] = field(default_factory=dict)

    @property
    def pin(self) -> Pin | None:
        """The replica that ran the last turn."""
        if self.last is None or not self.last.placement:
            return None
        return Pin(str(self.last.placement["replica"]), self.last.placement.get("epoch"))

    @property
    def pictured(self) -> bool:
        """An image stands somewhere in the path: ids cannot carry it."""
        return self.last is not None and bool((self.last.metadata.get(TAIL) or {}).get("images"))

    @property
    def used_tokens(self) -> int:
        """Tokens of the history as the engine last counted them."""
        if self.last is None:
            return 0
        if self.last.tokens is not None:
            return self.last.tokens.path_tokens
        return int(self.last.usage.get("prompt_tokens") or 0) + int(self.last.usage.get("output_tokens") or 0)

    def meaning(self, system: str | None) -> bytes:
        if self.last is not None and self.last.meaning is not None:
            return self.last.meaning
        return root_meaning(system)


async def load(store: Store, session: SessionRecord, parent: str | None) -> History:
    """The history up to `parent` (HEAD, a turn id, or None for a new root). Raises NotFound for a foreign turn."""
    turn_id = session.head_turn_id if parent == HEAD else parent
    if turn_id is None:
        return History(session=session)
    last = await store.last_turn(session.tenant_id, session.id, turn_id)
    if last is None:
        raise NotFound(f"no turn {turn_id[:64]!r} in this session", code="turn_not_found", param="parent_turn_id")
    return after_turn(store, session, last)


def after_turn(store: Store, session: SessionRecord, last: TurnRecord) -> History:
    """The history that ends with `last`, read lazily."""
    tenant, turn_id = session.tenant_id, last.turn.id

    async def load_items() -> Sequence[Item]:
        return tuple(item for record in await store.path(tenant, session.id, turn_id) for item in record.turn.items)

    async def load_ids() -> bytes:
        return await store.path_ids(tenant, session.id, turn_id)

    shape: Mapping[str, Any] = last.metadata.get(TAIL) or {}
    head = Head(
        turn_id=turn_id,
        tokens=last.tokens,
        reasoning=bool(shape.get("reasoning")),
        calls=tuple(_call(id, name) for id, name in (shape.get("open_calls") or {}).items()),
        foreign_end=bool(shape.get("foreign_end")),
        load_items=load_items,
        load_ids=load_ids,
    )
    return History(head=head, session=session, last=last, open_calls=dict(shape.get("open_calls") or {}))


def _call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
