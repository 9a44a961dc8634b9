"""`turnkeep engine` over the wire of docs/engine-wire.md: the base that the replica holds, and the delta."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any
from urllib.parse import quote

import orjson

from engines.contract import (
    Base,
    Capabilities,
    ChatPrompt,
    Delta,
    EngineBroken,
    EngineLoad,
    GenerateRequest,
    IdsPrompt,
    TokenLogprob,
    UnknownBase,
    Unsupported,
    Usage,
)
from engines.local.wire import CONTENT_TYPE, WireRequest, encode_generate
from engines.remote.answer import AnswerStream
from engines.remote.http import Upstream
from engines.remote.replies import check, json_of

_FINISH = frozenset({"stop", "length", "cancelled"})
_SETS = frozenset({"grammars", "sampling"})
_TUPLES = frozenset({"models", "unseen"})


class TurnkeepEngine:
    """One replica of our own engine. Owns `upstream` and closes it."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._takes_shift = False  # until its capabilities say so: an older replica refuses the field

    @property
    def name(self) -> str:
        return self._upstream.name

    async def capabilities(self) -> Capabilities:
        found = json_of(await self._upstream.get("/turnkeep/v1/capabilities"), self.name)
        known: dict[str, Any] = {}
        for field in fields(Capabilities):
            if (value := found.get(field.name)) is None:
                continue
            known[field.name] = (
                frozenset(value) if field.name in _SETS else tuple(value) if field.name in _TUPLES else value
            )
        try:
            capabilities = Capabilities(**{**known, "kind": "turnkeep"})
        except TypeError as error:
            raise self._broken(f"its capabilities lack a field: {error}") from error
        self._takes_shift = capabilities.takes_shift
        return capabilities

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        stream = await self._open(request)
        try:
            begun = False
            while (events := await stream.next()) is not None:
                for event in events:
                    if "error" in event:
                        raise stream.failed(event)
                    if (delta := _read_delta(event)) is None:
                        continue
                    if not begun:
                        begun = True
                        stream.begun()
                    if delta.finish is None:
                        yield delta
                        continue
                    stream.finished()
                    yield delta
                    return
            raise stream.lost("the answer ended without a finish reason")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise stream.broken(f"an event is not of the wire: {error!r}") from error
        finally:
            await stream.close()

    async def load(self) -> EngineLoad:
        found = json_of(await self._upstream.get("/health"), self.name)
        load, pool = found.get("load") or {}, found.get("pool") or {}
        total, used = pool.get("total"), pool.get("used")
        ratio = load.get("kv_used_ratio", used / total if total and used is not None else None)
        return EngineLoad(
            running=int(load.get("running", 0)),
            waiting=int(load.get("waiting", 0)),
            kv_used_ratio=ratio,
            kv_blocks_total=total,
            kv_blocks_cached=pool.get("cached"),
            kv_blocks_used=used,
        )

    async def tokenize(self, text: str, *, model: str) -> list[int] | None:
        reply = await self._upstream.post("/tokenize", orjson.dumps({"prompt": text, "model": model}))
        return [int(token) for token in json_of(reply, self.name)["tokens"]]

    async def forget(self, session: str) -> None:
        json_of(await self._upstream.delete(f"/turnkeep/v1/sessions/{quote(session, safe='')}"), self.name)

    async def tokenizer_file(self, file: str) -> bytes | None:
        """One of the files to render with (`tokenizer.json`, …); None when the model has no such file."""
        reply = await self._upstream.get(f"/turnkeep/v1/tokenizer/{quote(file, safe='')}", timeout_s=60.0)
        if reply.status == 404:
            return None
        check(reply, self.name)
        return reply.body

    async def aclose(self) -> None:
        await self._upstream.aclose()

    async def _open(self, request: GenerateRequest) -> AnswerStream:
        prompt = request.prompt
        if isinstance(prompt, ChatPrompt):
            raise Unsupported(f"{self.name} takes token ids, not messages", param="messages", replica=self.name)
        try:
            return await self._send(request, prompt, prompt.base, prompt.delta)
        except UnknownBase:
            if prompt.base is None:
                raise
        return await self._send(request, prompt, None, await prompt.whole())

    async def _send(self, request: GenerateRequest, prompt: IdsPrompt, base: Base | None, delta: bytes) -> AnswerStream:
        body = encode_generate(
            WireRequest(
                request_id=request.request_id,
                model=request.model,
                delta=delta,
                sampling=request.sampling,
                session=prompt.session,
                base=base,
                salt=request.cache_salt,
                priority=request.priority,
                shift=prompt.shift if self._takes_shift else None,
            )
        )
        return await AnswerStream.open(
            self._upstream,
            "/turnkeep/v1/generate",
            body,
            request,
            content_type=CONTENT_TYPE,
        )

    def _broken(self, message: str) -> EngineBroken:
        return EngineBroken(f"{self.name}: {message}", replica=self.name)


def _read_delta(event: dict[str, Any]) -> Delta | None:
    """A delta of the wire; None for the first event, which generates nothing."""
    if (ids := event.get("ids")) is None:
        if "prompt_tokens" in event:
            return None
        raise ValueError(f"an event with neither ids nor prompt_tokens: {sorted(event)}")
    finish = event.get("finish")
    logprobs = event.get("logprobs")
    if finish is None:
        if not logprobs:
            return Delta(event["text"], tuple(ids))
        return Delta(event["text"], tuple(ids), logprobs=_read_logprobs(logprobs))
    if finish not in _FINISH:
        raise ValueError(f"unknown finish reason {finish!r}")
    usage = event["usage"]
    return Delta(
        event["text"],
        tuple(ids),
        logprobs=_read_logprobs(logprobs) if logprobs else (),
        finish=finish,
        stop=event.get("stop"),
        usage=Usage(
            usage["prompt_tokens"], usage["output_tokens"], usage.get("cached_tokens"), usage.get("shifted_tokens", 0)
        ),
    )


def _read_logprobs(entries: list[dict[str, Any]]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            entry["id"],
            entry["text"],
            entry["logprob"],
            tuple((int(token), str(text), float(value)) for token, text, value in entry.get("top") or ()),
        )
        for entry in entries
    )
