"""What a compaction is planned on: a session's path to its head, as it stood when the plan was made."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from compression.budget import Policy, answer_reserve
from compression.conversation import Turn
from compression.plan import NoPlan, Plan, Urgency, plan
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement import Placement, choose
from gateway.sessions.command import Ask
from gateway.sessions.history import History, load
from gateway.sessions.models import Models
from gateway.sessions.shown import shown
from gateway.sessions.sizing import Sizes, around, counter, sizes
from gateway.sessions.tokens import ModelTokens
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
        return standing_ask(self.session, self.policy)

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


def standing_ask(session: SessionRecord, policy: Policy) -> Ask:
    """The session as its turns ask it, with nothing new."""
    tools = tuple(dict(tool) for tool in session.tools)
    return Ask(session.model, (), session.system, tools=tools, old_reasoning=policy.reasoning)


def window_of(model: str, fleet: Fleet, models: Models) -> int | None:
    """The smallest window that a turn of this model may meet."""
    tokens = models.tokens(model)
    windows = [r.capabilities.window for r in fleet if r.serves(model) and r.capabilities is not None]
    known = [window for window in (*windows, tokens.window if tokens is not None else None) if window is not None]
    return min(known, default=None)


def replica_for(model: str, history: History, fleet: Fleet) -> Placement | None:
    """Where the session's KV cache is, else the replica with the least work; None where none can take it now."""
    return choose(list(fleet), model=model, pin=history.pin, path_tokens=history.used_tokens, now=fleet.now())


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
    window = window or window_of(session.model, fleet, models)
    if history.head.turn_id is None or window is None:
        return None
    records = await store.path(session.tenant_id, session.id, history.head.turn_id)
    turns = tuple(record.turn for record in records)
    standing = await shown(models.tokens(session.model), standing_ask(session, policy), history)
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
