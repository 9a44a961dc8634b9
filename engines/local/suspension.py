"""Sessions that are put down and taken up again, on this replica or on another: what is asked, and what came of it.

    suspend  its K/V into a file, or into host memory where there is no disk tier; the device's pages are free. Or the
             file into a remote store, from where any replica of the model can resume it
    resume   its K/V from the store, from the file, to host memory, from where its next turn takes it
    save     its K/V into a file, which another replica may be sent; nothing here changes
    adopt    a file that another replica has saved

A session in a file needs no resume: its next turn finds what it needs. Resuming spares that turn the wait. Each request
has a number; what came of it is told by `settled`. Knows no HTTP; the clock is passed in.
"""

from __future__ import annotations

import errno
import secrets
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from engines.blocks import ids_from_bytes
from engines.local.kv.cache import KVCache
from engines.local.kv.session_cache import KeptBlocks, SessionCache, SessionPath, session_tag
from engines.local.kv.tiers.disk import DiskTier, Fetch, Saved
from engines.local.kv.tiers.files import UNFINISHED, KvFile, OtherModel, StoredPath
from engines.local.kv.tiers.remote import RemoteTier
from engines.local.kv.tiers.tiers import Tiers
from engines.local.refusal import Refusal

Answer = dict[str, Any] | Refusal
Kind = Literal["suspend", "send", "save", "adopt", "bring"]
NEAR = ("device", "host", "disk")


@dataclass(slots=True)
class _Saving:
    kind: Kind
    saved: Saved


@dataclass(slots=True)
class _Sending:
    """A session's file on its way to the store."""

    future: Future[bool]
    file: KvFile


@dataclass(slots=True)
class _Bringing:
    """And back."""

    future: Future[bool]
    into: Path
    session: str
    salt: str
    forgotten: bool = False  # meanwhile


@dataclass(slots=True)
class _Fetching:
    fetch: Fetch
    path: SessionPath


