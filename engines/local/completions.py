"""OpenAI's `POST /v1/completions` on the engine: prompt as text, ids, or a list of either; streamed or whole.

What is not here is refused by name, never ignored: n > 1, best_of > 1, echo, suffix.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from starlette.types import Receive, Scope, Send

from engines.contract import Usage
from engines.local import checks
from engines.local.asgi import send_events, send_json, while_connected
from engines.local.completion_ask import Ask, read_ask
from engines.local.refusal import Refusal
from engines.local.wire import Event, WireRequest

if TYPE_CHECKING:
    from engines.local.server import Front


class Completions:
    """The door. `front` gives texts, admission and the model's name."""

    def __init__(self, front: Front, now: Callable[[], float]) -> None:
        """`now`: seconds since 1970."""
        self._front = front
        self._now = now
        self._numbers = itertools.count(1)

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/completions"""
        fields = await self._front.json(scope, receive)
        self._front.require_model()
        ask = read_ask(fields, self._front.backend.info.vocab)
        self._front.require_name(ask.model)
        self._front.admission.check(ask.priority, len(ask.prompts))
        answer_id = ask.request_id or f"cmpl-{self._front.backend.info.epoch}-{next(self._numbers)}"
        requests = [await self._request(ask, prompt, f"{answer_id}-{at}") for at, prompt in enumerate(ask.prompts)]
        shape = Shape(answer_id, ask, [request.delta for request in requests], int(self._now()))
        if ask.stream:
            await send_events(send, receive, self._streamed(shape, requests))
        else:
            async with while_connected(receive):
                await send_json(send, await self._whole(shape, requests))

    async def _whole(self, shape: Shape, requests: Sequence[WireRequest]) -> dict[str, Any]:
        choices = [Choice() for _ in requests]
        async with aclosing(self._events(requests)) as events:
            async for at, event in events:
                choices[at].add(read_event(event))
        return shape.whole(choices)

    async def _request(self, ask: Ask, prompt: str | list[int], request_id: str) -> WireRequest:
        if isinstance(prompt, str):
            prompt = await (await self._front.texts()).encode(prompt, special=ask.add_special_tokens)
            if not prompt:
                raise checks.refuse("prompt", "has no tokens")
        delta = checks.u32_bytes(prompt)
        return WireRequest(request_id, ask.model, delta, ask.sampling, salt=ask.salt, priority=ask.priority)

    async def _streamed(self, shape: Shape, requests: Sequence[WireRequest]) -> AsyncGenerator[bytes, None]:
        choices = [Choice() for _ in requests]
        begun = False
        try:
            async with aclosing(self._events(requests)) as events:
                async for at, event in events:
                    piece = choices[at].add(read_event(event))
                    if piece is not None:
                        begun = True
                        yield _line(shape.chunk(at, choices[at], piece))
        except Refusal as refused:
            if not begun:
                raise
            yield _line({"error": refused.fields()})
            return
        if shape.ask.include_usage:
            yield _line(shape.usage_chunk(choices))

    async def _events(self, requests: Sequence[WireRequest]) -> AsyncGenerator[tuple[int, Event], None]:
        """The events of all, as they come. Raises Refusal for any; the others are then cancelled."""
        if len(requests) == 1:
            async with aclosing(self._front.admission.generate(requests[0])) as answer:
                async for events in answer:
                    for event in events:
                        yield 0, event
            return
        queue: asyncio.Queue[tuple[int, list[Event] | Refusal | None]] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(at, request, queue)) for at, request in enumerate(requests)]
        try:
            left = len(tasks)
            while left:
                at, item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, Refusal):
                    raise item
                else:
                    for event in item:
                        yield at, event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(
        self, at: int, request: WireRequest, queue: asyncio.Queue[tuple[int, list[Event] | Refusal | None]]
    ) -> None:
        try:
            async with aclosing(self._front.admission.generate(request)) as answer:
                async for events in answer:
                    queue.put_nowait((at, events))
        except Refusal as refused:
            queue.put_nowait((at, refused))
        queue.put_nowait((at, None))


def read_event(event: Event) -> dict[str, Any]:
    """The event's fields; an error event is raised as what it says."""
    fields: dict[str, Any] = orjson.loads(event.data)
    if event.kind == "error":
        raise Refusal.of(fields["error"])
    if event.usage is not None:
        fields["usage"] = event.usage
    return fields


def _line(value: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(value)


@dataclass(slots=True)
class Choice:
    """One answer as it grows."""

    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    usage: Usage | None = None
    chars: int = 0  # of the tokens' texts whose log-probabilities were given: OpenAI's text_offset
    sent: bool = False

    def add(self, fields: dict[str, Any]) -> dict[str, Any] | None:
        """Take an event in; None for the one that says only that the prompt is in."""
        if "ids" not in fields:
            return None
        self.text.append(fields["text"])
        self.ids += fields["ids"]
        self.logprobs += fields.get("logprobs", ())
        self.finish = fields.get("finish")
        self.usage = fields.get("usage", self.usage)
        return fields


@dataclass(frozen=True, slots=True)
class Shape:
    """OpenAI's shapes of one answer."""

    id: str
    ask: Ask
    prompts: Sequence[bytes]
    created: int  # seconds since 1970

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        made = []
        for at, choice in enumerate(choices):
            fields = {"text": "".join(choice.text), "ids": choice.ids, "logprobs": choice.logprobs}
            made.append(self._choice(at, choice, fields))
        return self._object(made) | {"usage": _usage(choices)}

    def chunk(self, at: int, choice: Choice, fields: dict[str, Any]) -> dict[str, Any]:
        return self._object([self._choice(at, choice, fields)])

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return self._object([]) | {"usage": _usage(choices)}

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created} | {
            "model": self.ask.model,
            "choices": choices,
        }

    def _choice(self, at: int, choice: Choice, fields: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {
            "index": at,
            "text": fields["text"],
            "logprobs": _logprobs(choice, fields.get("logprobs", ()))
            if self.ask.sampling.logprobs is not None
            else None,
            "finish_reason": choice.finish,
        }
        if self.ask.return_token_ids:
            made["token_ids"] = fields["ids"]
            if not choice.sent:
                made["prompt_token_ids"] = list(checks.u32(self.prompts[at]))
        choice.sent = True
        return made

    def _logprobs(self, choice: Choice, entries: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        return None if self.ask.sampling.logprobs is None else _logprobs(choice, entries)


def _logprobs(choice: Choice, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    offsets = []
    for entry in entries:
        offsets.append(choice.chars)
        choice.chars += len(entry["text"])
    return {
        "tokens": [entry["text"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{text: logprob for _, text, logprob in entry["top"]} for entry in entries],
        "text_offset": offsets,
    }


def _usage(choices: Sequence[Choice]) -> dict[str, Any]:
    used = [choice.usage for choice in choices if choice.usage is not None]
    prompt = sum(usage.prompt_tokens for usage in used)
    output = sum(usage.output_tokens for usage in used)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens or 0 for usage in used)},
    }
