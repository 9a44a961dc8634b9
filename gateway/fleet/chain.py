"""Names for the prefixes of a token path: one key for each chunk of 16 tokens, hashed once.

    key(0) = root        SHA-256 over the tagged fields that must be equal for K/V to be shared: salt, model, adapter
    key(n) = SHA-256 over key(n - 1) and the 16 ids of chunk n

    ids   | 0 ...... 15 | 16 ..... 31 | 32 .. 40 |
    keys  |        key1 |        key2 | pending  |

A chain remembers the keys near its end; those where its last turns ended, as far as a replica that a session left may
hold it; and those of its beginning in steps that widen (`is_mark`), as other sessions may have brought that there.

A key is cut to 16 bytes: it is where a turn may be sent, never a proof that two prompts are equal. Whatever the block
size of an engine, its blocks are named by these keys. Knows no replica.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass, replace
from hashlib import sha256

CHUNK_TOKENS = 16
_CHUNK_BYTES = 4 * CHUNK_TOKENS
KEY_BYTES = 16
LAST = 3  # keys before the last one that a chain remembers: the end of a path may lie in a block that is not whole yet
MARKS_TO = 128  # chunks: beginnings that sessions share are mostly shorter than 2,048 tokens
ENDS = 16  # two for each of the last eight turns
WHOLE = (2, 4)  # chunks in the blocks of an engine, if these have more than 16 tokens: where the last whole one ends


@dataclass(frozen=True, slots=True)
class Chain:
    """Where a path stands: the key of its last whole chunk, and the ids after it (u32 little-endian, fewer than 16)."""

    key: bytes
    pending: bytes = b""
    chunks: int = 0
    last: tuple[bytes, ...] = ()  # keys before `key`, the nearest first
    first: tuple[bytes, ...] = ()  # keys at the chunks that are marks, from the start
    ends: tuple[tuple[int, bytes], ...] = ()  # (chunks, the key there) where turns ended, the latest last

    @property
    def num_tokens(self) -> int:
        return self.chunks * CHUNK_TOKENS + len(self.pending) // 4

    def as_text(self) -> str:
        ends = b"".join(chunks.to_bytes(KEY_BYTES // 4, "little") + key for chunks, key in self.ends)
        parts = (self.key, self.pending, b"".join(self.last), b"".join(self.first), ends)
        return ".".join([str(self.chunks), *(b64encode(part).decode() for part in parts)])

    @classmethod
    def of_text(cls, text: str) -> Chain:
        chunks, *parts = text.split(".")
        key, pending, last, first, ends = map(b64decode, parts)
        at = KEY_BYTES // 4
        told = tuple((int.from_bytes(end[:at], "little"), end[at:]) for end in _pieces(ends, at + KEY_BYTES))
        return cls(key, pending, int(chunks), _pieces(last, KEY_BYTES), _pieces(first, KEY_BYTES), told)

    def ended(self) -> Chain:
        """The same path, as one whose turn ends here."""
        near = (self.key, *self.last)
        places = sorted({self.chunks - self.chunks % whole for whole in WHOLE})
        ends = [(at, near[self.chunks - at]) for at in places if at > 0 and self.chunks - at < len(near)]
        return replace(self, ends=(*self.ends, *(end for end in ends if end not in self.ends))[-ENDS:])

    def remembered(self) -> list[tuple[int, bytes]]:
        """(chunks from the start, the key there) of all but the last few keys, the farthest first."""
        marks = [chunks for chunks in range(1, min(self.chunks, MARKS_TO) + 1) if is_mark(chunks)]
        return sorted({*self.ends, *zip(marks, self.first, strict=True)}, reverse=True)


def is_mark(chunks: int) -> bool:
    """Every chunk up to 16, every second up to 32, and so on: at most an eighth of the way lies between two."""
    return chunks <= MARKS_TO and chunks % (1 << max(0, chunks.bit_length() - 4)) == 0


def _pieces(data: bytes, size: int) -> tuple[bytes, ...]:
    return tuple(data[at : at + size] for at in range(0, len(data), size))


def root(*, salt: str, model: str, adapter: str = "") -> Chain:
    """The empty path. Every field is preceded by its length, so that none can pass for two."""
    told = b"".join(
        len(field).to_bytes(4, "little") + field for field in (salt.encode(), model.encode(), adapter.encode())
    )
    return Chain(sha256(b"turnkeep path\0" + told).digest()[:KEY_BYTES])


def extend(chain: Chain, ids: bytes) -> tuple[Chain, list[bytes]]:
    """The path with `ids` (u32 little-endian) after it, and the keys of the chunks that became whole."""
    data = chain.pending + ids
    whole = len(data) - len(data) % _CHUNK_BYTES
    key, keys = chain.key, []
    for at in range(0, whole, _CHUNK_BYTES):
        key = sha256(key + data[at : at + _CHUNK_BYTES]).digest()[:KEY_BYTES]
        keys.append(key)
    chunks = chain.chunks + len(keys)
    if not keys:
        return replace(chain, pending=data[whole:]), keys
    before = [chain.key, *chain.last][: LAST if chain.chunks else 0]
    last = tuple([*reversed(keys[-LAST - 1 : -1]), *before][:LAST])
    passed = range(chain.chunks + 1, min(chunks, MARKS_TO) + 1)
    first = chain.first + tuple(keys[at - chain.chunks - 1] for at in passed if is_mark(at))
    return Chain(key, data[whole:], chunks, last, first, chain.ends), keys
