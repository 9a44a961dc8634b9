"""The KV events of one publisher (one data-parallel rank) over ZeroMQ, without gaps, or with a reset that says so.

    SUB     [topic, seq 8 bytes big-endian, payload]        what happens now
    DEALER  ["", start seq]  ->  ["", seq, payload] ... ["", -1, ""]      what is kept from `start` on

    connected         last batch known: asked for again from it on. The same batch -> the same publisher, go on after it
                      otherwise rebuilt: from a snapshot, else from batch 0 on; what is there begins with a FeedReset
    gap               likewise
    number goes back  rebuilt
    quiet             likewise, now and then: the last batch of all may be the one that was lost
    no replay comes   reset, on with what comes, and rebuilt when a replay comes again
    malformed         reset, and on with the next

Nothing is queued here: who reads slowly leaves batches in the socket (SUB_HIGH_WATER), the publisher drops what has no
room there, and the gap is filled, or told, when the reader comes to it.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

from engines.contract import EngineError
from engines.kv_events import (
    MAX_PAYLOAD_BYTES,
    EventBatch,
    FeedItem,
    FeedReset,
    FeedSnapshot,
    KvEventsError,
    decode_batch,
)
from engines.kv_snapshot import Head, mark_of
from engines.remote.kv_sequence import Mark, Step, step
from engines.remote.zmq_reader import ZmqReader

SUB_HIGH_WATER = 2000  # batches that wait in the socket; the publisher's own side holds more
REPLAY_HIGH_WATER = 20_000  # a publisher keeps 10,000, and drops what finds no room
REPLAY_TIMEOUT_S = 5.0  # between two batches of a replay
QUIET_S = (0.5, 30.0)  # a check after so long without a batch; each is twice as far away
SEQ = struct.Struct(">Q")
END_SEQ = (1 << 64) - 1
CHECK = "a check"
NOTHING = Mark(-1, 0.0, b"")  # before a publisher's first batch

Tell = Callable[[FeedItem], Awaitable[None]]
Snapshot = Callable[[], AsyncGenerator[Head | FeedSnapshot, None]]


class ReplayFailed(Exception):
    """No answer, or one that is none."""


@dataclass(frozen=True, slots=True)
class _Came:
    seq: int
    payload: bytes


class RankFeed:
    """Tells the items of one rank, one after the other.

    `snapshot` yields a Head, then parts; without one, batches are replayed from the first on. `lost_s`: end after so
    long without a connection (None: wait for it for ever).
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        tell: Tell,
        rank: int,
        events: str,
        replay: str | None,
        *,
        topic: str = "",
        snapshot: Snapshot | None = None,
        lost_s: float | None = None,
        quiet_s: tuple[float, float] = QUIET_S,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
    ) -> None:
        self._context, self._tell = context, tell
        self._rank, self._events, self._replay = rank, events, replay
        self._topic, self._snapshot, self._lost_s = topic, snapshot, lost_s
        self._quiet_s, self._replay_timeout_s = quiet_s, replay_timeout_s
        self._last: Mark | None = None
        self._live = -1
        self._told = 0  # items
        self._doubted_at = -math.inf  # when a batch was last passed over, and the replay asked for it
        self._owed = False  # the replay failed, so not all is known that could be: tried again

    async def run(self) -> None:
        """Until it is cancelled, or the connection is lost for `lost_s`."""
        subscription = _Subscription(self._context, self._events, self._topic)
        try:
            wait_s = again_s = self._quiet_s[0]
            again_at = 0.0  # when what is owed is tried again
            lost_at: float | None = asyncio.get_running_loop().time()
            while True:
                what = await subscription.next(wait_s)
                if isinstance(what, _Came):
                    lost_at, wait_s = None, self._quiet_s[0]
                    await self._take(what)
                elif what == "connected":
                    lost_at, wait_s = None, self._quiet_s[0]
                    self._live = -1
                    await self._make_sure("start" if self._last is None else "connected again")
                elif what == "lost":
                    lost_at = asyncio.get_running_loop().time()
                    if self._replay is None and self._last is not None:
                        self._last = None
                        await self._reset("the connection was lost, and no replay is configured")
                else:
                    wait_s = min(2 * wait_s, self._quiet_s[1])
                    if lost_at is None and self._replay is not None:
                        await self._make_sure(CHECK)
                now = asyncio.get_running_loop().time()
                if not self._owed:
                    again_s, again_at = self._quiet_s[0], now + self._quiet_s[0]
                elif lost_at is None and now >= again_at:
                    await self._make_sure(CHECK)
                    again_s = min(2 * again_s, self._quiet_s[1])
                    again_at = asyncio.get_running_loop().time() + again_s
                if self._lost_s is not None and lost_at is not None:
                    if now - lost_at >= self._lost_s:
                        return
                    wait_s = min(wait_s, self._lost_s)
        finally:
            subscription.close()

    # ------------------------------------------------------------------ a batch that came by itself
    async def _take(self, came: _Came) -> None:
        mark, item = self._read(came)
        if self._last is not None:
            verdict = step(self._last, self._live, mark)
            if verdict is Step.SEEN:
                self._live = mark.seq
                return
            if verdict is Step.STALE and await self._passed_over():
                return
            if verdict is Step.GAP:
                reason = f"batches {self._last.seq + 1} to {mark.seq - 1} are missing"
            elif verdict is Step.STALE:
                reason = f"batch {mark.seq} is older than batch {self._last.seq}"
            else:
                reason = f"batch {mark.seq} came after batch {self._last.seq}: the engine started anew"
            if verdict in (Step.ANEW, Step.STALE):
                self._last, self._live = None, -1
            if verdict is not Step.NEXT:
                await self._make_sure(reason)
        if self._last is not None and mark.seq <= self._last.seq:  # it came with what was missing
            self._live = mark.seq
            return
        if self._last is not None and mark.seq > self._last.seq + 1:
            if self._replay is not None:
                return  # whoever answered never told it: it is of an earlier publisher
            await self._reset(f"{reason}: no replay is configured")
        self._live, self._last = mark.seq, mark
        await self._say(item)

    async def _passed_over(self) -> bool:
        """A batch that is older than the last one is an earlier publisher's, or a clock was set back: then a replay has
        it, which is looked at now and then. False: there is nothing to look at."""
        if self._replay is None and self._snapshot is None:
            return False
        now = asyncio.get_running_loop().time()
        if now >= self._doubted_at + self._quiet_s[0]:
            self._doubted_at = now
            await self._make_sure(CHECK)
        return True

    def _read(self, came: _Came) -> tuple[Mark, EventBatch | FeedReset]:
        """A batch, or the reset that a malformed one is."""
        mark = mark_of(came.payload)
        try:
            told = decode_batch(came.seq, came.payload)
        except KvEventsError as error:
            at_s = self._last.at_s if self._last is not None else 0.0
            return Mark(came.seq, at_s, mark), FeedReset(self._rank, f"batch {came.seq} is malformed: {error}")
        batch = EventBatch(came.seq, told.at, self._rank, told.events, told.unknown)
        return Mark(came.seq, told.at, mark), batch

    # ------------------------------------------------------------------ what is missing
    async def _make_sure(self, reason: str) -> None:
        """All that the publisher has told and was not taken; a reset first where what was taken is void."""
        if self._replay is None and self._snapshot is None:
            if self._last is None:
                await self._reset(f"{reason}: no replay is configured")
            return
        known, told = self._last, self._told
        try:
            if self._last is not None and not self._owed:
                await self._go_on(self._last)
                if self._last is not None:
                    return
                reason = f"{reason}: the engine started anew, or keeps too few batches"
            await self._rebuild(reason)
            self._owed = False
        except (ReplayFailed, KvEventsError, EngineError) as error:
            if reason is CHECK and told == self._told:
                self._last = known  # nothing is worse than before
            elif reason is not CHECK or self._owed or self._last is None:
                self._last, self._owed = None, True
                await self._reset(f"{reason}: {error}")

    async def _go_on(self, last: Mark) -> None:
        """Batches after `last`; `self._last` is None afterwards where `last` itself is not among theirs."""
        if self._replay is None:
            self._last = None
            return
        begun = False
        async with aclosing(self._replayed(max(last.seq, 0))) as replayed:
            async for came in replayed:
                if begun:
                    await self._tell_next(came)
                    continue
                begun = True
                if last is NOTHING and came.seq == 0:
                    await self._tell_next(came)
                elif came.seq != last.seq or mark_of(came.payload) != last.mark:
                    break
            else:
                if begun or last is NOTHING:
                    return
        self._last = None

    async def _rebuild(self, reason: str) -> None:
        self._last = None
        if self._snapshot is not None:
            await self._from_snapshot(self._snapshot, reason)
            return
        begun = False
        async with aclosing(self._replayed(0)) as replayed:
            async for came in replayed:
                if not begun:
                    begun = True
                    await self._reset(reason, whole=came.seq == 0)
                await self._tell_next(came)
        if not begun:  # nothing was ever published
            self._last = NOTHING
            await self._reset(reason, whole=True)

    async def _from_snapshot(self, snapshot: Snapshot, reason: str) -> None:
        async with aclosing(snapshot()) as parts:
            head = await anext(parts)
            assert isinstance(head, Head)
            await self._reset(reason, whole=True)
            async for part in parts:
                assert isinstance(part, FeedSnapshot)
                await self._say(replace(part, rank=self._rank))
        self._last = Mark(head.seq, head.at_s, head.mark)
        if self._replay is not None:
            await self._go_on(self._last)
            if self._last is None:
                raise ReplayFailed("the engine started anew while its snapshot was read")

    async def _tell_next(self, came: _Came) -> None:
        self._last, item = self._read(came)
        await self._say(item)

    async def _reset(self, reason: str, *, whole: bool = False) -> None:
        await self._say(FeedReset(self._rank, reason, whole))

    async def _say(self, item: FeedItem) -> None:
        self._told += 1
        await self._tell(item)

    async def _replayed(self, start: int) -> AsyncGenerator[_Came, None]:
        """The batches that are kept from `start` on. Where the publisher dropped some of its answer the rest is asked
        for again. Raises ReplayFailed."""
        assert self._replay is not None
        first = True
        while True:
            progress, whole = False, True
            dealer = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.set_hwm(REPLAY_HIGH_WATER)
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
            dealer.connect(self._replay)
            reader = ZmqReader(dealer)
            try:
                dealer.send_multipart((b"", SEQ.pack(start)), zmq.NOBLOCK)
                while (came := await self._answer(reader)) is not None:
                    if first or came.seq == start:
                        first, progress, start = False, True, came.seq + 1
                        yield came
                    elif came.seq > start:
                        whole = False
                        break
            finally:
                reader.close()
                dealer.close(0)
            if whole:
                return
            if not progress:
                raise ReplayFailed(f"the replay leaves out batch {start}")

    async def _answer(self, reader: ZmqReader) -> _Came | None:
        answer = await reader.next(self._replay_timeout_s)
        if answer is None:
            raise ReplayFailed("the replay does not answer")
        frames = answer[1]
        if len(frames) < 2 or len(frames[-2]) != SEQ.size:
            raise ReplayFailed("the replay answers something else")
        (seq,) = SEQ.unpack(frames[-2])
        return None if seq == END_SEQ else _Came(seq, frames[-1])


class _Subscription:
    """The SUB socket and its connection."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, topic: str) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, SUB_HIGH_WATER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)  # a host that vanished closes no connection
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._reader = ZmqReader(self._monitor, self._socket)
        self._socket.connect(endpoint)

    async def next(self, timeout_s: float) -> _Came | Literal["connected", "lost", "quiet"]:
        """A batch; or what became of the connection; or "quiet" when nothing came in `timeout_s`."""
        while (came := await self._reader.next(timeout_s)) is not None:
            place, frames = came
            if place == 0:
                lost = parse_monitor_message(frames)["event"] == zmq.EVENT_DISCONNECTED
                return "lost" if lost else "connected"
            if len(frames) == 3 and len(frames[1]) == SEQ.size:
                return _Came(SEQ.unpack(frames[1])[0], frames[2])
        return "quiet"

    def close(self) -> None:
        self._reader.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
