"""The paths that EchoEngine keeps, and which of their blocks a prompt finds again: prefix caching without a model.

    path   0 ........ mark ........... mark ........ mark        mark: length -> digest, after prompts and answers
           | block | block | block | block | tail |              block: `block_size` ids under one chain digest

A path belongs to (session, salt), or to nobody; blocks are shared by digest, rooted in the salt. Over capacity the
path that was used longest ago goes, and with it the blocks that no other path holds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from engines.contract import EMPTY_DIGEST, Base, chain_digest
from engines.echo_tokens import ID_BYTES
from engines.kv_log import Block, KvLog

Key = tuple[str | None, str, int]  # session, salt, number of the request; 0 for the one path that a session keeps


@dataclass(slots=True)
class Path:
    """The ids of a path, its marks, and the chain digests of its whole blocks."""

    ids: bytearray = field(default_factory=bytearray)
    marks: dict[int, bytes] = field(default_factory=lambda: {0: EMPTY_DIGEST})
    blocks: list[bytes] = field(default_factory=list)
    computed: int = 0  # tokens whose KV exists: all but the last generated one

    @property
    def length(self) -> int:
        return len(self.ids) // ID_BYTES


@dataclass(frozen=True, slots=True)
class Run:
    """A prompt that was put in."""

    key: Key
    path: Path
    prompt_tokens: int
    cached_tokens: int  # never all of them: the last is computed anew for its logits


class PathStore:
    """Every kept path, within `num_blocks` blocks. `log` is told of each block that is held now, or no more."""

    def __init__(self, *, block_size: int, num_blocks: int, log: KvLog | None = None) -> None:
        self._log = log
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._paths: OrderedDict[Key, Path] = OrderedDict()
        self._holders: Counter[bytes] = Counter()  # block digest -> paths that hold it
        self._number = 0

    @property
    def cached_blocks(self) -> int:
        return len(self._holders)

    def holds(self, session: str | None, salt: str, base: Base) -> bool:
        """Whether `base` is a mark of this session's path."""
        path = self._paths.get((session, salt, 0))
        return path is not None and path.marks.get(base.length) == base.digest

    def start(self, session: str | None, salt: str, base: Base | None, delta: bytes, *, keep: bool = True) -> Run:
        """Put a prompt in. `base` must be held. Without a base the path starts anew, though its blocks may be known.

        `keep` off, as for background work: the session's path stays as it is, and this one stands beside it.
        """
        self._number += 1
        kept = (session, salt, 0)
        key = kept if session is not None and keep else (session, salt, self._number)
        path = self._paths.pop(kept, None) if key == kept else self._copied(kept)
        path = path or Path()
        found = self._cut(path, base.length) if base is not None else self._restart(path, delta)
        digest = path.marks[path.length if base is None else base.length]
        path.ids += delta
        path.marks[path.length] = chain_digest(digest, delta)
        found = max(found, self._grow(path, salt))
        self._paths[key] = path
        path.computed = path.length
        self._evict(key)
        return Run(key, path, path.length, min(found, path.length - 1))

    def append(self, run: Run, ids: bytes) -> None:
        """Add what was generated, and mark its end."""
        key, path = run.key, run.path
        if not ids or self._paths.get(key) is not path or path.length != run.prompt_tokens:
            return  # nothing generated, or the path was forgotten, evicted or taken by another request meanwhile
        digest = path.marks[path.length]
        path.ids += ids
        path.marks[path.length] = chain_digest(digest, ids)
        path.computed = path.length - 1
        self._grow(path, key[1])
        self._evict(key)

    def forget(self, session: str, salt: str) -> int:
        """Drop the session's path; how many blocks that freed."""
        before = self.cached_blocks
        for key in [key for key in self._paths if key[:2] == (session, salt)]:
            self._drop(key)
        return before - self.cached_blocks

    def kept(self) -> list[tuple[str, int]]:
        """(session, bytes of its blocks' ids), the least recently used first."""
        size = self.block_size * ID_BYTES
        named = ((key[0], len(path.blocks) * size) for key, path in self._paths.items() if key[2] == 0)
        return [(session, held) for session, held in named if session is not None]

    def check(self) -> None:
        """Every block is held by exactly the paths that list it."""
        counted = Counter(block for path in self._paths.values() for block in path.blocks)
        assert counted == self._holders, "block holders do not add up"
        assert all(len(path.blocks) == path.length // self.block_size for path in self._paths.values())

    def _copied(self, key: Key) -> Path | None:
        path = self._paths.get(key)
        if path is None:
            return None
        self._holders.update(path.blocks)
        return Path(bytearray(path.ids), dict(path.marks), list(path.blocks), path.computed)

    def _cut(self, path: Path, length: int) -> int:
        """Shorten to an earlier mark. The tokens before it are cached as far as they were computed."""
        found = min(length, path.computed)
        del path.ids[length * ID_BYTES :]
        path.marks = {at: digest for at, digest in path.marks.items() if at <= length}
        whole = length // self.block_size
        self._release(path.blocks[whole:])
        del path.blocks[whole:]
        return found

    def _restart(self, path: Path, delta: bytes) -> int:
        """Begin at nothing; what the old path and the new prompt have in common is still cached."""
        found = min(_common(path.ids, delta), path.computed)
        self._cut(path, 0)
        return found

    def _grow(self, path: Path, salt: str) -> int:
        """Name the blocks that became whole; tokens up to the last leading one that was already known."""
        known, still = 0, True
        size = self.block_size * ID_BYTES
        for index in range(len(path.blocks), path.length // self.block_size):
            parent = path.blocks[index - 1] if index else chain_digest(EMPTY_DIGEST, salt.encode())
            token_bytes = bytes(path.ids[index * size : (index + 1) * size])
            block = chain_digest(parent, token_bytes)
            if self._log is not None and block not in self._holders:
                self._log.stored(Block(block, parent if index else None, token_bytes, "" if index else salt))
            still = still and block in self._holders
            known = (index + 1) * self.block_size if still else known
            self._holders[block] += 1
            path.blocks.append(block)
        return known

    def _evict(self, keep: Key) -> None:
        while self.cached_blocks > self.num_blocks and len(self._paths) > 1:
            oldest = next(iter(self._paths))
            if oldest == keep:
                self._paths.move_to_end(keep)
                continue
            self._drop(oldest)

    def _drop(self, key: Key) -> None:
        self._release(self._paths.pop(key).blocks)

    def _release(self, blocks: list[bytes]) -> None:
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                if self._log is not None:
                    self._log.removed(block)


def _common(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """How many leading ids two lists have in common."""
    low, high = 0, min(len(one), len(other)) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * ID_BYTES : middle * ID_BYTES] == other[low * ID_BYTES : middle * ID_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