@dataclass(slots=True)
class Suspension:
    """`busy(tag)`: a request of that session runs or waits."""

    cache: KVCache
    sessions: SessionCache
    tiers: Tiers | None
    clock: Callable[[], float]
    busy: Callable[[int], bool]
    _savings: dict[int, _Saving] = field(default_factory=dict)
    _fetchings: dict[int, _Fetching] = field(default_factory=dict)
    _sendings: dict[int, _Sending] = field(default_factory=dict)
    _bringings: dict[int, _Bringing] = field(default_factory=dict)
    _answers: list[tuple[int, Answer]] = field(default_factory=list)

    def take_up_files(self) -> int:
        """Those of sessions that an earlier process left -> how many."""
        files = self.tiers.disk.scan() if self.tiers is not None and self.tiers.disk is not None else []
        for file in files:
            self._keep(file)
        return len(files)

    def suspend(self, number: int, session: str, salt: str, to: str | None = None) -> None:
        """`to`: host, disk or remote; None: disk, or host where there is none."""
        if (path := self._path(number, session, salt)) is None:
            return
        to = to or ("disk" if self._disk is not None else "host")
        if to == "host" and self.tiers is not None:
            pages = self.cache.put_down(path, session_tag(session, salt))
            self._answer(number, {"tokens": len(path.ids), "blocks": pages, "bytes": 0, "tier": "host"})
        elif (to == "disk" and self._disk is not None) or (to == "remote" and self._remote is not None):
            self._save(number, "send" if to == "remote" else "suspend", path)
        else:
            self._refuse(number, "unsupported", f"this engine has no {to} tier to suspend to")

    def save(self, number: int, session: str, salt: str) -> None:
        if (path := self._path(number, session, salt)) is not None and self._has_disk(number):
            self._save(number, "save", path)

    def resume(self, number: int, session: str, salt: str) -> None:
        path = self.sessions.get(session, salt, touch=False)
        if self._remote is not None and (path is None or not any(self._lying(path)[tier] for tier in NEAR)):
            self._bring(number, session, salt)
            return
        if (path := self._path(number, session, salt)) is None:
            return
        self._fetch(number, path)

    def _fetch(self, number: int, path: SessionPath) -> None:
        names = self.cache.names(path)
        tiers = self.tiers
        wanted = [name for name in names if tiers is not None and tiers.on_disk(name) and tiers.find(name) is None]
        if tiers is None or not wanted:
            self._answer(number, self._lying(path))
            return
        self._fetchings[number] = _Fetching(tiers.fetch(wanted[: tiers.host.most]), path)

    def adopt(self, number: int, path: Path, session: str, salt: str) -> None:
        """A file in the disk tier's folder, of that session; it is taken over, or removed."""
        if not self._has_disk(number):
            return
        assert self._disk is not None
        if self.busy(session_tag(session, salt)):
            path.unlink(missing_ok=True)
            self._refuse(number, "session_busy", f"session {session!r} has a request that runs or waits")
            return
        try:
            saved = self._disk.adopt(path, (session, salt))
        except OSError as error:  # who brought it has taken it away again
            self._refuse(number, "storage_failed", f"the file is not there: {error}")
            return
        self._savings[number] = _Saving("adopt", saved)

    def settled(self) -> list[tuple[int, Answer]]:
        """What came of requests since the last call: their numbers and answers."""
        for number, saving in [item for item in self._savings.items() if item[1].saved.done]:
            del self._savings[number]
            self._saved(number, saving)
        for number, sending in [item for item in self._sendings.items() if item[1].future.done()]:
            del self._sendings[number]
            self._sent(number, sending)
        for number, bringing in [item for item in self._bringings.items() if item[1].future.done()]:
            del self._bringings[number]
            self._brought(number, bringing)
        for number, fetching in [item for item in self._fetchings.items() if item[1].fetch.done]:
            del self._fetchings[number]
            self._answer(number, self._lying(fetching.path))
        answers, self._answers = self._answers, []
        return answers

    @property
    def pending(self) -> bool:
        return bool(self._savings or self._sendings or self._bringings or self._fetchings or self._answers)

    def forget(self, session: str, salt: str) -> None:
        """What is on its way from the store is wanted no more."""
        for bringing in self._bringings.values():
            bringing.forgotten |= (bringing.session, bringing.salt) == (session, salt)

    @property
    def erasing(self) -> bool:
        """Something that was forgotten may still be in a file."""
        coming = any(bringing.forgotten for bringing in self._bringings.values())
        return coming or (self.tiers is not None and self.tiers.erasing)

    @property
    def stuck(self) -> int:
        """Files that hold what was forgotten and could not be removed."""
        return self.tiers.stuck if self.tiers is not None else 0

    # ------------------------------------------------------------------
    @property
    def _disk(self) -> DiskTier | None:
        return self.tiers.disk if self.tiers is not None else None

    @property
    def _remote(self) -> RemoteTier | None:
        return self.tiers.remote if self.tiers is not None else None

    def _path(self, number: int, session: str, salt: str) -> SessionPath | None:
        path = self.sessions.get(session, salt, touch=False)
        if path is None:
            self._refuse(number, "not_found", f"no path is kept of session {session!r}")
        elif self.busy(session_tag(session, salt)):
            self._refuse(number, "session_busy", f"session {session!r} has a request that runs or waits")
        else:
            return path
        return None

    def _has_disk(self, number: int) -> bool:
        if self._disk is None:
            self._refuse(number, "unsupported", "this engine has no disk tier (kv_dir)")
        return self._disk is not None

    def _bring(self, number: int, session: str, salt: str) -> None:
        assert self._disk is not None
        assert self._remote is not None
        into = self._disk.folder / f"{secrets.token_hex(8)}{UNFINISHED}"
        future = self._remote.get(session_tag(session, salt), into)
        self._bringings[number] = _Bringing(future, into, session, salt)

    def _brought(self, number: int, bringing: _Bringing) -> None:
        assert self._disk is not None
        error = bringing.future.exception()
        if error is not None or bringing.forgotten or not bringing.future.result():
            bringing.into.unlink(missing_ok=True)
            code, why = ("storage_failed", f"{error}") if error is not None else ("not_found", "it is kept nowhere")
            self._refuse(number, code, f"session {bringing.session!r}: {why}")
            return
        saved = self._disk.adopt(bringing.into, (bringing.session, bringing.salt))
        self._savings[number] = _Saving("bring", saved)

    def _sent(self, number: int, sending: _Sending) -> None:
        stored, error = sending.file.stored, sending.future.exception()
        assert stored is not None
        assert self._disk is not None
        if error is not None:
            self._refuse(number, "storage_failed", f"it stays in a file here: {error}")
            return
        self._disk.drop_session(stored.session, stored.salt)
        self._answer(number, _told(sending.file) | {"tier": "remote"})

    def _save(self, number: int, kind: Kind, path: SessionPath) -> None:
        assert self._disk is not None
        pieces = self.cache.collect(path, session_tag(path.session, path.salt))
        marks = tuple(path.marks.items())
        ids, tail = path.ids.tobytes(), path.blocks.tail_name
        asked = (path.min_bits, path.system_tokens, path.recent_from)
        stored = StoredPath(path.session, path.salt, ids, marks, *asked, tail)
        self._savings[number] = _Saving(kind, self._disk.save(stored, pieces))

    def _saved(self, number: int, saving: _Saving) -> None:
        file, error = saving.saved.file, saving.saved.error
        if file is None or file.stored is None:
            code = "other_model" if isinstance(error, OtherModel) else "kv_file_refused"
            if isinstance(error, OSError):
                code = "storage_full" if error.errno == errno.ENOSPC else "storage_failed"
            self._refuse(number, code, f"{error}")
            return
        stored = file.stored
        tag = session_tag(stored.session, stored.salt)
        if saving.kind in ("adopt", "bring"):
            path = self._keep(file)
            if saving.kind == "bring":
                self._fetch(number, path)
                return
        elif saving.kind != "save" and not self.busy(tag):
            self.cache.let_go(tag)
        if saving.kind == "send":
            assert self._remote is not None
            self._sendings[number] = _Sending(self._remote.put(tag, file.path), file)
            return
        self._answer(number, _told(file) | ({"path": str(file.path)} if saving.kind == "save" else {}))

    def _keep(self, file: KvFile) -> SessionPath:
        stored = file.stored
        assert stored is not None
        full = sum(len(piece.names) for piece in file.pieces if not piece.partial)
        tail = next((piece for piece in file.pieces if piece.partial and piece.name == stored.tail_name), None)
        nowhere = np.full(full, -1, np.int64)  # no page bears such a name
        length, name = (tail.num_tokens, tail.name) if tail is not None else (0, b"")
        blocks = KeptBlocks(np.zeros(full, np.int32), nowhere, 0, -1, length, name)
        ids: array[int] = ids_from_bytes(stored.ids)
        asked = (stored.min_bits, stored.system_tokens, stored.recent_from)
        path = SessionPath(stored.session, stored.salt, ids, dict(stored.marks), blocks, self.clock(), *asked)
        for gone in self.sessions.put(path):
            self.cache.drop(gone.blocks)
        return path

    def _lying(self, path: SessionPath) -> dict[str, Any]:
        """Where a path's blocks lie now."""
        names, tiers = self.cache.names(path), self.tiers
        pages = self.cache.pool.owner[path.blocks.pages] == path.blocks.uids
        host = sum(tiers.find(name) is not None for name in names) if tiers is not None else 0
        disk = sum(tiers.on_disk(name) for name in names) if tiers is not None else 0
        device = int(np.count_nonzero(pages)) if len(path.blocks.uids) else 0
        return {"tokens": len(path.ids), "device": device, "host": host, "disk": disk}

    def _refuse(self, number: int, code: str, message: str) -> None:
        self._answers.append((number, Refusal(code, message)))

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        self._answers.append((number, answer))


def _told(file: KvFile) -> dict[str, Any]:
    stored = file.stored
    assert stored is not None
    blocks = sum(len(piece.names) for piece in file.pieces)
    told: dict[str, Any] = {"session": stored.session, "salt": stored.salt, "tokens": len(stored.ids) // 4}
    return told | {"blocks": blocks, "bytes": file.size, "tier": "disk"}
