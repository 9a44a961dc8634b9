"""Frames between the HTTP front and the model process. Knows nothing of what they say.

    u32 header length | u32 body length | header: JSON object | body: raw bytes          (little-endian)

No pickle: a frame can only be data.
"""

from __future__ import annotations

import struct
from typing import Any

import orjson

PREFIX = struct.Struct("<II")
MAX_FRAME_BYTES = 1 << 28  # both sides are ours: more is a broken stream

Frame = tuple[dict[str, Any], bytes]


class BrokenStream(Exception):
    """The bytes are no frame."""


def encode_frame(header: dict[str, Any], body: bytes = b"") -> bytes:
    head = orjson.dumps(header)
    return b"".join((PREFIX.pack(len(head), len(body)), head, body))


class FrameReader:
    """Cuts a byte stream into frames; keeps what is not whole yet."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, received: bytes) -> list[Frame]:
        pending = self._pending
        pending += received
        frames: list[Frame] = []
        start = 0
        while len(pending) - start >= PREFIX.size:
            head_bytes, body_bytes = PREFIX.unpack_from(pending, start)
            if head_bytes + body_bytes > MAX_FRAME_BYTES:
                raise BrokenStream(f"a frame of {head_bytes + body_bytes} bytes")
            body_at = start + PREFIX.size + head_bytes
            end = body_at + body_bytes
            if len(pending) < end:
                break
            frames.append((orjson.loads(pending[start + PREFIX.size : body_at]), bytes(pending[body_at:end])))
            start = end
        del pending[:start]
        return frames
