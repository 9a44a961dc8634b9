"""The model process: owns the engine core and its loop; speaks frames with the front (model_process.py).

    wait for commands (only when there is no work) -> drain them -> one step -> send what it made -> ...

It ends when the front's end of the socket closes, and at once (Linux) when the front is killed. An error of one request
ends that request; an error of the loop itself ends the process, loudly, and the front with it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from engines.contract import Base, EngineError, Generated, Sampling, Shift, TokenLogprob, Usage
from engines.kv_events import EventBatch, KvEvent, encode_batch
from engines.local.backend import Status
from engines.local.frames import FrameReader, encode_frame
from engines.local.model_process import event_header, status_header
from engines.local.refusal import Refusal, refusal
from engines.local.wire import Event, delta_event, error_event, read_header, started_event

RECEIVE_BYTES = 1 << 18
STATUS_EVERY_S = 0.5  # while it works; and once when it falls idle
PR_SET_PDEATHSIG = 1
KV_EVENTS_A_FRAME = 64  # each of up to 1024 blocks: a forgotten session may free a whole pool


class Started(Protocol):
    prompt_tokens: int
    cached_tokens: int
    queue_s: float


class Output(Protocol):
    """What a step made for one request."""

    request_id: str
    started: Started | None
    ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprob]
    finish: str | None
    stop: str | None
    usage: Usage | None
    error: str | None
    scores: bytes


class Core(Protocol):
    """What the loop needs of the engine core (engine.LocalEngine)."""

    def submit(self, request: Any) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> Sequence[Any]: ...
    def has_work(self) -> bool: ...
    def forget(self, session: str, salt: str) -> Forgotten: ...
    def sessions(self) -> Sequence[Any]: ...
    def stats(self) -> Any: ...
    def check(self) -> None: ...


class Forgotten(Protocol):
    """What went of a session (kv.forgotten.Forgotten)."""

    def told(self) -> dict[str, int]: ...


class Sessions(Protocol):
    """What takes sessions down and up (suspension.Suspension)."""

    @property
    def erasing(self) -> bool: ...
    @property
    def stuck(self) -> int: ...
    def suspend(self, number: int, session: str, salt: str, to: str | None = None) -> None: ...
    def resume(self, number: int, session: str, salt: str) -> None: ...
    def save(self, number: int, session: str, salt: str) -> None: ...
    def adopt(self, number: int, path: Path, session: str, salt: str) -> None: ...
    def settled(self) -> Sequence[tuple[int, dict[str, Any] | Refusal]]: ...


class RequestMaker(Protocol):
    """The core's request type (engine.CoreRequest)."""

    def __call__(
        self,
        *,
        request_id: str,
        delta: bytes,
        base: Base | None,
        session: str | None,
        salt: str,
        priority: int,
        sampling: Sampling,
        shift: Shift | None,
        generated: Generated | None,
        pinned: bool,
        min_bits: int,
        system_tokens: int,
        recent_from: int,
        score_from: int | None,
    ) -> Any: ...


