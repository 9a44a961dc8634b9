"""What the engine keeps of a session: the ids of the path it ran last, marks on it, and where its K/V lay.

    ids    | base ......... | delta | answer |
    marks          ^ length -> digest     ^    ^     after every prompt and after every answer (docs/engine-wire.md)

A kept path owns no page. It remembers (page, uid) pairs; who still finds the uid on the page may use it, so a pool
full of idle sessions admits whoever comes. Knows no tensors and no clock.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from engines.contract import Base, UnknownBase
from engines.local.kv.pool import Pages, Uids

MAX_MARKS = 256  # of one session: 128 turns back


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """Where the K/V of a path was: full blocks, and a partial last one with `tail_len` slots written."""

    pages: Pages
    uids: Uids
    tail_page: int = 0
    tail_uid: int = 0
    tail_len: int = 0
    tail_name: bytes = b""  # of the partial block in the tiers below; empty where there are none


@dataclass(slots=True)
class SessionPath:
    session: str
    salt: str
    ids: array[int]
    marks: dict[int, bytes]  # length -> digest, shortest first
    blocks: KeptBlocks
    last_used_s: float
    min_bits: int = 0  # what its last request wanted of K/V at least
    system_tokens: int = 0  # of the path's beginning
    recent_from: int = 0  # where its last turns begin; 0: its marks say

    def mark(self, base: Base) -> bool:
        return self.marks.get(base.length) == base.digest


def session_tag(session: str, salt: str) -> int:
    """A number (63 bits, never 0) for the pool's books. A collision would only erase a cache too many."""
    spelled = f"{len(salt)}:{salt}{session}".encode()
    return int.from_bytes(hashlib.sha256(spelled).digest()[:8], "little") >> 1 | 1


@dataclass(slots=True)
class SessionCache:
    """Paths by (session, salt), the least recently used dropped beyond `max_sessions` or `max_tokens` in all."""

    max_sessions: int
    max_tokens: int
    _paths: OrderedDict[tuple[str, str], SessionPath] = field(default_factory=OrderedDict)
    _tokens: int = 0

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> Iterator[SessionPath]:
        return iter(self._paths.values())

    def get(self, session: str, salt: str, *, touch: bool = True) -> SessionPath | None:
        """`touch`: it counts as used."""
        path = self._paths.get((session, salt))
        if path is not None and touch:
            self._paths.move_to_end((session, salt))
        return path

    def find(self, session: str, salt: str, base: Base) -> SessionPath:
        """The session's path, if `base` is a mark on it; UnknownBase otherwise."""
        path = self.get(session, salt)
        if path is None or not path.mark(base):
            known = "no path is kept" if path is None else f"{len(path.ids)} ids are kept, without such a mark"
            raise UnknownBase(f"base of {base.length} ids in session {session!r}: {known}", length=base.length)
        return path

    def put(self, path: SessionPath) -> list[SessionPath]:
        """Keep `path` -> the paths that went for it, the session's former one included."""
        key = (path.session, path.salt)
        gone = [former] if (former := self.pop(*key)) is not None else []
        self._paths[key] = path
        self._tokens += len(path.ids)
        while len(self._paths) > self.max_sessions or (self._tokens > self.max_tokens and len(self._paths) > 1):
            oldest = self.pop(*next(iter(self._paths)))
            assert oldest is not None
            gone.append(oldest)
        return gone

    def pop(self, session: str, salt: str) -> SessionPath | None:
        path = self._paths.pop((session, salt), None)
        if path is not None:
            self._tokens -= len(path.ids)
        return path


def grown_marks(path: SessionPath | None, base: Base | None, length: int, digest: bytes) -> dict[int, bytes]:
    """Marks of a path that goes on from `base`, a mark of `path`, to `length`: the youngest MAX_MARKS."""
    marks: dict[int, bytes] = {}
    if path is not None and base is not None:
        marks = {at: mark for at, mark in path.marks.items() if at <= base.length}
    marks[length] = digest
    return dict(list(marks.items())[-MAX_MARKS:])
