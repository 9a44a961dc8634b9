"""Where a turn goes when its replica fails: before the first byte anywhere it fits, later where it goes on exactly.

Each replica is tried once, and an answer moves at most MOST_MOVES times. Sends nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from engines.contract import Capabilities, Delta, EngineError, IdsPrompt
from engines.output import TextStream
from gateway.errors import BadRequest, ContextTooLong, GatewayError
from gateway.fleet.identity import ModelIdentity
from gateway.fleet.placement import Placement
from gateway.sessions.command import TurnCommand
from gateway.sessions.continuation import (
    Begun,
    Continuation,
    ended_already,
    obstacle,
    prompt_from,
    read_again,
    reason_of,
    room_for,
)
from gateway.sessions.demands import check_sampling
from gateway.sessions.fit import prepared_for
from gateway.sessions.history import History
from gateway.sessions.homes import place
from gateway.sessions.prepare import Prepared
from gateway.sessions.room import TurnRoom
from gateway.sessions.tokens import ModelTokens

MOST_MOVES = 4  # of one answer in its course
LONG_IDS = 256  # an answer of more is read again in a thread


class Failover:
    """What one turn has tried, and the moves of its answer."""

    def __init__(self, room: TurnRoom, command: TurnCommand) -> None:
        self._room = room
        self._command = command
        self._tried: list[str] = []
        self.before: Capabilities | None = None  # of the replica that the first ids came from
        self.moves: list[dict[str, Any]] = []  # from, to, at_tokens, reason
        self.why: list[str] = []  # replicas that could not go on, and why

    def failed(self, placement: Placement) -> None:
        """It is not asked again."""
        self._tried.append(placement.replica.name)
        self.before = self.before or placement.replica.capabilities

    async def anew(self, history: History) -> Prepared | None:
        """The turn made ready for another replica, before its first byte; None where there is none.

        Raises ContextTooLong where only replicas are left whose window it does not fit.
        """
        too_long: ContextTooLong | None = None
        session_id = self._command.session_id
        name = self._room.session_name(self._command.tenant_id, session_id) if session_id is not None else None
        while (placement := self._next(history)) is not None:
            try:
                prepared = await prepared_for(self._room, self._command, history, name, placement)
                self.before = None  # what the others were does not matter: nothing came of them
                return prepared
            except ContextTooLong as error:
                too_long = too_long or error
            except GatewayError:
                pass  # what was asked cannot be done there
            self._tried.append(placement.replica.name)
        if too_long is not None:
            raise too_long
        return None

    async def onward(
        self, history: History, prepared: Prepared, begun: Begun, left: Placement, error: EngineError
    ) -> Continuation | Delta | None:
        """Where the answer goes on after `left`; its last delta where nothing was missing but that; None: nowhere."""
        found = await self.here(history, prepared, begun)
        if not isinstance(found, Continuation):
            return found
        self.moves.append(
            {
                "from": left.replica.name,
                "to": found.placement.replica.name,
                "at_tokens": begun.count,
                "reason": reason_of(error),
            }
        )
        return found

    async def here(self, history: History, prepared: Prepared, begun: Begun) -> Continuation | Delta | None:
        """Where the answer goes on; its last delta where nothing was missing but that; None: nowhere."""
        prompt, tokens = prepared.prompt, prepared.tokens
        if not isinstance(prompt, IdsPrompt) or tokens is None:
            self.why.append("it went out as messages: what was generated has no ids to go on from")
            return None
        if begun.count >= LONG_IDS:
            text = await asyncio.to_thread(read_again, tokens, prompt, prepared.sampling, begun)
        else:
            text = read_again(tokens, prompt, prepared.sampling, begun)
        if text is None:
            self.why.append("its text is not what its ids say")
            return None
        if (last := ended_already(text, prepared.sampling, begun, prepared.prompt_tokens)) is not None:
            return last
        spare: Continuation | None = None
        began = ModelIdentity(prepared.placement.fingerprint)
        while len(self.moves) < MOST_MOVES and (placement := self._next(history, began)) is not None:
            found = self._at(placement, prepared, tokens, prompt, begun)
            if isinstance(found, str):
                self.why.append(f"{placement.replica.name}: {found}")
            elif found.sampling is prepared.sampling:
                return self._at_last(found, text)
            else:
                spare = spare or found  # a smaller window: only where no other is left
            self._tried.append(placement.replica.name)
        return self._at_last(spare, text) if spare is not None else None

    def _at_last(self, found: Continuation, text: TextStream) -> Continuation:
        replica = found.placement.replica
        self._tried.append(replica.name)
        assert replica.capabilities is not None
        if replica.capabilities.continues:
            return found
        return replace(found, prompt=replace(found.prompt, generated=None), text=text)

    def _next(self, history: History, began: ModelIdentity | None = None) -> Placement | None:
        """`began`: who began the answer, where one has begun."""
        command = self._command
        try:
            return place(
                command.ask.model,
                history,
                self._room.fleet,
                self._tried,
                tenant_id=command.tenant_id,
                going_on=began is not None,
                answered=began,
            )
        except GatewayError:
            return None

    def _at(
        self, placement: Placement, prepared: Prepared, tokens: ModelTokens, prompt: IdsPrompt, begun: Begun
    ) -> Continuation | str:
        """How it goes on there, or why not."""
        replica, ask = placement.replica, self._command.ask
        caps = replica.capabilities
        if placement.changed_from is not None:
            there_now = ModelIdentity(placement.fingerprint)
            return f"it serves another model under this name: {there_now}, where {placement.changed_from} began"
        there = self._room.models.by_ids(ask.model, replica)
        if caps is None or there is None or there.fingerprint() != tokens.fingerprint():
            return "it is not known to read the same ids"
        if (why := obstacle(prepared.sampling, self.before, caps)) is not None:
            return why
        window = min(tokens.window, caps.window or tokens.window)
        sampling = room_for(prepared.sampling, prepared.prompt_tokens, begun.count, window)
        if isinstance(sampling, str):
            return sampling
        try:
            check_sampling(sampling, ask.shape, caps, replica.name)
        except BadRequest as error:
            return error.message
        return Continuation(placement, prompt_from(prompt, begun), sampling, None, begun.count)
