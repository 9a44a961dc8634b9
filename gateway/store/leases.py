"""Whether a lease is in force: by the clock of who asks, which may have stepped back since it was given."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, and_

from gateway.store.records import LONGEST_LEASE_S


def in_force(until: float | None, now: float) -> bool:
    """`until`, `now`: seconds since 1970. One that nobody could have given now has nobody left who renews it."""
    return until is not None and now < until <= now + LONGEST_LEASE_S


def in_force_sql(until: ColumnElement[Any], now: float) -> ColumnElement[bool]:
    """The same of a column; where it is NULL, NULL."""
    return and_(until > now, until <= now + LONGEST_LEASE_S)
