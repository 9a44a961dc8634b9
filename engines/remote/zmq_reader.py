"""Frames of ZeroMQ sockets in asyncio, without the future and the poll that pyzmq's own asyncio sockets make for each.

A socket's file descriptor tells once that something changed; so a socket is read until it has nothing, and only then
is waited for.
"""

from __future__ import annotations

import asyncio

import zmq


class ZmqReader:
    """Reads several sockets, an earlier one before a later one. Whoever made them closes them, after `close`."""

    def __init__(self, *sockets: zmq.Socket[bytes]) -> None:
        self._sockets = sockets
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._changed = [True for _ in sockets]
        self._descriptors = [int(socket.getsockopt(zmq.FD)) for socket in sockets]
        for place, descriptor in enumerate(self._descriptors):
            self._loop.add_reader(descriptor, self._wake, place)

    async def next(self, timeout_s: float) -> tuple[int, list[bytes]] | None:
        """(place of the socket, frames) of what comes next; None where nothing comes in time."""
        deadline = self._loop.time() + timeout_s
        while True:
            for place, changed in enumerate(self._changed):
                if changed:
                    try:
                        return place, self._sockets[place].recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        self._changed[place] = False
            if self._loop.time() >= deadline:
                return None
            self._woken.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._woken.wait()
            except TimeoutError:
                self._changed = [True for _ in self._sockets]

    def close(self) -> None:
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)

    def _wake(self, place: int) -> None:
        self._changed[place] = True
        self._woken.set()
