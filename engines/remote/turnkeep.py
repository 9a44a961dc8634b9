"""`turnkeep engine` over the wire of docs/engine-wire.md: the base that the replica holds, and the delta."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import fields
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
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
    Kept,
    TokenLogprob,
    UnknownBase,
    Unsupported,
)
from engines.kv_events import FeedItem
from engines.local.wire import CONTENT_TYPE, SYSTEM, WireRequest, encode_generate
from engines.remote import turnkeep_sessions
from engines.remote.answer import AnswerStream
from engines.remote.forward import forward, forward_stream
from engines.remote.http import Upstream
from engines.remote.kv_feed import FeedAddress, feed
from engines.remote.replies import STUMBLES, check, json_of, natural, share, spoken, text_of, token_ids, usage_of
from engines.remote.turnkeep_kv import read_snapshot, turnkeep_feed

FORGET_S = 60.0  # it answers when nothing of the session is in a file, and a file may just be written
_FINISH = frozenset({"stop", "length", "cancelled"})


class TurnkeepEngine:
    """One replica of our own engine. Owns `upstream` and closes it."""

    def __init__(self, upstream: Upstream, *, kv: FeedAddress | None = None) -> None:
        self._upstream = upstream
        self._kv = kv
        self._kv_events = True  # until its capabilities say otherwise
        self._takes_shift = self._takes_bits = self._retains = False  # until its capabilities say so: an older replica
        # refuses the fields

    @property
    def name(self) -> str:
        return self._upstream.name

    @spoken
    async def capabilities(self) -> Capabilities:
        found = json_of(await self._upstream.get("/turnkeep/v1/capabilities"), self.name)
        known = {field.name: told for field in fields(Capabilities) if (told := found.get(field.name)) is not None}
        try:
            capabilities = msgspec.convert({**known, "kind": "turnkeep"}, Capabilities)
        except msgspec.ValidationError as error:
            raise self._broken(f"its capabilities are none: {error}") from error
        for told in (capabilities.window, capabilities.block_size, capabilities.max_running):
            if told is not None and not natural(told):
                raise self._broken(f"its capabilities have {told} for a number of tokens or requests")
        self._takes_shift, self._takes_bits = capabilities.takes_shift, capabilities.takes_bits
        self._retains = capabilities.retains
        self._kv_events = capabilities.kv_events
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
        except STUMBLES as error:
            raise stream.broken(f"an event is not of the wire: {error!r}") from error
        finally:
            await stream.close()

    @spoken
    async def load(self) -> EngineLoad:
        found = json_of(await self._upstream.get("/health"), self.name)
        load, pool = found.get("load") or {}, found.get("pool") or {}
        total, used = natural(pool.get("total")), natural(pool.get("used"))
        ratio = load.get("kv_used_ratio", used / total if total and used is not None else None)
        return EngineLoad(
            running=natural(load.get("running")) or 0,
            waiting=natural(load.get("waiting")) or 0,
            kv_used_ratio=share(ratio),
            kv_blocks_total=total,
            kv_blocks_cached=natural(pool.get("cached")),
            kv_blocks_used=used,
        )

    @spoken
    async def tokenize(self, text: str, *, model: str) -> list[int] | None:
        reply = await self._upstream.post("/tokenize", orjson.dumps({"prompt": text, "model": model}))
        return list(token_ids(json_of(reply, self.name)["tokens"]))

    @spoken
    async def forget(self, session: str, salt: str) -> dict[str, int]:
        path = f"/turnkeep/v1/sessions/{quote(session, safe='')}?{urlencode({'salt': salt})}"
        told = json_of(await self._upstream.delete(path, timeout_s=FORGET_S), self.name)
        tiers = told.get("tiers") or {"device": told["blocks_freed"]}
        return {str(tier): natural(count) or 0 for tier, count in tiers.items()}

    @spoken
    async def kept(self) -> list[Kept] | None:
        listed = json_of(await self._upstream.get("/turnkeep/v1/sessions"), self.name)["sessions"]
        sizes = [(str(entry["session"]), natural(entry.get("bytes"))) for entry in listed]
        if any(size is None for _, size in sizes):  # an older engine
            return None
        return [Kept(session, size or 0) for session, size in sizes]

    async def suspend(self, session: str, salt: str) -> dict[str, Any]:
        return await turnkeep_sessions.ask(self._upstream, "suspend", session, salt)

    async def resume(self, session: str, salt: str) -> dict[str, Any]:
        return await turnkeep_sessions.ask(self._upstream, "resume", session, salt)

    def kv_out(self, session: str, salt: str) -> AsyncGenerator[bytes, None]:
        return turnkeep_sessions.kv_out(self._upstream, session, salt)

    async def kv_in(self, session: str, salt: str, file: AsyncGenerator[bytes, None]) -> dict[str, Any]:
        return await turnkeep_sessions.kv_in(self._upstream, session, salt, file)

    def kv_feed(self) -> AsyncGenerator[FeedItem, None] | None:
        """From where the operator or, without that, itself says that it publishes. None: it said that it does not."""
        if self._kv is not None:
            return feed(self._kv, snapshot=lambda: read_snapshot(self._upstream))
        return turnkeep_feed(self._upstream) if self._kv_events else None

    async def tokenizer_file(self, file: str) -> bytes | None:
        """One of the files to render with (`tokenizer.json`, …); None when the model has no such file."""
        reply = await self._upstream.get(f"/turnkeep/v1/tokenizer/{quote(file, safe='')}", timeout_s=60.0)
        if reply.status == 404:
            return None
        check(reply, self.name)
        return reply.body

    async def forward(self, route: str, fields: Mapping[str, Any], *, request_id: str, salt: str) -> dict[str, Any]:
        return await forward(self._upstream, route, {**fields, **_salt(salt)}, request_id)

    def forward_stream(
        self, route: str, fields: Mapping[str, Any], *, request_id: str, salt: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        return forward_stream(self._upstream, route, {**fields, **_salt(salt)}, request_id)

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
                generated=prompt.generated,
                min_bits=request.min_bits if self._takes_bits else 0,
                system_tokens=prompt.system_tokens if self._takes_bits or self._retains else 0,
                retention=SYSTEM if self._retains and request.shared and prompt.system_tokens else None,
                recent_from=prompt.recent_from if self._takes_bits else 0,
            )
        )
        return await AnswerStream.open(
            self._upstream,
            "/turnkeep/v1/generate",
            body,
            request_id=request.request_id,
            patient=request.priority > 0,
            content_type=CONTENT_TYPE,
        )

    def _broken(self, message: str) -> EngineBroken:
        return EngineBroken(f"{self.name}: {message}", replica=self.name)


def _salt(salt: str) -> dict[str, str]:
    return {"cache_salt": salt} if salt else {}


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
            return Delta(text_of(event["text"]), token_ids(ids))
        return Delta(text_of(event["text"]), token_ids(ids), logprobs=_read_logprobs(logprobs))
    if finish not in _FINISH:
        raise ValueError(f"unknown finish reason {finish!r}")
    usage = event["usage"]
    return Delta(
        text_of(event["text"]),
        token_ids(ids),
        logprobs=_read_logprobs(logprobs) if logprobs else (),
        finish=finish,
        stop=text_of(event.get("stop")) or None,
        usage=usage_of(
            usage["prompt_tokens"],
            usage["output_tokens"],
            usage.get("cached_tokens"),
            usage.get("shifted_tokens"),
            host=usage.get("host_tokens"),
            disk=usage.get("disk_tokens"),
            bits=usage.get("prefix_bits"),
        ),
    )


def _read_logprobs(entries: list[dict[str, Any]]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            int(entry["id"]),
            text_of(entry["text"]),
            float(entry["logprob"]),
            tuple((int(token), str(text), float(value)) for token, text, value in entry.get("top") or ()),
        )
        for entry in entries
    )
