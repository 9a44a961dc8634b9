"""The remote tier: files of suspended sessions in a Mooncake Store, where every replica of the same model finds them.

    put     a file in parts, the head last     what has no head is not there
    get     the head, then the parts           into a file, which is compared as any other (disk.DiskTier.adopt)
    remove  the head, then the parts

    key     tk1 / layout / session's tag / "head" or number of the part

A session is found by its name alone, so a replica that never saw it can take it up, and erase it. One thread speaks
with the store; its owner never waits. How much the store holds, and what goes first, is the store's business.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import orjson

from engines.local.kv.tiers.files import Layout

T = TypeVar("T")

PART_BYTES = 8 << 20
BUFFER_BYTES = 64 << 20  # the client's own, for transfers
MAX_PARTS = 1 << 16
CONNECT_S = 5.0
HEAD = "head"
PRESENT = 1


class Store(Protocol):
    """As far as we use it (mooncake.store.MooncakeDistributedStore). Codes: 0 is done, below 0 is an error."""

    def put(self, key: str, value: bytes) -> int: ...

    def get(self, key: str) -> bytes: ...

    def is_exist(self, key: str) -> int: ...

    def remove(self, key: str, force: bool) -> int: ...

    def close(self) -> int: ...


def mooncake(master: str, segment_bytes: int) -> Store:
    """A client of the store whose master is at HOST:PORT; this process lends it `segment_bytes` of memory, 0: none.

    Raises ValueError where the package is missing or the master does not answer.
    """
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ValueError(f"the remote tier needs the package mooncake-transfer-engine: {error}") from None
    try:
        with socket.create_connection(_host_and_port(master), CONNECT_S):
            pass  # the client itself would try for minutes
    except OSError as error:
        raise ValueError(f"no Mooncake Store answers at {master}: {error}") from None
    store: Store = MooncakeDistributedStore()
    code = store.setup(  # type: ignore[attr-defined]
        _address_towards(master), "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", master
    )
    if code:
        raise ValueError(f"no Mooncake Store answers at {master} (code {code})")
    return store


def _address_towards(master: str) -> str:
    """This machine's address as the master sees it."""
    host, port = _host_and_port(master)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _host_and_port(master: str) -> tuple[str, int]:
    host, colon, port = master.rpartition(":")
    if not (colon and host and port.isdigit()):
        raise ValueError(f"remote is {master!r}, must be HOST:PORT")
    return host.strip("[]"), int(port)


class RemoteTier:
    def __init__(self, store: Store, layout: Layout, *, report: Callable[[str], None]) -> None:
        self._store, self._report = store, report
        self._prefix = f"tk1/{hashlib.sha256(orjson.dumps(asdict(layout))).hexdigest()[:32]}"
        self._thread = ThreadPoolExecutor(1, "kv-remote")
        self._running: list[Future[Any]] = []
        self._removals: list[Future[int]] = []
        self.failed = 0  # puts, gets and removals, since the start

    def put(self, tag: int, path: Path) -> Future[bool]:
        """Send a file -> True. What fails is an OSError of the future."""
        return self._start(self._put, tag, path)

    def get(self, tag: int, into: Path) -> Future[bool]:
        """Bring a session's file -> whether there is one."""
        return self._start(self._get, tag, into)

    def remove(self, tag: int) -> Future[int]:
        """Remove a session's file -> parts that there were. What fails is an OSError of the future."""
        future = self._start(self._remove, tag)
        self._removals.append(future)
        return future

    def poll(self) -> None:
        for future in [future for future in self._running if future.done()]:
            self._running.remove(future)
            if (error := future.exception()) is not None:
                self.failed += 1
                self._report(f"the remote tier: {error}")
        self._removals = [future for future in self._removals if not future.done()]

    @property
    def running(self) -> list[Future[Any]]:
        return self._running

    @property
    def erasing(self) -> bool:
        """Something that was forgotten may still be in the store."""
        return bool(self._removals)

    def close(self) -> None:
        self._thread.shutdown()
        self._store.close()

    # ------------------------------------------------------------------ in the thread
    def _start(self, call: Callable[..., T], *args: object) -> Future[T]:
        future = self._thread.submit(call, *args)
        self._running.append(future)
        return future

    def _key(self, tag: int, part: int | str) -> str:
        return f"{self._prefix}/{tag:016x}/{part}"

    def _put(self, tag: int, path: Path) -> bool:
        self._remove(tag)
        parts = 0
        with path.open("rb") as file:
            while piece := file.read(PART_BYTES):
                self._done(self._store.put(self._key(tag, parts), piece), "take a part")
                parts += 1
        head = orjson.dumps({"parts": parts, "bytes": os.stat(path).st_size})
        self._done(self._store.put(self._key(tag, HEAD), head), "take a head")
        return True

    def _get(self, tag: int, into: Path) -> bool:
        parts, nbytes = self._head(tag)
        if not parts:
            return False
        left = nbytes
        with os.fdopen(os.open(into, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for part in range(parts):
                piece = self._store.get(self._key(tag, part))
                if len(piece) != min(left, PART_BYTES):
                    raise OSError(errno.EIO, f"part {part} of {parts} is not there, or is not whole")
                file.write(piece)
                left -= len(piece)
        return True

    def _remove(self, tag: int) -> int:
        parts, _ = self._head(tag)
        self._gone(self._key(tag, HEAD))
        part = 0
        while part < parts or self._store.is_exist(self._key(tag, part)) == PRESENT:
            self._gone(self._key(tag, part))
            part += 1
        return part

    def _head(self, tag: int) -> tuple[int, int]:
        """(parts, bytes); (0, 0) where there is none."""
        found = self._store.get(self._key(tag, HEAD))
        if not found:
            return 0, 0
        try:
            told = orjson.loads(found)
            parts, nbytes = int(told["parts"]), int(told["bytes"])
        except (KeyError, TypeError, ValueError):
            raise OSError(errno.EIO, "a head in the store is none") from None
        if not 0 < parts <= MAX_PARTS or not (parts - 1) * PART_BYTES < nbytes <= parts * PART_BYTES:
            raise OSError(errno.EIO, f"a head in the store tells of {nbytes} bytes in {parts} parts")
        return parts, nbytes

    def _gone(self, key: str) -> None:
        code = self._store.remove(key, True)
        if code and self._store.is_exist(key) == PRESENT:
            raise OSError(errno.EIO, f"the store does not remove a key (code {code})")

    def _done(self, code: int, what: str) -> None:
        if code:
            raise OSError(errno.ENOSPC, f"the store does not {what} (code {code})")
