"""What a compaction is planned on: a session's path to its head, as it stood when the plan was made."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from dataclasses import dataclass

from compression.budget import Policy, answer_reserve
from compression.conversation import Turn
from compression.plan import NoPlan, Plan, Urgency, plan
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement import Placement, choose
from gateway.fleet.replica import Replica
from gateway.sessions.command import Ask
from gateway.sessions.history import History, load
from gateway.sessions.homes import read_at_home, standing_pin
from gateway.sessions.models import Models
from gateway.sessions.paths import standing_path
from gateway.sessions.shown import shown
from gateway.sessions.sizing import Sizes, around, counter, sizes
from gateway.sessions.terms import standing_terms
from gateway.sessions.tokens import ModelTokens
from gateway.sessions.windows import window_of
from gateway.store.records import HEAD, SessionRecord
from gateway.store.sessions import Store


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`model` None: by chat messages, with estimated counts. `window`, `prompt_tokens` (of the path): tokens."""

    session: SessionRecord
    history: History
    turns: tuple[Turn, ...]
    policy: Policy
    model: ModelTokens | None
    window: int
    reserve_tokens: int
    prompt_tokens: int  # of the path as it is shown now
    sizes: Sizes

    @property
    def pinned(self) -> frozenset[str]:
        return self.history.standing.pinned

    @property
    def head_id(self) -> str:
        assert self.history.head.turn_id is not None
        return self.history.head.turn_id

    def ask(self) -> Ask:
        return standing_ask(self.session, self.policy, self.history)

    def plan(self, urgency: Urgency, *, incoming_tokens: int = 0, policy: Policy | None = None) -> Plan | NoPlan:
        return plan(
            self.sizes.turns,
            self.history.view.segments,
            window=self.window,
            reserve_tokens=self.reserve_tokens,
            overhead_tokens=self.sizes.overhead_tokens + incoming_tokens,
            policy=policy or self.policy,
            urgency=urgency,
            frame_tokens=self.sizes.frame_tokens,
        )


def standing_ask(session: SessionRecord, policy: Policy, history: History | None = None) -> Ask:
    """The session as its turns ask it, with nothing new: as the last of `history` did, where that named its own
    instructions or tools."""
    system, tools = standing_terms(session, history.last if history is not None else None)
    return Ask(session.model, (), system, tools=tools, old_reasoning=policy.reasoning)


def replica_for(
    model: str, history: History, fleet: Fleet, *, among: Collection[str] | None = None
) -> Placement | None:
    """Where the session's KV cache is, else the replica with the least work, of those named; None where none can take
    it now."""
    return choose(
        [r for r in fleet if among is None or r.name in among],
        model=model,
        pin=standing_pin(history, fleet),
        answered=history.answered(model),
        suits=lambda r: not history.counted or history.used_tokens < (_window(r) or math.inf),
        path=standing_path(history),
        outlook=fleet.outlook,
        now=fleet.now(),
        at=fleet.wall(),
    )


def _window(replica: Replica) -> int | None:
    return replica.capabilities.window if replica.capabilities is not None else None


async def take(
    store: Store,
    fleet: Fleet,
    models: Models,
    session: SessionRecord,
    policy: Policy,
    *,
    default_max_tokens: int,
    parent: str | None = HEAD,
    window: int | None = None,
) -> Snapshot | None:
    """`window`: as an engine's refusal showed it. None: the path has no turn, or nobody knows the window."""
    history = await load(store, session, parent)
    window = window or window_of(session.model, fleet, models, history)
    if history.head.turn_id is None or window is None:
        return None
    records = await store.path(session.tenant_id, session.id, history.head.turn_id)
    turns = tuple(record.turn for record in records)
    reads = read_at_home(session.model, history, models)
    standing = await shown(reads, standing_ask(session, policy, history), history)
    model = standing.model
    asked = session.policy.get("max_output_tokens")
    measured = await asyncio.to_thread(
        sizes,
        turns,
        history.view,
        history.standing.pinned,
        prompt_tokens=standing.tokens,
        count=counter(model),
        around=around(model),
        strip_reasoning=policy.reasoning == "strip",
    )
    return Snapshot(
        session,
        history,
        turns,
        policy,
        model,
        window,
        answer_reserve(window, asked, default_max_tokens),
        standing.tokens,
        measured,
    )
