"""A file of K/V: its header and how to read and write it. Version 1, described in docs/kv-files.md. Knows no tiers.

    0    8   magic "TKKVFILE"
    8    4   version          u32 little-endian, as all numbers here
    12   4   header's length
    16   4   header's CRC-32
    20   4   0
    24       header, JSON
             zeros up to a multiple of 64: `data`
    data     the path's ids, the ids of all pieces, u32 each
             contents of the pieces, each at a multiple of 64

Everything is bounded and compared before it is believed; what is not right is a BadFile. No pickle: a file can only be
data.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from engines.local.kv.precision import Precision
from engines.local.kv.tiers.piece import ID_BYTES, Piece, checksum

MAGIC = b"TKKVFILE"
VERSION = 1
PREFIX = struct.Struct("<8sIIII")
ALIGN = 64
MAX_HEADER_BYTES = 64 << 20
SUFFIX = ".tkkv"
UNFINISHED = ".part"


class BadFile(Exception):
    """No file of K/V, or not one for this engine, or damaged; says why."""


class OtherModel(BadFile):
    """K/V of another model, or held in another way."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What K/V must have in common to be the same bytes for the same ids. `layers`: [layer, kv_heads, key_dim,
    value_dim]."""

    fingerprint: str  # of weights, configuration and tokenizer (identity.model_fingerprint)
    block_size: int
    dtype: str
    layers: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class StoredPath:
    """A session's path as a file holds it: session_cache.SessionPath without its pages."""

    session: str
    salt: str
    ids: bytes  # u32 little-endian
    marks: tuple[tuple[int, bytes], ...]
    min_bits: int
    system_tokens: int
    recent_from: int
    tail_name: bytes  # of its partial last block, b"" where it has none


@dataclass(frozen=True, slots=True)
class Place:
    """Of a piece in its file, in bytes from its beginning."""

    content: int
    nbytes: int
    ids: int
    id_bytes: int


@dataclass(frozen=True, slots=True)
class KvFile:
    """What a file's header says. A piece without a place in `places` was erased."""

    path: Path
    size: int
    pieces: tuple[Piece, ...]
    places: tuple[Place, ...]
    stored: StoredPath | None


def write_file(
    path: Path, layout: Layout, pieces: Sequence[Piece], contents: Sequence[Tensor], stored: StoredPath | None = None
) -> KvFile:
    """Write, durably, or not at all. `contents`: uint8, one for each piece. Raises OSError."""
    path_ids = stored.ids if stored is not None else b""
    ids = b"".join((path_ids, *(piece.token_bytes for piece in pieces)))
    at, id_at = _aligned(len(ids)), len(path_ids)
    relative: list[Place] = []
    for piece, content in zip(pieces, contents, strict=True):
        relative.append(Place(at, len(content), id_at, len(piece.token_bytes)))
        at, id_at = at + _aligned(len(content)), id_at + len(piece.token_bytes)
    header = orjson.dumps(
        {
            "layout": asdict(layout),
            "session": _spelled_path(stored) if stored is not None else None,
            "pieces": [_spelled(piece, place) for piece, place in zip(pieces, relative, strict=True)],
            "bytes": at,
        }
    )
    data = _aligned(PREFIX.size + len(header))
    prefix = PREFIX.pack(MAGIC, VERSION, len(header), zlib.crc32(header), 0)
    unfinished = path.with_suffix(UNFINISHED)
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(b"".join((prefix, header)).ljust(data, b"\0"))
            file.write(ids.ljust(_aligned(len(ids)), b"\0"))
            for content in contents:
                file.write(content.contiguous().numpy().data)
                file.write(bytes(_aligned(len(content)) - len(content)))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    places = tuple(Place(p.content + data, p.nbytes, p.ids + data, p.id_bytes) for p in relative)
    return KvFile(path, data + at, tuple(pieces), places, stored)


