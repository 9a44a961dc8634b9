"""How this gateway tells a tenant of its responses: their names, their JSON, their streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from gateway.api.responses.asked import ENCRYPTED
from gateway.api.responses.events import Event, ResponseEvents
from gateway.api.responses.inputs import sealed_reasoning
from gateway.api.responses.shapes import Standing, of_ended, of_record, of_started, response_json
from gateway.api.responses.told import plain, read
from gateway.api.state import Gateway
from gateway.api.streams import event
from gateway.errors import GatewayError
from gateway.sessions.resume import resumed
from gateway.sessions.run import Piece, TurnRun, TurnStarted
from gateway.sessions.terms import RESPONSE
from gateway.store.records import TurnRecord


@dataclass(frozen=True, slots=True)
class Teller:
    """`include`: what a GET asks for beside what the response was asked with."""

    gateway: Gateway
    tenant_id: str
    include: frozenset[str] = frozenset()

    def name(self, turn_id: str) -> str:
        return self.gateway.response_ids.of_turn(self.tenant_id, turn_id)

    def json(self, standing: Standing, *, logprobs: list[Any] | None = None) -> dict[str, Any]:
        tokens = self.gateway.models.tokens(standing.model)
        seal = self._seal if self._sealed(standing.asked) else None
        return response_json(standing, count=tokens.count if tokens is not None else None, logprobs=logprobs, seal=seal)

    def _sealed(self, asked: Mapping[str, Any]) -> bool:
        return ENCRYPTED in self.include or ENCRYPTED in asked.get("include", ())

    def _seal(self, item: Mapping[str, Any]) -> str:
        return sealed_reasoning(self.gateway.content_seal, self.tenant_id, item)

    def of_record(self, record: TurnRecord) -> dict[str, Any]:
        return self.json(of_record(self.name(record.turn.id), record))

    def of_run(self, run: TurnRun) -> dict[str, Any]:
        """As far as it has come: in progress, or ended."""
        events = [each for happened in run.events if (each := plain(happened)) is not None]
        started = next(each for each in events if isinstance(each, TurnStarted))
        standing = of_started(self.name(run.turn_id), started)
        if run.ended is None:
            return self.json(standing)
        told = ResponseEvents(self.name, lambda standing: {}, now=self.gateway.clock)
        if any(isinstance(each, Piece) and each.logprobs for each in events):
            for each in events:
                told.of(each)
        return self.json(of_ended(standing, run.ended, self.gateway.clock()), logprobs=told.logprobs or None)

    def events(self, asked: Mapping[str, Any] = {}, ended_at: float | None = None) -> ResponseEvents:
        """`ended_at`: seconds since 1970, where the turn has ended before it is told."""

        def finished(item: dict[str, Any]) -> dict[str, Any]:
            return {**item, "encrypted_content": self._seal(item)} if item["type"] == "reasoning" else item

        made = partial(ResponseEvents, self.name, self.json, now=lambda: ended_at or self.gateway.clock())
        return made(finished=finished) if self._sealed(asked) else made()

    async def live(self, run: TurnRun) -> AsyncGenerator[bytes, None]:
        """The stream of a run from its start; each value is what has happened since the last one, encoded."""
        told, seen, last = self.events(), 0, 0
        with run.reading():
            while True:
                await run.wait_beyond(seen)
                out = []
                for happened in run.events[seen:]:
                    known = plain(happened)
                    if isinstance(known, TurnStarted):
                        told = self.events(known.metadata.get(RESPONSE) or {})
                    for made in told.of(known) if known is not None else ():
                        out.append(encoded(made))
                        last = made["sequence_number"]
                seen = len(run.events)
                if out:
                    yield b"".join(out)
                if run.ended is not None and seen == len(run.events):
                    return
                if run.moved:
                    yield encoded(self._moved(run, last))
                    return

    def _moved(self, run: TurnRun, last: int) -> Event:
        """It has no number of its own: what the reader has seen stays the last."""
        error = run.handed_over()
        again = f"{error.message}: GET /v1/responses/{self.name(run.turn_id)}?stream=true&starting_after={last}"
        return {"type": "error", "sequence_number": last, "code": error.code, "message": again, "param": None}

    async def again(
        self, record: TurnRecord, after: int | None, *, watching: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """The stream past the number `after`, wherever the turn runs or ran. Always ends in its last event. `watching`:
        the reader counts as none."""
        told, last = self.events(record.metadata.get(RESPONSE) or {}, record.completed_at), None
        async with aclosing(resumed(self.gateway.room, record, 0, watching=watching)) as events:
            async for _, _, data in events:
                known = read(data)
                for made in told.of(known) if known is not None else ():
                    last = made
                    if after is None or made["sequence_number"] > after:
                        yield encoded(made)
        if last is not None and after is not None and last["sequence_number"] < after:
            yield encoded(
                {**last, "sequence_number": after + 1}
            )  # what was told piece by piece is told in fewer by now


def failed_response(error: GatewayError) -> bytes:
    """The last event of a stream that breaks off; it has no number: what the reader has seen stays the last."""
    told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return event(orjson.dumps(told), name="error")


def encoded(made: Event) -> bytes:
    return event(orjson.dumps(made), name=made["type"], id=made["sequence_number"])
