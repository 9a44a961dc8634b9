"""What a new turn of a session goes on from: the session, its head, and how to read the history where it is needed.

A turn costs the same at any length: only the head's record is read; items and ids are loaded when a prompt has to be
rendered anew or sent as messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compression.budget import Reasoning
from compression.view import RAW, Folded, Placement, View, fold
from gateway.errors import NotFound
from gateway.fleet.chain import Chain
from gateway.fleet.identity import ModelIdentity
from gateway.fleet.placement import Pin
from gateway.sessions.items import root_meaning
from gateway.sessions.prompt import Head, Marks
from gateway.store.compaction_records import StandingView
from gateway.store.records import HEAD, SessionRecord, TurnRecord
from gateway.store.replicas import home_of
from gateway.store.sessions import Store

UNSEEN = StandingView(None, frozenset())  # the path as it is
TAIL = "tail"  # in a stored turn's metadata: what the next turn must know of this one's end


@dataclass(frozen=True, slots=True)
class History:
    """`head` of a stateless turn or an empty session is empty."""

    head: Head = field(default_factory=Head)
    session: SessionRecord | None = None
    last: TurnRecord | None = None  # without items
    open_calls: Mapping[str, str] = field(default_factory=dict)
    standing: StandingView = UNSEEN

    @property
    def view(self) -> View:
        """What is shown of the path."""
        return view_of(self.standing)

    @property
    def pin(self) -> Pin | None:
        """The replica that ran the last turn, or where the session was moved to since."""
        if self.last is None or not self.last.placement:
            return None
        home = home_of(self.last.placement)
        return Pin(str(home["replica"]), home.get("epoch"), self.last_used_at)

    @property
    def chain(self) -> Chain | None:
        """Where the path of the last turn ends, for placement; None where its ids are not known."""
        text = (self.last.metadata.get(TAIL) or {}).get("chain") if self.last is not None else None
        return Chain.of_text(text) if text else None

    def answered(self, model: str) -> ModelIdentity | None:
        """Which model of this name the path was answered by; None: no turn tells, so any may go on."""
        if self.last is None or self.last.model != model:
            return None
        told = (self.last.metadata.get(TAIL) or {}).get("answered")
        return ModelIdentity(told["fingerprint"]) if told is not None else None

    @property
    def last_used_at(self) -> float:
        """Seconds since 1970; 0 where there is no turn."""
        return 0.0 if self.last is None else self.last.completed_at or self.last.created_at

    @property
    def pictured(self) -> bool:
        """An image stands somewhere in the path: ids cannot carry it."""
        return self.last is not None and bool((self.last.metadata.get(TAIL) or {}).get("images"))

    @property
    def sent(self) -> bool:
        """A replica has read this path; it was not imported."""
        return self.last is not None and bool(self.last.placement)

    @property
    def counted(self) -> bool:
        """`used_tokens` counts the path as it is shown now: its last turn was sent through the same view."""
        if self.last is None or not self.sent:
            return False
        return bool((self.last.metadata.get(TAIL) or {}).get("view", "") == self.head.view)

    @property
    def used_tokens(self) -> int:
        """Tokens of the history as the engine last counted them, as it was shown then."""
        if self.last is None:
            return 0
        if self.last.tokens is not None:
            return self.last.tokens.path_tokens
        return int(self.last.usage.get("prompt_tokens") or 0) + int(self.last.usage.get("output_tokens") or 0)

    @property
    def turn_tokens(self) -> int:
        """Tokens that the last turn added; 0 where nobody knows. More where it was rendered anew."""
        tokens = self.last.tokens if self.last is not None else None
        return tokens.path_tokens - tokens.base_tokens if tokens is not None else 0

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
    standing = UNSEEN
    if session.view_version:
        standing = await store.view_of(session.tenant_id, session.id, turn_id)
    return after_turn(store, session, last, standing)


def view_of(standing: StandingView) -> View:
    made = standing.compaction
    return RAW if made is None or made.view is None else View.of_json(made.id, made.view)


def view_name(view: View, pinned: frozenset[str]) -> str:
    """Names what a view shows: the compaction, and which of the turns it covers are pinned by now."""
    if view.id is None:
        return ""
    shown = sorted(pinned & (view.covered | {cut.turn_id for cut in view.elisions}))
    return view.id + ("" if not shown else "+" + hashlib.sha256("\0".join(shown).encode()).hexdigest()[:16])


def after_turn(store: Store, session: SessionRecord, last: TurnRecord, standing: StandingView | None = None) -> History:
    """The history that ends with `last`, read lazily, as `standing` shows it."""
    tenant, turn_id = session.tenant_id, last.turn.id
    standing = standing or UNSEEN
    view, pinned = view_of(standing), standing.pinned

    async def load_items(placement: Placement, reasoning: Reasoning) -> Folded:
        turns = [record.turn for record in await store.path(tenant, session.id, turn_id)]
        return fold(turns, view, pinned=pinned, placement=placement, reasoning=reasoning)

    async def load_ids() -> bytes:
        return await store.path_ids(tenant, session.id, turn_id)

    shape: Mapping[str, Any] = last.metadata.get(TAIL) or {}
    head = Head(
        turn_id=turn_id,
        tokens=last.tokens,
        reasoning=bool(shape.get("reasoning")),
        calls=tuple(_call(id, name) for id, name in (shape.get("open_calls") or {}).items()),
        foreign_end=bool(shape.get("foreign_end")),
        view=view_name(view, pinned),
        marks=Marks.of_json(shape.get("marks")),
        load_items=load_items,
        load_ids=load_ids,
    )
    calls = dict(shape.get("open_calls") or {})
    return History(head=head, session=session, last=last, open_calls=calls, standing=standing)


def _call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
