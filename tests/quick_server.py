"""uvicorn for tests: it ends as soon as it may, where uvicorn looks ten times a second."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

LOOK_S = 0.005


class QuickServer(uvicorn.Server):
    async def main_loop(self) -> None:
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 1
            await asyncio.sleep(LOOK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - no event tells of it
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel(msg="the time for a graceful end is over")
        await self.lifespan.shutdown()
