"""Which files of K/V there are, and which block lies in which: the disk tier's books. Knows no threads, reads nothing.

files      the one used longest ago first
where      name of a block -> the files that have it, and its piece's place in each
sessions   (session, salt) -> the file of its own
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engines.kv_log import STORAGE, Block, KvLog
from engines.local.kv.tiers.disk_jobs import Key
from engines.local.kv.tiers.files import KvFile, Place
from engines.local.kv.tiers.piece import Piece


@dataclass(slots=True)
class Catalogue:
    log: KvLog | None = None
    nbytes: int = 0
    files: dict[Path, KvFile] = field(default_factory=dict)
    _where: dict[bytes, dict[Path, int]] = field(default_factory=dict)
    _sessions: dict[Key, Path] = field(default_factory=dict)

    def __len__(self) -> int:
        """Blocks."""
        return len(self._where)

    def __contains__(self, name: bytes) -> bool:
        return name in self._where

    def find(self, name: bytes) -> Piece | None:
        found = self.locate(name)
        return found[0].pieces[found[1]] if found is not None else None

    def locate(self, name: bytes) -> tuple[KvFile, int] | None:
        """A file that has the block, and its piece's number there."""
        places = self._where.get(name)
        if places is None:
            return None
        path, at = next(iter(places.items()))
        return self.files[path], at

    def place(self, piece: Piece) -> tuple[KvFile, Place]:
        """Of a piece that is here."""
        found = self.locate(piece.name)
        assert found is not None, "a piece that is not here"
        return found[0], found[0].places[found[1]]

    def of_session(self, session: str, salt: str) -> KvFile | None:
        path = self._sessions.get((session, salt))
        return self.files[path] if path is not None else None

    def touch(self, file: KvFile) -> None:
        """It was used last."""
        self.files[file.path] = self.files.pop(file.path)

    def enter(self, file: KvFile) -> KvFile | None:
        """A file is there -> the one that it takes the place of."""
        self.files[file.path] = file
        self.nbytes += file.size
        for at, piece in enumerate(file.pieces):
            for name, parent, token_bytes in piece.blocks():
                known = self._where.setdefault(name, {})
                known[file.path] = at
                if len(known) == 1 and self.log is not None and not piece.partial:
                    at_root = piece.salt is not None and parent == piece.parent
                    salt = piece.salt if at_root and piece.salt else ""
                    self.log.stored(Block(name, None if at_root else parent, token_bytes, salt), STORAGE)
        if file.stored is None:
            return None
        key = (file.stored.session, file.stored.salt)
        former = self._sessions.pop(key, None)
        self._sessions[key] = file.path
        return self.files[former] if former is not None else None

    def leave(self, file: KvFile) -> None:
        """A file goes."""
        del self.files[file.path]
        self.nbytes -= file.size
        if file.stored is not None and self._sessions.get((file.stored.session, file.stored.salt)) == file.path:
            del self._sessions[file.stored.session, file.stored.salt]
        for piece in file.pieces:
            self.lose(piece, file)

    def lose(self, piece: Piece, file: KvFile) -> int:
        """That file has the piece no more -> blocks, if it had."""
        gone = 0
        for name in piece.names:
            known = self._where.get(name, {})
            gone += file.path in known
            if known.pop(file.path, None) is not None and not known:
                del self._where[name]
                if self.log is not None and not piece.partial:
                    self.log.removed(name, STORAGE)
        return gone

    def check(self) -> None:
        """The books agree with themselves."""
        assert self.nbytes == sum(file.size for file in self.files.values()), "bytes miscounted"
        for name, places in self._where.items():
            for path, at in places.items():
                assert name in self.files[path].pieces[at].names, "a piece is elsewhere"
        for (session, salt), path in self._sessions.items():
            stored = self.files[path].stored
            assert stored is not None
            assert (stored.session, stored.salt) == (session, salt), "a session's file is another's"