class ModelLoop:
    """Runs `core` for the front at the other end of `channel`; `vocab` bounds token ids, `clock` is monotonic."""

    def __init__(
        self,
        core: Core,
        channel: socket.socket,
        reader: FrameReader,
        *,
        make_request: RequestMaker,
        status: Callable[[Core, bool], Status],
        vocab: int,
        clock: Callable[[], float],
        kv_events: Callable[[], tuple[KvEvent, ...]] | None = None,
        suspension: Sessions | None = None,
    ) -> None:
        self._kv_events, self._suspension = kv_events, suspension
        self._forgotten: list[tuple[int, Sequence[Forgotten]]] = []  # to be told when nothing of it is in a file
        self._core, self._channel, self._reader = core, channel, reader
        self._make_request, self._status, self._vocab, self._clock = make_request, status, vocab, clock
        self._pool_ok = True
        self._status_due_s = 0.0

    def run(self) -> None:
        """Until the front closes its end."""
        checked = False
        while (received := self._receive(wait=checked and not self._core.has_work())) is not None:
            out = bytearray()
            for header, body in self._reader.feed(received):
                out += self._obey(header, body)
                checked = False
            if self._core.has_work():
                checked = False
                for output in self._core.step():
                    out += _output_frames(output)
                if self._clock() >= self._status_due_s:
                    out += self._status_frame()
            elif not checked:
                checked = True
                self._pool_ok = self._books_balance()
                out += self._status_frame()
            out += self._settled()
            out += self._kv_frame()
            if out:
                self._channel.sendall(out)

    def _receive(self, *, wait: bool) -> bytes | None:
        """What the front sent; b"" when nothing is there and `wait` is off; None when it has gone."""
        if not wait and not select.select([self._channel], [], [], 0)[0]:
            return b""
        return self._channel.recv(RECEIVE_BYTES) or None

    def _obey(self, header: dict[str, Any], body: bytes) -> bytes:
        number = header["r"]
        match header["k"]:
            case "generate":
                return self._submit(number, header["h"], body)
            case "abort":
                self._core.abort(str(number))
                return b""
            case "forget":
                self._forgotten.append((number, self._forget(header["session"], header["salt"])))
                return b""
            case "sessions":
                reply = [_kept(entry, self._clock()) for entry in self._core.sessions()]
            case "suspend" | "resume" | "save" as kind if self._suspension is not None:
                more = {"to": header["to"]} if "to" in header else {}
                getattr(self._suspension, kind)(number, header["session"], header["salt"], **more)
                return b""
            case "adopt" if self._suspension is not None:
                self._suspension.adopt(number, Path(header["path"]), header["session"], header["salt"])
                return b""
            case kind:
                raise AssertionError(f"the front asked for {kind!r}")
        return encode_frame({"k": "reply", "r": number}, orjson.dumps(reply))

    def _submit(self, number: int, header: dict[str, Any], delta: bytes) -> bytes:
        wire = read_header(header, delta, self._vocab)
        request = self._make_request(
            request_id=str(number),
            delta=wire.delta,
            base=wire.base,
            session=wire.session,
            salt=wire.salt,
            priority=wire.priority,
            sampling=wire.sampling,
            shift=wire.shift,
            generated=wire.generated,
            pinned=wire.retention is not None,
            min_bits=wire.min_bits,
            system_tokens=wire.system_tokens,
            recent_from=wire.recent_from,
            score_from=wire.score_from,
        )
        try:
            self._core.submit(request)
        except EngineError as error:
            return encode_frame({"k": "refused", "r": number, "e": refusal(error).fields()})
        return encode_frame({"k": "accepted", "r": number})

    def _settled(self) -> bytes:
        """Replies to what takes longer than a step."""
        suspension, out = self._suspension, bytearray()
        if suspension is None or not suspension.erasing:
            for number, gone in self._forgotten:
                out += _forgotten_frame(number, gone, suspension.stuck if suspension is not None else 0)
            self._forgotten.clear()
        for number, answer in suspension.settled() if suspension is not None else ():
            if isinstance(answer, Refusal):
                out += encode_frame({"k": "failed", "r": number, "e": answer.fields()})
            else:
                out += encode_frame({"k": "reply", "r": number}, orjson.dumps(answer))
        return bytes(out)

    def _forget(self, session: str, salt: str | None) -> list[Forgotten]:
        salts = [salt] if salt is not None else [kept.salt for kept in self._core.sessions() if kept.session == session]
        return [self._core.forget(session, one) for one in salts]

    def _books_balance(self) -> bool:
        try:
            self._core.check()
        except AssertionError as error:
            print(f"the KV pool's books do not balance: {error}", file=sys.stderr, flush=True)
            return False
        return True

    def _kv_frame(self) -> bytes:
        """What the pool stored and removed in this round; the front numbers it. Nothing where nobody asked for it."""
        events = self._kv_events() if self._kv_events is not None else ()
        frames = bytearray()
        for at in range(0, len(events), KV_EVENTS_A_FRAME):
            payload = encode_batch(EventBatch(0, 0.0, 0, events[at : at + KV_EVENTS_A_FRAME]))
            frames += encode_frame({"k": "kv"}, payload)
        return bytes(frames)

    def _status_frame(self) -> bytes:
        self._status_due_s = self._clock() + STATUS_EVERY_S
        return encode_frame(status_header(self._status(self._core, self._pool_ok)))


