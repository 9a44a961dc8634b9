"""The disk tier: files of pieces in one folder, bounded by bytes. Its owner never waits: threads read and write.

    offer   a piece came down        -> gathered -> a file of some of them          (writer thread)
    save    a session's whole path   -> a file of its own, which replaces the former one
    fetch   names                    -> Fetch, done when the reader has been there  (reader thread)
    forget  what only that session used: its file goes, in others its bytes are zeroed
    poll    what the threads have done so far takes effect; called between two steps

What cannot be written or read costs a computation: it is counted, told, and the file goes. After a failed write nothing
is written for a while. Files outlive the process: those of the same model are found again at the next start.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from engines.kv_log import KvLog
from engines.local.kv.precision import Precision
from engines.local.kv.session_cache import session_tag
from engines.local.kv.tiers import disk_jobs
from engines.local.kv.tiers.catalogue import Catalogue
from engines.local.kv.tiers.disk_jobs import Key
from engines.local.kv.tiers.files import (
    SUFFIX,
    UNFINISHED,
    BadFile,
    KvFile,
    Layout,
    StoredPath,
    erase,
    read_header,
    write_file,
)
from engines.local.kv.tiers.piece import Piece

GATHER_BYTES = 16 << 20  # of pieces that came down before they are written as one file
GATHER_S = 1.0  # or after so long
WAITING_BYTES = 256 << 20  # gathered or being written; a piece beyond is lost
BACK_OFF_S = 30.0  # without writing, after a write that failed
PATIENCE_S = 10.0  # with a read; what it would have brought is then computed
LOCK = "lock"


@dataclass(slots=True, eq=False)
class Fetch:
    """Pieces on their way from the disk: `coming` until they are in `found`, as far as they were whole."""

    asked_s: float
    coming: bool = True
    done: bool = False  # they have been put where they were wanted
    found: list[tuple[Piece, Tensor]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Saved:
    """A session's file on its way. `done` once `file` is there, or `error` says why it is not."""

    done: bool = False
    file: KvFile | None = None
    error: Exception | None = None


@dataclass(slots=True)
class DiskCounts:
    """Since the start."""

    failed_writes: int = 0
    failed_reads: int = 0  # files that could not be read, or were not what had been written
    refused: int = 0  # files that were found at the start and are of no use
    lost: int = 0  # pieces that were not written
    evicted: int = 0  # files that went for others


@dataclass(slots=True)
class _Reading:
    fetch: Fetch
    file: KvFile
    future: Future[tuple[list[tuple[Piece, Tensor]], Exception | None]]


@dataclass(slots=True)
class _Writing:
    pieces: list[Piece]
    nbytes: int
    saved: Saved | None
    future: Future[KvFile]
    tag: int = 0  # of the session that is saved
    forgotten: bool = False  # meanwhile


