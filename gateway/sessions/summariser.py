"""Asks a model for the summary of some turns: as a suffix of the live prompt, where that is cached, or as a prompt of
its own to another model. What comes back is not trusted: `compression.summarize` checks it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from compression.conversation import Item, Turn
from compression.plan import Range
from compression.summarize import request, standalone
from engines.contract import ChatPrompt, EngineError, GenerateRequest, IdsPrompt, Sampling
from gateway.errors import GatewayError
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement import Placement
from gateway.fleet.replica import Replica
from gateway.sessions.answer import AnswerParser
from gateway.sessions.command import Input
from gateway.sessions.history import History
from gateway.sessions.items import message
from gateway.sessions.models import Models
from gateway.sessions.prompt import build, chat_messages
from gateway.sessions.reader import AnswerReader
from gateway.sessions.sizing import counter
from gateway.sessions.snapshot import Snapshot, replica_for
from gateway.sessions.windows import window_at
from gateway.store.records import SessionRecord
from gateway.store.usage_records import Amount, Kind

BACKGROUND = 10  # GenerateRequest.priority: turns run first
SOURCE_SHARE = 0.75  # of another model's window: what it is shown of the turns


@dataclass(frozen=True, slots=True)
class Asked:
    """What a model said. `text` None: it was not asked, or gave nothing; `problem` says why."""

    text: str | None
    finished: bool = False
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    problem: str = ""


def beside(session_name: str) -> str:
    """The name under which a replica keeps what a session's compactions read, apart from the session's own path, so
    that it can be erased with it."""
    return f"{session_name}.compaction"


class Summariser:
    """`spent` hears of what engines computed for it: (session, model, kind, how much)."""

    def __init__(
        self,
        fleet: Fleet,
        models: Models,
        *,
        timeout_s: float,
        spent: Callable[[SessionRecord, str, Kind, Amount], object] = lambda *_: None,
    ) -> None:
        self._fleet = fleet
        self._models = models
        self._timeout_s = timeout_s
        self._spent = spent

    async def ask(
        self, taken: Snapshot, part: Range, *, name: str, salt: str, request_id: str, urgent: bool = False
    ) -> Asked:
        """The summary of these turns, as the model wrote it. Never raises but for a cancel: no answer is an answer."""
        turns = part.of(taken.turns)
        model = taken.policy.summariser or taken.session.model
        history = taken.history if model == taken.session.model else History()
        placement = replica_for(model, history, self._fleet)
        if placement is None:
            return Asked(None, model=model, problem=f"no replica that serves {model[:100]!r} can be asked now")
        try:
            prompt = await self._prompt(taken, turns, part.budget_tokens, model, placement)
        except GatewayError as error:
            return Asked(None, model=model, problem=f"the request for a summary cannot be made: {error.message}")
        if prompt is None:
            return Asked(None, model=model, problem="no room in the window for a request and its answer")
        sampling = Sampling(part.budget_tokens + part.budget_tokens // 4, temperature=0.0)
        tokens = self._models.by_ids(model, placement.replica)
        reader = AnswerReader(None, lambda kind: kind)
        if isinstance(prompt, IdsPrompt) and tokens is not None:
            prompt = replace(prompt, session=name)
            sampling = replace(sampling, stop_token_ids=tokens.stop_ids)
            format = self._models.format(tokens)
            if format.kind != "plain" or format.reasoning:
                reader = AnswerReader(AnswerParser(tokens, prompt=prompt.delta, format=format), lambda kind: kind)
        asked = GenerateRequest(request_id, model, prompt, sampling, salt, 0 if urgent else BACKGROUND)
        problem = ""
        try:
            async with asyncio.timeout(self._timeout_s):
                await _read(placement.replica, asked, reader)
        except TimeoutError:
            problem = f"no whole summary within {self._timeout_s:g} s"
        except EngineError as error:
            problem = f"{placement.replica.name}: {error}"
        told = self._told(model, reader, problem)
        amount = Amount(1, told.prompt_tokens, told.cached_tokens, told.output_tokens)
        self._spent(taken.session, model, "summary", amount)
        return told

    async def prefill(
        self,
        replica: Replica,
        session: SessionRecord,
        ids: bytes,
        *,
        name: str,
        salt: str,
        request_id: str,
        system_tokens: int = 0,
        min_bits: int = 0,
    ) -> int:
        """Have the replica read these ids, so that the next prompt that begins with them finds them cached -> tokens
        that it had to compute. Raises EngineError, TimeoutError."""
        reader, model = AnswerReader(None, lambda kind: kind), session.model
        prompt = replace(_whole(ids, name), system_tokens=system_tokens)
        asked = GenerateRequest(
            request_id, model, prompt, Sampling(1, temperature=0.0), salt, BACKGROUND, min_bits=min_bits
        )
        async with asyncio.timeout(self._timeout_s):
            await _read(replica, asked, reader)
        usage, read = reader.usage, len(ids) // 4
        cached = 0 if usage is None else usage.cached_tokens or 0
        prompt_tokens = read if usage is None else usage.prompt_tokens
        self._spent(session, model, "prefill", Amount(1, prompt_tokens, cached))
        return prompt_tokens - cached

    def _told(self, model: str, reader: AnswerReader, problem: str) -> Asked:
        usage, text = reader.usage, "".join(i.text for i in reader.answer.items(complete=True) if i.type == "message")
        return Asked(
            None if problem else text,
            reader.finish == "stop",
            model,
            usage.prompt_tokens if usage is not None else 0,
            (usage.cached_tokens or 0) if usage is not None else 0,
            usage.output_tokens if usage is not None else 0,
            problem,
        )

    async def _prompt(
        self, taken: Snapshot, turns: Sequence[Turn], budget: int, model: str, placement: Placement
    ) -> IdsPrompt | ChatPrompt | None:
        """The live prompt and the request after it where that fits; else, or to another model, a prompt of its own."""
        window = window_at(model, placement.replica, self._models)
        if model == taken.session.model:
            prompt, tokens = await self._suffix(taken, turns, budget, placement.replica)
            if window is None or tokens + 2 * budget < window:
                return prompt
        limit = int(SOURCE_SHARE * (window or taken.window)) - 2 * budget
        if limit <= 0:
            return None
        count = counter(self._models.tokens(model))
        messages = await asyncio.to_thread(standalone, turns, budget_tokens=budget, source_tokens=limit, count=count)
        by_ids = self._models.by_ids(model, placement.replica)
        if by_ids is None:
            return ChatPrompt(messages)
        ids = await asyncio.to_thread(by_ids.render, messages)
        return _whole(ids)

    async def _suffix(
        self, taken: Snapshot, turns: Sequence[Turn], budget: int, replica: Replica
    ) -> tuple[IdsPrompt | ChatPrompt, int]:
        """The session's prompt with the request as its last user message -> it, and its tokens."""
        last: Item = message("user", request(turns, budget_tokens=budget))
        ask = replace(taken.ask(), input=(Input(last),))
        tokens = self._models.by_ids(taken.session.model, replica)
        if tokens is not None and taken.history.head.tokens is not None:
            built = await build(tokens, ask, taken.history.head, session=None)
            return built.ids, built.ids.num_tokens
        placement = tokens.placement if tokens is not None else "exchange"
        folded = await taken.history.head.load_items(placement, ask.old_reasoning)
        more = counter(tokens)(last.text)
        return ChatPrompt(chat_messages(ask, folded), tools=ask.tools, tool_choice="none" if ask.tools else None), (
            taken.prompt_tokens + more
        )


def _whole(ids: bytes, session: str | None = None) -> IdsPrompt:
    async def whole() -> bytes:
        return ids

    return IdsPrompt(ids, len(ids) // 4, whole, session)


async def _read(replica: Replica, asked: GenerateRequest, reader: AnswerReader) -> None:
    async with (
        replica.taken(asked.cache_salt, background=asked.priority > 0),
        aclosing(replica.engine.generate(asked)) as stream,
    ):
        async for delta in stream:
            reader.push(delta)