def _forgotten_frame(number: int, gone: Sequence[Forgotten], stuck: int) -> bytes:
    """What went, by tier; a refusal where some of it may still be there."""
    tiers: Counter[str] = Counter()
    try:
        if stuck:
            raise OSError(f"{stuck} files could not be removed")
        for one in gone:
            tiers.update(one.told())
    except OSError as error:
        refused = Refusal("storage_failed", f"what was forgotten may still be there, ask again: {error}")
        return encode_frame({"k": "failed", "r": number, "e": refused.fields()})
    return encode_frame({"k": "reply", "r": number}, orjson.dumps(tiers))


def _output_frames(output: Output) -> bytes:
    number = int(output.request_id)
    events: list[Event] = []
    if (started := output.started) is not None:
        events.append(started_event(started.prompt_tokens, started.cached_tokens, started.queue_s))
    if output.error is not None:
        events.append(error_event(Refusal("engine_error", output.error)))
    elif output.scores:
        events.append(Event("scores", output.scores))
    if output.error is None and (output.ids or output.text or output.finish is not None):
        events.append(
            delta_event(
                output.ids, output.text, output.logprobs, finish=output.finish, stop=output.stop, usage=output.usage
            )
        )
    return b"".join(encode_frame(event_header(number, event), event.data) for event in events)


def _kept(entry: Any, now_s: float) -> dict[str, Any]:
    return {
        "session": entry.session,
        "tokens": entry.tokens,
        "blocks": entry.blocks,
        "bytes": entry.bytes,
        "last_used_s": round(now_s - entry.last_used_s, 3),
    }


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies (Linux); elsewhere the closed socket ends it later."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        sys.exit(1)


def read_load_command(channel: socket.socket, reader: FrameReader) -> dict[str, Any] | None:
    """The first frame, which says what to load; None when the front has gone."""
    while received := channel.recv(RECEIVE_BYTES):
        frames = reader.feed(received)
        if frames:
            assert len(frames) == 1
            assert frames[0][0]["k"] == "load"
            return frames[0][0]
    return None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A core that is ready to run, and what the front must know of its model."""

    core: Core
    make_request: RequestMaker
    status: Callable[[Core, bool], Status]
    window: int
    vocab: int
    block_size: int
    device: str
    dtype: str
    kv_events: Callable[[], tuple[KvEvent, ...]] | None = None  # what the pool did since the last call
    suspension: Sessions | None = None
    eviction: str | None = None  # the policy of its cached blocks
    kv_refused: dict[str, str] = field(default_factory=dict)  # KV codecs that the model does not bear, and why
    no_native: str | None = None  # why the compiled decoder does not run; None: it does
    attention: dict[str, object] = field(default_factory=dict)  # kernels.path.AttentionPath.report
    no_shift: str | None = None  # why K/V cannot be moved to another position; None: it can


def run(load: Callable[[Path, dict[str, Any]], Loaded]) -> None:
    """The process's whole life: `--fd` is the socket, `--parent` the front; the first frame says what to `load`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's: it closes the socket
    end_with_parent(given.parent)
    with socket.socket(fileno=given.fd) as channel:
        reader = FrameReader()
        if (command := read_load_command(channel, reader)) is None:
            return
        loaded = load(Path(command["folder"]), command["options"])
        told = ("window", "vocab", "block_size", "device", "dtype", "no_shift", "no_native", "eviction")
        info = {name: getattr(loaded, name) for name in (*told, "kv_refused", "attention")}
        channel.sendall(encode_frame({"k": "ready", "info": info | {"epoch": secrets.token_hex(8)}}))
        loop = ModelLoop(
            loaded.core,
            channel,
            reader,
            make_request=loaded.make_request,
            status=loaded.status,
            vocab=loaded.vocab,
            clock=time.monotonic,
            kv_events=loaded.kv_events,
            suspension=loaded.suspension,
        )
        with suppress(BrokenPipeError, ConnectionResetError):  # the front has gone: so do we
            loop.run()


if __name__ == "__main__":
    from engines.local.load import load_core

    run(load_core)
