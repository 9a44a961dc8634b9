"""A snapshot of a replica's cache as bytes: what `GET /turnkeep/v1/kv/snapshot` sends (docs/kv-events.md). Pure.

    head   8 bytes  "tk-kv-1\\n"    i64 seq   f64 at   32 bytes mark      of its last batch, little-endian
    part   u32 length              a payload as the events have it  (kv_events.decode_batch), some BlockStored
    ...
    end    u32 0                                                     without it the snapshot is not whole

The mark is the SHA-256 of that batch's payload: a number alone does not tell a publisher from the one after a restart.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from engines.kv_events import MAX_PAYLOAD_BYTES, BlockStored, EventBatch, KvEventsError, decode_batch, encode_batch

MAGIC = b"tk-kv-1\n"
HEAD = struct.Struct("<8sqd32s")
LENGTH = struct.Struct("<I")
END = LENGTH.pack(0)
CONTENT_TYPE = "application/vnd.turnkeep.kv-snapshot"


def mark_of(payload: bytes) -> bytes:
    """What tells a batch from another of the same number (32 bytes)."""
    return hashlib.sha256(payload).digest()


@dataclass(frozen=True, slots=True)
class Head:
    """The last batch that a snapshot holds: its number, its time (seconds since 1970), its mark."""

    seq: int
    at_s: float
    mark: bytes


def encode_head(head: Head) -> bytes:
    return HEAD.pack(MAGIC, head.seq, head.at_s, head.mark)


def encode_part(seq: int, stored: tuple[BlockStored, ...]) -> bytes:
    payload = encode_batch(EventBatch(seq, 0.0, 0, stored))
    return LENGTH.pack(len(payload)) + payload


class SnapshotReader:
    """Bytes as they come, to parts. `head` once it was read; `ended` after the end. Raises KvEventsError."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.ended = False
        self._pending = bytearray()

    def feed(self, received: bytes) -> list[tuple[BlockStored, ...]]:
        pending = self._pending
        pending += received
        if self.head is None:
            if len(pending) < HEAD.size:
                return []
            magic, seq, at_s, mark = HEAD.unpack_from(pending)
            if magic != MAGIC or seq < 0:
                raise KvEventsError("no snapshot of a KV cache")
            self.head = Head(seq, at_s, mark)
            del pending[: HEAD.size]
        parts: list[tuple[BlockStored, ...]] = []
        at = 0
        while len(pending) - at >= LENGTH.size:
            if self.ended:
                raise KvEventsError("bytes after the end of a snapshot")
            (length,) = LENGTH.unpack_from(pending, at)
            if length > MAX_PAYLOAD_BYTES:
                raise KvEventsError(f"a part of {length} bytes")
            if len(pending) - at < LENGTH.size + length:
                break
            at += LENGTH.size
            if length:
                parts.append(_part(self.head.seq, bytes(pending[at : at + length])))
            else:
                self.ended = True
            at += length
        del pending[:at]
        return parts


def _part(seq: int, payload: bytes) -> tuple[BlockStored, ...]:
    events = decode_batch(seq, payload).events
    stored = tuple(event for event in events if isinstance(event, BlockStored))
    if len(stored) != len(events):
        raise KvEventsError("a snapshot tells of stored blocks only")
    return stored
