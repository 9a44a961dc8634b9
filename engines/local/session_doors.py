"""The doors of one kept session: put it down, take it up, carry it to another replica. Imports no torch.

A session's K/V goes out and comes in as a file (docs/kv-files.md). It is streamed from and to the engine's own folder:
the model's process reads and writes files, never a large frame.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from engines.local import checks
from engines.local.asgi import body_pieces, send_json, send_pieces
from engines.local.backend import Backend
from engines.local.refusal import Refusal

CONTENT_TYPE = "application/vnd.turnkeep.kv"
PIECE_BYTES = 1 << 20
TIER = re.compile("host|disk|remote")


class SessionDoors:
    """`folder`: where the engine keeps its files, None where it has no disk tier; a file has `max_bytes` at most."""

    def __init__(self, backend: Backend, folder: Path | None, max_bytes: int) -> None:
        self._backend, self._folder, self._max_bytes = backend, folder, max_bytes

    async def suspend(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /turnkeep/v1/sessions/{session}/suspend?salt=&to="""
        named, to = self._named(scope), checks.text(_query(scope), "to", TIER, None)
        await send_json(send, await self._backend.suspend(*named, to))

    async def resume(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /turnkeep/v1/sessions/{session}/resume?salt="""
        await send_json(send, await self._backend.resume(*self._named(scope)))

    async def export(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /turnkeep/v1/sessions/{session}/kv?salt="""
        saved = await self._backend.save(*self._named(scope))
        await send_pieces(send, receive, _pieces(Path(saved["path"])), content_type=CONTENT_TYPE.encode())

    async def adopt(self, scope: Scope, receive: Receive, send: Send) -> None:
        """PUT /turnkeep/v1/sessions/{session}/kv?salt="""
        session, salt = self._named(scope)
        if self._folder is None:
            raise Refusal("unsupported", "this engine has no disk tier (kv_dir)")
        path = self._folder / f"{secrets.token_hex(8)}.part"
        try:
            body = body_pieces(scope, receive, limit=self._max_bytes, content_type=CONTENT_TYPE)
            async with aclosing(body) as pieces:
                await _spool(path, pieces)
            told = await self._backend.adopt(path, session, salt)
        except OSError as error:
            raise Refusal("storage_failed", f"the file could not be kept: {error.strerror or error}") from None
        finally:
            path.unlink(missing_ok=True)
        await send_json(send, told)

    def _named(self, scope: Scope) -> tuple[str, str]:
        """Session and salt."""
        if self._backend.state == "loading":
            raise Refusal("loading", "the model is still loading")
        session: str = scope["path_params"]["session"]
        if not checks.PRINTABLE.fullmatch(session):
            raise checks.refuse("session", "is no session name")
        return session, checks.text(_query(scope), "salt", checks.SALT, "")


def _query(scope: Scope) -> dict[str, Any]:
    given = parse_qs(scope["query_string"].decode("latin-1"), True)
    return {name: values[-1] for name, values in given.items()}


async def _spool(path: Path, pieces: AsyncGenerator[bytes, None]) -> None:
    file = await asyncio.to_thread(path.open, "xb")
    try:
        async for piece in pieces:
            await asyncio.to_thread(file.write, piece)
    finally:
        await asyncio.to_thread(file.close)


async def _pieces(path: Path) -> AsyncGenerator[bytes, None]:
    file = await asyncio.to_thread(path.open, "rb")
    try:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece
    finally:
        await asyncio.to_thread(file.close)
