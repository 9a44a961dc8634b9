"""Opaque cursors of lists that go from the newest to the oldest: each names the last row seen, by instant and id."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import orjson
from sqlalchemy import ColumnElement, and_, or_

from gateway.store.rows import storable


def encode_cursor(at: float, id: str) -> str:
    return base64.urlsafe_b64encode(orjson.dumps([at, id])).decode().rstrip("=")


def decode_cursor(cursor: str) -> tuple[float, str]:
    """(instant, id). Raises ValueError for what `encode_cursor` did not make."""
    try:
        at, id = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError, binascii.Error) as error:
        raise ValueError("this cursor was not made here") from error
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not isinstance(id, str):
        raise ValueError("this cursor was not made here")
    storable(id)
    return at, id


def past(cursor: str, at: ColumnElement[Any], id: ColumnElement[Any]) -> ColumnElement[bool]:
    """The rows after the cursor's, in the order of `at` and then `id`, both descending. Raises ValueError."""
    seen_at, seen_id = decode_cursor(cursor)
    return or_(at < seen_at, and_(at == seen_at, id < seen_id))