class DiskTier:
    """`sizes`: bytes of a piece by precision. `report` is told what went wrong, a sentence each. The folder is this
    process's alone. Raises OSError where it cannot be made or listed."""

    def __init__(
        self,
        folder: Path,
        capacity: int,
        layout: Layout,
        sizes: Mapping[Precision, int],
        *,
        clock: Callable[[], float],
        report: Callable[[str], None],
        log: KvLog | None = None,
    ) -> None:
        self.folder, self.capacity, self.layout, self.sizes = folder, capacity, layout, dict(sizes)
        self.counts = DiskCounts()
        self._clock, self._report = clock, report
        self.catalogue = Catalogue(log)
        self._gathered: list[tuple[Piece, Tensor]] = []
        self._gathered_bytes = 0
        self._gathered_s = 0.0
        self._waiting_bytes = 0
        self._silent_until_s = -1.0
        self._writes: list[_Writing] = []
        self._reads: list[_Reading] = []
        self._erasures: list[tuple[Path, Future[None]]] = []
        self._stuck: set[Path] = set()  # to be removed, and could not be
        self._writer = ThreadPoolExecutor(1, "kv-write")
        self._reader = ThreadPoolExecutor(1, "kv-read")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"kv_dir {folder} is another engine's") from None

    def __len__(self) -> int:
        """Blocks that are found here."""
        return len(self.catalogue)

    @property
    def now_s(self) -> float:
        return self._clock()

    def find(self, name: bytes) -> Piece | None:
        return self.catalogue.find(name)

    def __contains__(self, name: bytes) -> bool:
        return name in self.catalogue

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return self.catalogue.nbytes

    @property
    def erasing(self) -> bool:
        """Something that was forgotten may still be in a file."""
        return bool(self._erasures) or any(
            writing.forgotten or not all(piece.users for piece in writing.pieces) for writing in self._writes
        )

    @property
    def stuck(self) -> int:
        """Files that were to be removed and could not be: the next `forget` tries again."""
        return len(self._stuck)

    @property
    def busy(self) -> bool:
        """A thread has something to do, or has something to say."""
        return bool(self._writes or self._reads or self._erasures)

    @property
    def pending(self) -> bool:
        return self.busy or bool(self._gathered)

    # ------------------------------------------------------------------ at the start
    def scan(self) -> list[KvFile]:
        """Take up the files that an earlier process left -> those of sessions. What is of no use is removed: an erasure
        could not find what lies in it."""
        found: list[KvFile] = []
        paths = sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        for path in paths:
            try:
                file = read_header(path, self.layout, self.sizes)
            except (BadFile, OSError) as error:
                self.counts.refused += 1
                self._report(f"KV file {path.name} is not used: {error}")
                path.unlink(missing_ok=True)
                continue
            if not file.pieces and file.stored is None:
                path.unlink(missing_ok=True)  # all of it was erased
                continue
            self._enter(file)
            if file.stored is not None:
                found.append(file)
        for path in self.folder.glob(f"*{UNFINISHED}"):
            path.unlink(missing_ok=True)
        self._make_room(0)
        return [file for file in found if file.path in self.catalogue.files]

    # ------------------------------------------------------------------ down
    def offer(self, piece: Piece, content: Tensor) -> bool:
        """Write the piece some time; False where it is lost. `content` is the caller's again when this returns."""
        if (here := self.catalogue.find(piece.name)) is not None:
            here.users.update(piece.users)
            return True
        nbytes = len(content)
        if self._clock() < self._silent_until_s or self._waiting_bytes + nbytes > WAITING_BYTES:
            self.counts.lost += 1
            return False
        if not self._gathered:
            self._gathered_s = self._clock()
        self._gathered.append((piece, content.clone()))
        self._gathered_bytes += nbytes
        self._waiting_bytes += nbytes
        return True

    def save(self, stored: StoredPath, pieces: Sequence[tuple[Piece, Tensor | None]]) -> Saved:
        """Write a session's path as a file of its own; a content that is None lies here already."""
        saved = Saved()
        sources = [self.catalogue.place(piece) if content is None else None for piece, content in pieces]
        size = sum(self.sizes[piece.precision] for piece, _ in pieces) + len(stored.ids) * 2
        if not self._make_room(size, besides={source[0].path for source in sources if source is not None}):
            saved.done, saved.error = True, _full(size, self.capacity)
            return saved
        own = [replace(piece, users=set(piece.users)) for piece, _ in pieces]
        contents = [content for _, content in pieces]
        future = self._writer.submit(disk_jobs.save, self._new_path(), self.layout, own, contents, sources, stored)
        self._writes.append(_Writing(own, size, saved, future, session_tag(stored.session, stored.salt)))
        return saved

    def adopt(self, path: Path, key: Key) -> Saved:
        """Take a finished file of that session, which lies in the folder under a name of its own, if it is whole. Where
        it is not, it is removed."""
        saved, size = Saved(), path.stat().st_size
        if not self._make_room(size):
            path.unlink(missing_ok=True)
            saved.done, saved.error = True, _full(size, self.capacity)
            return saved
        future = self._writer.submit(disk_jobs.adopt, path, self._new_path(), self.layout, self.sizes, key)
        self._writes.append(_Writing([], size, saved, future, session_tag(*key)))
        return saved

    # ------------------------------------------------------------------ up
    def fetch(self, names: Sequence[bytes]) -> Fetch:
        """Bring these pieces, which are here."""
        fetch = Fetch(self._clock())
        by_file: dict[Path, dict[int, None]] = {}
        for name in names:
            found = self.catalogue.locate(name)
            assert found is not None, "a block that is not here"
            by_file.setdefault(found[0].path, {})[found[1]] = None
        for path, places in by_file.items():
            file = self.catalogue.files[path]
            self.catalogue.touch(file)
            wanted = [(file.pieces[at], file.places[at]) for at in places]
            self._reads.append(_Reading(fetch, file, self._reader.submit(disk_jobs.read, path, wanted)))
        fetch.coming = bool(by_file)
        return fetch

    # ------------------------------------------------------------------ between two steps
    def poll(self) -> None:
        """Let what the threads have done take effect, and give them what has been gathered."""
        for reading in [reading for reading in self._reads if reading.future.done()]:
            self._reads.remove(reading)
            self._read(reading)
        for writing in [writing for writing in self._writes if writing.future.done()]:
            self._writes.remove(writing)
            self._written(writing)
        for path, future in [erasure for erasure in self._erasures if erasure[1].done()]:
            self._erasures.remove((path, future))
            self._erased(path, future.exception())
        if self._gathered and (self._gathered_bytes >= GATHER_BYTES or self._clock() - self._gathered_s >= GATHER_S):
            self._write_gathered()

    def wait(self, timeout_s: float, besides: Sequence[Future[Any]] = ()) -> None:
        """Until a thread has done something, or one of `besides`, or `timeout_s` have passed."""
        futures: list[Future[Any]] = [*besides, *(reading.future for reading in self._reads)]
        futures += [writing.future for writing in self._writes]
        futures += [erasure[1] for erasure in self._erasures]
        if futures:
            wait(futures, timeout_s, return_when="FIRST_COMPLETED")

    def flush(self) -> None:
        """Write what has been gathered, now."""
        if self._gathered:
            self._write_gathered()

    # ------------------------------------------------------------------ away
    def forget(self, tag: int) -> int:
        """What that session used goes: whole files are removed, in others its bytes are zeroed -> blocks. It is gone
        from the disk when `erasing` is over. Others lose what they shared with it: a header's list of users may be
        older than theirs, and an erasure must find all."""
        gone = 0
        for path in self._stuck:
            self._erasures.append((path, self._remove(path)))
        kept: list[tuple[Piece, Tensor]] = []
        for piece, content in self._gathered:
            if piece.forget(tag):
                content.zero_()
            else:
                kept.append((piece, content))
        self._gathered = kept
        left = sum(len(content) for _, content in self._gathered)
        self._waiting_bytes -= self._gathered_bytes - left
        self._gathered_bytes = left
        for writing in self._writes:
            writing.forgotten |= writing.tag == tag
            for piece in writing.pieces:
                _give_up(piece, tag)  # `_written` removes what nobody uses
        for file in list(self.catalogue.files.values()):
            if file.stored is not None and session_tag(file.stored.session, file.stored.salt) == tag:
                gone += sum(len(piece.names) for piece in file.pieces)
                self._drop(file)
                continue
            if any(tag in piece.users for piece in file.pieces):
                for piece in file.pieces:
                    _give_up(piece, tag)
                gone += self._tidy(file)
        return gone

    def drop_session(self, session: str, salt: str) -> None:
        """Its file goes: it lies elsewhere."""
        if (file := self.catalogue.of_session(session, salt)) is not None:
            self._drop(file)

    def close(self) -> None:
        """Wait for the threads."""
        self._writer.shutdown()
        self._reader.shutdown()
        os.close(self._lock)

    def check(self) -> None:
        """The books agree with themselves."""
        self.catalogue.check()
        assert self.nbytes <= self.capacity, "over the bound"

    # ------------------------------------------------------------------ books
    def _new_path(self) -> Path:
        return self.folder / f"{secrets.token_hex(8)}{SUFFIX}"

    def _enter(self, file: KvFile) -> None:
        if (former := self.catalogue.enter(file)) is not None:
            self._drop(former)

    def _drop(self, file: KvFile) -> None:
        self.catalogue.leave(file)
        self._erasures.append((file.path, self._remove(file.path)))

    def _remove(self, path: Path) -> Future[None]:
        return self._writer.submit(path.unlink, True)

    def _tidy(self, file: KvFile) -> int:
        """Remove what nobody uses from a file -> blocks."""
        unused = [at for at, piece in enumerate(file.pieces) if not piece.users]
        gone = sum(self.catalogue.lose(file.pieces[at], file) for at in unused)
        for at in unused:
            file.pieces[at].token_bytes = bytes(len(file.pieces[at].token_bytes))
        if len(unused) == len(file.pieces):
            self._drop(file)
            return gone
        places = [file.places[at] for at in unused]
        self._erasures.append((file.path, self._writer.submit(erase, file.path, places)))
        return gone

    def _make_room(self, nbytes: int, besides: set[Path] | None = None) -> bool:
        """Let files go, the one used longest ago first, those of sessions last."""
        reserved = sum(writing.nbytes for writing in self._writes)
        over = self.nbytes + reserved + nbytes - self.capacity
        kept = besides or set()
        files = [file for file in self.catalogue.files.values() if file.path not in kept]
        for file in sorted(files, key=lambda file: file.stored is not None):
            if over <= 0:
                break
            over -= file.size
            self.counts.evicted += 1
            self._drop(file)
        return over <= 0

    def _write_gathered(self) -> None:
        gathered, nbytes = self._gathered, self._gathered_bytes
        self._gathered, self._gathered_bytes = [], 0
        self._waiting_bytes -= nbytes
        if not gathered:
            return
        size = sum(len(content) + 2048 for _, content in gathered)
        if not self._make_room(size):
            self.counts.lost += len(gathered)
            return
        pieces = [piece for piece, _ in gathered]
        contents = [content for _, content in gathered]
        self._waiting_bytes += nbytes
        future = self._writer.submit(write_file, self._new_path(), self.layout, pieces, contents)
        self._writes.append(_Writing(pieces, size, None, future))

    def _written(self, writing: _Writing) -> None:
        if writing.saved is None:
            self._waiting_bytes -= sum(self.sizes[piece.precision] for piece in writing.pieces)
        error = writing.future.exception()
        if error is not None:
            if not isinstance(error, OSError | BadFile):
                raise error
            if writing.saved is not None:
                writing.saved.done, writing.saved.error = True, error
            if isinstance(error, BadFile | FileNotFoundError):
                return  # a file that came from elsewhere, and is no good, or has been taken away
            self.counts.failed_writes += 1
            self.counts.lost += len(writing.pieces)
            self._silent_until_s = self._clock() + BACK_OFF_S
            self._report(f"K/V was not written to disk, and none is for {BACK_OFF_S:g} s: {error}")
        elif writing.forgotten:
            self._erasures.append((writing.future.result().path, self._remove(writing.future.result().path)))
            error = OSError("the session was forgotten")
        elif self._make_room((file := writing.future.result()).size):
            self._enter(file)
            if any(not piece.users for piece in file.pieces):
                self._tidy(file)
            if writing.saved is not None:
                writing.saved.file = file
        else:
            self._erasures.append((file.path, self._remove(file.path)))
            error = _full(file.size, self.capacity)
        if writing.saved is not None:
            writing.saved.done, writing.saved.error = True, error

    def _erased(self, path: Path, error: BaseException | None) -> None:
        if error is None or isinstance(error, FileNotFoundError):
            self._stuck.discard(path)
            return
        self._report(f"KV file {path.name} could not be erased: {error}")
        if (file := self.catalogue.files.get(path)) is not None:
            self._drop(file)  # the whole of it, then
        else:
            self._stuck.add(path)

    def _read(self, reading: _Reading) -> None:
        found, error = reading.future.result()
        # what was erased meanwhile is nobody's any more
        reading.fetch.found += [
            (replace(piece, users=set(piece.users)), content) for piece, content in found if piece.users
        ]
        if error is not None and self.catalogue.files.get(reading.file.path) is reading.file:
            self.counts.failed_reads += 1
            self._report(f"KV file {reading.file.path.name} is not used any more: {error}")
            self._drop(reading.file)
        reading.fetch.coming = any(other.fetch is reading.fetch for other in self._reads)


def _give_up(piece: Piece, tag: int) -> None:
    """In a file a piece goes with the first of its users."""
    if tag in piece.users:
        piece.users.clear()


def _full(nbytes: int, capacity: int) -> OSError:
    return OSError(errno.ENOSPC, f"{nbytes} bytes are more than there is room for in a disk tier of {capacity}")


def free_bytes(folder: Path) -> int:
    """Of the file system that `folder`, or the nearest folder above it, lies on."""
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
