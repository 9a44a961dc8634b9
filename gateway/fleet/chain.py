"""Names for the prefixes of a token path: one key for each chunk of 16 tokens, hashed once.

    key(0) = root        SHA-256 over the tagged fields that must be equal for K/V to be shared: salt, model, adapter
    key(n) = SHA-256 over key(n - 1) and the 16 ids of chunk n

    ids   | 0 ...... 15 | 16 ..... 31 | 32 .. 40 |
    keys  |        key1 |        key2 | pending  |

A chain remembers the keys near its end, and those of its beginning in steps that widen (`is_mark`): many sessions share
a beginning, and where a path comes to a replica for the first time these say how far it is known there.

A key is cut to 16 bytes: it is where a turn may be sent, never a proof that two prompts are equal. Whatever the block
size of an engine, its blocks are named by these keys. Knows no replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

CHUNK_TOKENS = 16
_CHUNK_BYTES = 4 * CHUNK_TOKENS
KEY_BYTES = 16
LAST = 3  # keys before the last one that a chain remembers: the end of a path may lie in a block that is not whole yet
MARKS_TO = 512  # chunks: a beginning that sessions share is rarely longer than 8,192 tokens


@dataclass(frozen=True, slots=True)
class Chain:
    """Where a path stands: the key of its last whole chunk, and the ids after it (u32 little-endian, fewer than 16)."""

    key: bytes
    pending: bytes = b""
    chunks: int = 0
    last: tuple[bytes, ...] = ()  # keys before `key`, the nearest first
    first: tuple[bytes, ...] = ()  # keys at the chunks that are marks, from the start

    @property
    def num_tokens(self) -> int:
        return self.chunks * CHUNK_TOKENS + len(self.pending) // 4

    def as_text(self) -> str:
        last, first = b"".join(self.last), b"".join(self.first)
        return f"{self.key.hex()}.{self.pending.hex()}.{self.chunks}.{last.hex()}.{first.hex()}"

    @classmethod
    def of_text(cls, text: str) -> Chain:
        key, pending, chunks, last, first = text.split(".")
        return cls(bytes.fromhex(key), bytes.fromhex(pending), int(chunks), _keys(last), _keys(first))

    def marks(self) -> Iterator[tuple[int, bytes]]:
        """(chunks from the start, the key there) of the marks, the farthest first."""
        places = [chunks for chunks in range(1, min(self.chunks, MARKS_TO) + 1) if is_mark(chunks)]
        return zip(reversed(places), reversed(self.first), strict=True)


def is_mark(chunks: int) -> bool:
    """Every chunk up to 16, every second up to 32, and so on: at most an eighth of the way lies between two."""
    return chunks <= MARKS_TO and chunks % (1 << max(0, chunks.bit_length() - 4)) == 0


def _keys(text: str) -> tuple[bytes, ...]:
    keys = bytes.fromhex(text)
    return tuple(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))


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
        return Chain(key, data[whole:], chunks, chain.last, chain.first), keys
    before = [chain.key, *chain.last][: LAST if chain.chunks else 0]
    last = tuple([*reversed(keys[-LAST - 1 : -1]), *before][:LAST])
    passed = range(chain.chunks + 1, min(chunks, MARKS_TO) + 1)
    first = chain.first + tuple(keys[at - chain.chunks - 1] for at in passed if is_mark(at))
    return Chain(key, data[whole:], chunks, last, first), keys
