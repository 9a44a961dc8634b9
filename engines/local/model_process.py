"""The front's end of the model process: a Backend that never waits for the model. Imports no torch.

    front (asyncio) --- one socket pair, frames ---> child (process.py): the engine core and its loop
    generate, abort, forget, sessions          -->
                                               <--   ready, accepted | refused, event, reply, status, kv

Requests are numbered here; a number is never used twice. When the child dies, every running answer gets an error
event, every waiting one is refused with `engine_dead`, and `ended` is set: the front then exits, so that its
supervisor starts both anew (a half-dead engine behind a healthy port is worse than none).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import orjson

from engines.contract import Capabilities, Sampling, Usage
from engines.kv_events import decode_batch
from engines.kv_stream import KvStream
from engines.local.backend import ModelInfo, State, Status
from engines.local.checks import GRAMMARS, MAX_LOGPROBS
from engines.local.frames import FrameReader, encode_frame
from engines.local.identity import model_fingerprint
from engines.local.interpreter import child_environment, module_command
from engines.local.refusal import Refusal
from engines.local.texts import fingerprint
from engines.local.wire import Event, WireRequest, error_event, header_of

MAX_BUFFERED_BYTES = 4 << 20  # of one answer whose client does not read
REPLY_TIMEOUT_S = 60.0  # forget and sessions wait for the end of a step
STOP_S = 5.0
CHILD = "engines.local.process"
WAIT_POLICY = (
    "passive"  # of OpenMP's threads between operations: spinning costs 2 to 4 times the CPU on a shared machine
)


class _Answer:
    """One request as the front sees it: events that came and were not taken yet."""

    def __init__(self) -> None:
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over = False  # the child knows it no more: nothing to abort
        self._events: list[Event] = []
        self._bytes = 0
        self._wake: asyncio.Future[None] | None = None

    def put(self, event: Event) -> bool:
        """Whether there was room."""
        if self._bytes > MAX_BUFFERED_BYTES:
            return False
        if event.kind != "scores":  # one a request, of bounded size, and its last event follows at once
            self._bytes += len(event.data)
        self._events.append(event)
        self.over = self.over or event.kind in ("last", "error")
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        return True

    def fail(self, refused: Refusal) -> None:
        self.over = True
        if not self.accepted.done():
            self.accepted.set_exception(refused)
        else:
            self._bytes = 0
            self.put(error_event(refused))

    async def take(self) -> list[Event]:
        """All that is there, at least one."""
        if not self._events:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        events, self._events, self._bytes = self._events, [], 0
        return events


class _Link(asyncio.Protocol):
    """Bytes of the socket to frames."""

    def __init__(self, owner: ModelProcess) -> None:
        self._owner = owner
        self._reader = FrameReader()

    def data_received(self, data: bytes) -> None:
        for header, body in self._reader.feed(data):
            self._owner._on_frame(header, body)

    def connection_lost(self, error: Exception | None) -> None:
        self._owner._on_lost()


class ModelProcess:
    """Starts the child and speaks for it; use as an async context manager."""

    def __init__(
        self, folder: Path, options: dict[str, Any], *, name: str, child: str = CHILD, kv: KvStream | None = None
    ) -> None:
        """`options` are those of EngineOptions.core(); `child` is the module that calls process.run; what the pool
        stores and removes goes to `kv`."""
        self._kv = kv
        self._folder, self._options, self._name, self._module = folder, options, name, child
        self._numbers = itertools.count(1)
        self._answers: dict[int, _Answer] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._status = Status()
        self._info: ModelInfo | None = None
        self._names: tuple[str, str] | None = None
        self.ready = asyncio.Event()  # the model is loaded, or the child has ended
        self.ended = asyncio.Event()

    async def __aenter__(self) -> ModelProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [*module_command(self._module), "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
            # standard output is the ready line's; what libraries print goes where errors go
            # (a fork of a few milliseconds, once, before anything is served)
            self._child = subprocess.Popen(  # noqa: ASYNC220
                command,
                pass_fds=[theirs.fileno()],
                env=child_environment(OMP_WAIT_POLICY=os.environ.get("OMP_WAIT_POLICY", WAIT_POLICY)),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
            )
        self._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: _Link(self), sock=ours)
        self._send({"k": "load", "folder": str(self._folder), "options": self._options})
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def state(self) -> State:
        return "dead" if self.ended.is_set() else "ok" if self._info is not None else "loading"

    @property
    def info(self) -> ModelInfo:
        assert self._info is not None
        return self._info

    @property
    def was_ready(self) -> bool:
        return self._info is not None

    @property
    def pid(self) -> int:
        return self._child.pid

    async def generate(self, request: WireRequest) -> AsyncGenerator[list[Event], None]:
        self._require_ok()
        number, answer = next(self._numbers), _Answer()
        self._answers[number] = answer
        self._send({"k": "generate", "r": number, "h": header_of(request)}, request.delta)
        try:
            await answer.accepted
            yield []
            while not answer.over:
                yield await answer.take()
            if answer._events:
                yield await answer.take()
        finally:
            del self._answers[number]
            if not answer.over:
                self._send({"k": "abort", "r": number})

    async def status(self) -> Status:
        return self._status

    async def capabilities(self) -> Capabilities:
        info, (tokenizer, model) = self.info, await self._named()
        return Capabilities(
            kind="turnkeep",
            models=(info.name,),
            window=info.window,
            takes_ids=True,
            takes_delta=True,
            takes_shift=info.no_shift is None,
            retains=True,
            takes_bits=self._options.get("kv_precision", "full") != "full",
            continues=True,
            takes_salt=True,
            grammars=GRAMMARS,
            sampling=frozenset(Sampling.__dataclass_fields__) - {"max_tokens"},
            max_logprobs=MAX_LOGPROBS,
            returns_ids=True,
            reports_cached=True,
            max_running=self._options.get("max_running"),
            block_size=info.block_size,
            suspends=bool(self._options.get("kv_dir") or self._options.get("host_bytes")),
            carries_kv=bool(self._options.get("kv_dir")),
            keeps_sessions=True,
            prefills=True,
            kv_events=self._kv is not None,
            epoch=info.epoch,
            tokenizer=tokenizer,
            fingerprints={info.name: model},
            unseen=_cannot(info),
        )

    async def _named(self) -> tuple[str, str]:
        """The names of the tokenizer and of the model: their files are read once."""
        if self._names is None:
            self._names = await asyncio.to_thread(lambda: (fingerprint(self._folder), model_fingerprint(self._folder)))
        return self._names

    async def sessions(self) -> list[dict[str, Any]]:
        kept: list[dict[str, Any]] = await self._ask({"k": "sessions"})
        return kept

    async def forget(self, session: str, salt: str | None) -> dict[str, int]:
        gone: dict[str, int] = await self._ask({"k": "forget", "session": session, "salt": salt})
        return gone

    async def suspend(self, session: str, salt: str, to: str | None) -> dict[str, Any]:
        return await self._about("suspend", session, salt, to=to)

    async def resume(self, session: str, salt: str) -> dict[str, Any]:
        return await self._about("resume", session, salt)

    async def save(self, session: str, salt: str) -> dict[str, Any]:
        return await self._about("save", session, salt)

    async def adopt(self, path: Path, session: str, salt: str) -> dict[str, Any]:
        return await self._about("adopt", session, salt, path=str(path))

    async def _about(self, kind: str, session: str, salt: str, **more: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self._ask({"k": kind, "session": session, "salt": salt, **more})
        return answer

    async def aclose(self) -> None:
        """The closed socket ends the child between two steps; one that does not end is killed."""
        self._transport.close()
        if not self.was_ready:
            self._child.kill()
        try:
            await asyncio.to_thread(self._child.wait, STOP_S)
        except subprocess.TimeoutExpired:  # a long step: nothing in there needs saving
            self._child.kill()
            await asyncio.to_thread(self._child.wait)

    async def exit_code(self) -> int:
        """Of the child, once `ended` is set."""
        return await asyncio.to_thread(self._child.wait)

    def _require_ok(self) -> None:
        if self.state == "loading":
            raise Refusal("loading", "the model is still loading")
        if self.state == "dead":
            raise _dead()

    async def _ask(self, header: dict[str, Any]) -> Any:
        self._require_ok()
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._send(header | {"r": number})
        try:
            return await asyncio.wait_for(reply, REPLY_TIMEOUT_S)
        except TimeoutError:
            raise Refusal("overloaded", "the model did not answer in time") from None
        finally:
            del self._replies[number]

    def _send(self, header: dict[str, Any], body: bytes = b"") -> None:
        if not self._transport.is_closing():
            self._transport.write(encode_frame(header, body))

    def _on_frame(self, header: dict[str, Any], body: bytes) -> None:
        number = header.get("r", 0)
        match header["k"]:
            case "event":
                self._on_event(number, header, body)
            case "accepted" if answer := self._answers.get(number):
                if not answer.accepted.done():
                    answer.accepted.set_result(None)
            case "refused" if answer := self._answers.get(number):
                answer.fail(Refusal.of(header["e"]))
            case "reply" if (reply := self._replies.get(number)) and not reply.done():
                reply.set_result(orjson.loads(body))
            case "failed" if (reply := self._replies.get(number)) and not reply.done():
                reply.set_exception(Refusal.of(header["e"]))
            case "status":
                self._status = Status(**header["s"])
            case "kv" if self._kv is not None:
                self._kv.publish(decode_batch(0, body).events)
            case "ready":
                self._info = ModelInfo(self._name, self._folder, **header["info"])
                self.ready.set()

    def _on_event(self, number: int, header: dict[str, Any], body: bytes) -> None:
        answer = self._answers.get(number)
        if answer is None or answer.over:  # cancelled while the event was on its way
            return
        usage = Usage(*header["u"]) if "u" in header else None
        if not answer.put(Event(header["t"], body, usage)):
            self._send({"k": "abort", "r": number})
            answer.fail(Refusal("engine_error", f"the client left {MAX_BUFFERED_BYTES} bytes unread"))

    def _on_lost(self) -> None:
        self.ended.set()
        self.ready.set()
        for answer in self._answers.values():
            answer.fail(_dead())
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(_dead())


def _cannot(info: ModelInfo) -> tuple[str, ...]:
    """What the model does not bear, as an operator reads it."""
    shift = () if info.no_shift is None else (f"shift: {info.no_shift}",)
    return (*shift, *(f"KV in {codec}: {why}" for codec, why in info.kv_refused.items()))


def _dead() -> Refusal:
    return Refusal("engine_dead", "the model process has ended")


def event_header(number: int, event: Event) -> dict[str, Any]:
    """The frame header of an event: the child's half of `_on_event`."""
    header: dict[str, Any] = {"k": "event", "r": number, "t": event.kind}
    if event.usage is not None:
        usage = event.usage
        header["u"] = astuple(usage)
    return header


def status_header(status: Status) -> dict[str, Any]:
    return {"k": "status", "s": asdict(status)}
