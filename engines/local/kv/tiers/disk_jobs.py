"""What the disk tier's threads do: read, write, take over. Each call is whole in itself and touches only files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from engines.local.kv.precision import Precision
from engines.local.kv.tiers.files import (
    BadFile,
    KvFile,
    Layout,
    Place,
    StoredPath,
    read_content,
    read_header,
    write_file,
)
from engines.local.kv.tiers.piece import Piece, checksum

Key = tuple[str, str]  # session, salt


def read(path: Path, wanted: Sequence[tuple[Piece, Place]]) -> tuple[list[tuple[Piece, Tensor]], Exception | None]:
    """Those that are whole, up to the first that is not, and what was the matter with it."""
    found: list[tuple[Piece, Tensor]] = []
    try:
        with path.open("rb") as file:
            for piece, place in wanted:
                found.append((piece, read_content(file, piece, place)))
    except (BadFile, OSError) as error:
        return found, error
    return found, None


def adopt(came: Path, path: Path, layout: Layout, sizes: Mapping[Precision, int], key: Key) -> KvFile:
    """Take over a file that came from elsewhere, if it is whole and that session's; else it is removed. Raises BadFile,
    OSError."""
    try:
        found = read_header(came, layout, sizes)
        if found.stored is None or (found.stored.session, found.stored.salt) != key:
            raise BadFile("it is not that session's")
        with came.open("rb") as file:
            for piece, place in zip(found.pieces, found.places, strict=True):
                read_content(file, piece, place)
        came.replace(path)
    except BaseException:
        came.unlink(missing_ok=True)
        raise
    return replace(found, path=path)


def save(
    path: Path,
    layout: Layout,
    pieces: Sequence[Piece],
    contents: Sequence[Tensor | None],
    sources: Sequence[tuple[KvFile, Place] | None],
    stored: StoredPath,
) -> KvFile:
    """Write a session's file. A content that is None is read from its source. Raises BadFile, OSError."""
    whole: list[Tensor] = []
    for piece, content, source in zip(pieces, contents, sources, strict=True):
        if content is None:
            assert source is not None
            with source[0].path.open("rb") as file:
                content = read_content(file, piece, source[1])
        whole.append(content)
        piece.crc = piece.crc or checksum(content)
    return write_file(path, layout, pieces, whole, stored)