def read_header(path: Path, layout: Layout, sizes: Mapping[Precision, int]) -> KvFile:
    """Raises BadFile, OtherModel, OSError. `sizes`: bytes of a piece's content by precision. Contents are not read."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        magic, version, length, crc, _ = PREFIX.unpack(_exactly(file, PREFIX.size))
        if magic != MAGIC:
            raise BadFile("it is no file of K/V")
        if not 1 <= version <= VERSION:
            raise BadFile(f"it is of version {version}, this engine reads up to {VERSION}")
        if length > min(MAX_HEADER_BYTES, size):
            raise BadFile(f"a header of {length} bytes")
        spelled = _exactly(file, length)
        if zlib.crc32(spelled) != crc:
            raise BadFile("the header is not what was written")
        try:
            header = orjson.loads(spelled)
            found = Layout(**header["layout"] | {"layers": tuple(tuple(layer) for layer in header["layout"]["layers"])})
            if found != layout:
                raise OtherModel(f"K/V of {_difference(found, layout)}")
            data = _aligned(PREFIX.size + length)
            if size != data + header["bytes"]:
                raise BadFile(f"{size} bytes, it should have {data + header['bytes']}")
            return _read_pieces(file, path, size, data, header, sizes)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadFile(f"the header does not say what it should: {error!r}") from None


def read_content(file: BufferedReader, piece: Piece, place: Place) -> Tensor:
    """uint8. Raises BadFile where it is not what was written, OSError."""
    file.seek(place.content)
    buffer = bytearray(place.nbytes)
    if file.readinto(buffer) != place.nbytes:
        raise BadFile("it ends too early")
    content = torch.frombuffer(buffer, dtype=torch.uint8)
    if checksum(content) != piece.crc:
        raise BadFile("a piece is not what was written")
    return content


def erase(path: Path, places: Sequence[Place]) -> None:
    """Zero the ids and contents of pieces. Raises OSError."""
    with path.open("r+b") as file:
        for place in places:
            for start, nbytes in ((place.content, place.nbytes), (place.ids, place.id_bytes)):
                file.seek(start)
                file.write(bytes(nbytes))
        file.flush()
        os.fsync(file.fileno())


def _read_pieces(
    file: BufferedReader, path: Path, size: int, data: int, header: dict[str, Any], sizes: Mapping[Precision, int]
) -> KvFile:
    file.seek(data)
    session = header["session"]
    stored = None
    if session is not None:
        ids = _exactly(file, session["ids"] * ID_BYTES, size)
        if zlib.crc32(ids) != session["crc"]:
            raise BadFile("the path's ids are not what was written")
        stored = _stored_path(session, ids)
    pieces: list[Piece] = []
    places: list[Place] = []
    for told in header["pieces"]:
        precision = Precision(told["precision"])
        place = Place(data + told["at"], told["bytes"], file.tell(), told["tokens"] * ID_BYTES)
        if place.nbytes != sizes.get(precision):
            raise BadFile(f"a piece of {place.nbytes} bytes at {int(precision)} bits")
        if not data <= place.content <= size - place.nbytes:
            raise BadFile("a piece lies outside the file")
        piece = Piece(
            tuple(bytes.fromhex(name) for name in told["names"]),
            bytes.fromhex(told["parent"]),
            _exactly(file, place.id_bytes, size),
            told["salt"],
            precision,
            int(told["lineage"]),
            bool(told["partial"]),
            float(told["gain"]),
            users=set(told["users"]),
            crc=int(told["crc"]),
        )
        if piece.named_right():  # else it was erased
            pieces.append(piece)
            places.append(place)
    return KvFile(path, size, tuple(pieces), tuple(places), stored)


def _spelled(piece: Piece, place: Place) -> dict[str, Any]:
    return {
        "names": [name.hex() for name in piece.names],
        "parent": piece.parent.hex(),
        "salt": piece.salt,
        "tokens": piece.num_tokens,
        "precision": int(piece.precision),
        "lineage": int(piece.lineage),
        "partial": piece.partial,
        "gain": piece.gain,
        "users": sorted(piece.users),
        "at": place.content,
        "bytes": place.nbytes,
        "crc": piece.crc,
    }


def _spelled_path(stored: StoredPath) -> dict[str, Any]:
    return {
        "session": stored.session,
        "salt": stored.salt,
        "ids": len(stored.ids) // ID_BYTES,
        "crc": zlib.crc32(stored.ids),
        "marks": [[length, digest.hex()] for length, digest in stored.marks],
        "min_bits": stored.min_bits,
        "system_tokens": stored.system_tokens,
        "recent_from": stored.recent_from,
        "tail": stored.tail_name.hex(),
    }


def _stored_path(told: dict[str, Any], ids: bytes) -> StoredPath:
    session, salt = told["session"], told["salt"]
    if not (isinstance(session, str) and isinstance(salt, str)):
        raise BadFile("a session without a name")
    marks = tuple((int(length), bytes.fromhex(digest)) for length, digest in told["marks"])
    if any(not 0 < length <= len(ids) // ID_BYTES for length, _ in marks):
        raise BadFile("a mark lies outside the path")
    tail = bytes.fromhex(told["tail"])
    min_bits, system_tokens, recent_from = (int(told[name]) for name in ("min_bits", "system_tokens", "recent_from"))
    return StoredPath(session, salt, ids, marks, min_bits, system_tokens, recent_from, tail)


def _exactly(file: BufferedReader, count: int, most: int = MAX_HEADER_BYTES) -> bytes:
    if not 0 <= count <= most:
        raise BadFile(f"a section of {count} bytes")
    read = file.read(count)
    if len(read) != count:
        raise BadFile("it ends too early")
    return read


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _difference(found: Layout, wanted: Layout) -> str:
    for name in ("fingerprint", "dtype", "block_size"):
        if getattr(found, name) != getattr(wanted, name):
            return f"{name} {getattr(found, name)}, this engine has {getattr(wanted, name)}"
    return "other layers than this engine's"
