"""Writes of the usage ledger: functions of a connection, within the transaction of what is booked.

A row is one day of one account (key, end user, session, model, kind), so a session costs a row for each day on which
it is used. Rows are written in one order, and those of a session under its lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from sqlalchemy import Connection, bindparam, select, update

from gateway.store.prepared import run_many, upserts
from gateway.store.tables import sessions, turns, usage, usage_flushes
from gateway.store.usage_records import Account, Amount, amount_of, day_of, unnamed

PART = 500  # rows in one transaction of a roll-up
_NAMES = ("tenant_id", "day", "key_id", "user_ref", "session_id", "model", "kind")
_SUMS = ("count", "prompt_tokens", "cached_tokens", "output_tokens")


_BOOK = upserts(usage, lambda new: {name: usage.c[name] + new[name] for name in _SUMS})
_OF_SESSION = (usage.c.tenant_id == bindparam("b_tenant"), usage.c.session_id == bindparam("b_session"))


def book(connection: Connection, entries: Iterable[tuple[Account, Amount]]) -> None:
    """Add the amounts to their accounts. The sessions that are named are locked, or of no other transaction."""
    summed: dict[Account, Amount] = {}
    for account, amount in entries:
        if amount != Amount():
            summed[account] = summed.get(account, Amount()) + amount
    if summed:
        rows = sorted((_row(account, amount) for account, amount in summed.items()), key=_place)
        run_many(connection, _BOOK[connection.dialect.name], rows)


def _row(account: Account, amount: Amount) -> dict[str, Any]:
    names = {name: getattr(account, name) for name in _NAMES}
    return names | dict(zip(_SUMS, (amount.count, amount.prompt, amount.cached, amount.output), strict=True))


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _NAMES)


def booked_of(connection: Connection, tenant_id: str, turn_id: str) -> tuple[Account, Amount] | None:
    """What stands in the ledger for a turn that has ended. None: nothing, or it was imported."""
    names = (turns.c.session_id, turns.c.user_ref, turns.c.key_id, turns.c.model, turns.c.usage, turns.c.completed_at)
    row = connection.execute(select(*names).where(turns.c.tenant_id == tenant_id, turns.c.id == turn_id)).first()
    amount = Amount() if row is None else amount_of(orjson.loads(row.usage))
    if row is None or row.key_id == "" or row.completed_at is None or amount == Amount():
        return None
    day = day_of(row.completed_at)
    return Account(tenant_id, day, row.key_id, row.user_ref, row.session_id, row.model, "turn"), amount


def book_where_it_lives(connection: Connection, entries: Iterable[tuple[Account, Amount]]) -> None:
    """As `book`, for work beside a turn: its session, which may be erased meanwhile, is locked here."""
    listed = list(entries)
    for tenant_id, session_id in sorted({(a.tenant_id, a.session_id) for a, _ in listed if a.session_id}):
        here = (sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
        found = connection.execute(select(sessions.c.user_ref).where(*here).with_for_update()).first()
        user = None if found is None else found.user_ref or ""
        listed = [_at_home(entry, user) if entry[0].session_id == session_id else entry for entry in listed]
    book(connection, listed)


def _at_home(entry: tuple[Account, Amount], user: str | None) -> tuple[Account, Amount]:
    """`user` None: the session is gone."""
    account, amount = entry
    if user is None:
        return unnamed(account), amount
    names = {name: getattr(account, name) for name in _NAMES}
    return Account(**names | {"user_ref": user}), amount


def flush(connection: Connection, by: str, number: int, entries: Iterable[tuple[Account, Amount]], now: float) -> None:
    """`book_where_it_lives`, once for each number of a gateway's life: it is said again where the commit was not heard
    of."""
    mine = usage_flushes.c.gateway == by
    last = connection.execute(select(usage_flushes.c.number).where(mine)).scalar()
    if last is not None and last >= number:
        return
    if last is None:
        connection.execute(usage_flushes.insert(), {"gateway": by, "number": number, "at": now})
    else:
        connection.execute(update(usage_flushes).where(mine).values(number=number, at=now))
    book_where_it_lives(connection, entries)


def forget_names(connection: Connection, tenant_id: str, session_id: str) -> None:
    """A session is erased: its counts stay, without its name and its end user's."""
    place = {"b_tenant": tenant_id, "b_session": session_id}
    rows = connection.execute(select(usage).where(*_OF_SESSION), place).all()
    if rows:
        connection.execute(usage.delete().where(*_OF_SESSION), place)
        book(connection, ((unnamed(_account(row)), _amount(row)) for row in rows))


def forget_user(connection: Connection, tenant_id: str, user_ref: str) -> None:
    """An end user is erased: what no session of theirs was booked for stays, without the name."""
    mine = (usage.c.tenant_id == tenant_id, usage.c.user_ref == user_ref)
    rows = connection.execute(select(usage).where(*mine).with_for_update()).all()
    if rows:
        connection.execute(usage.delete().where(*mine))
        book(connection, ((unnamed(_account(row)), _amount(row)) for row in rows))


def move_user(connection: Connection, tenant_id: str, session_id: str, user_ref: str) -> None:
    """A session is another end user's now, and so are its counts."""
    mine = (usage.c.tenant_id == tenant_id, usage.c.session_id == session_id)
    connection.execute(update(usage).where(*mine).values(user_ref=user_ref))


def roll_up(connection: Connection, before: int) -> int:
    """Of days before `before`, let go of which session and end user it was, up to PART rows; how many."""
    named = (usage.c.session_id != "") | (usage.c.user_ref != "")
    old = select(usage).where(usage.c.day < before, named).order_by(usage.c.day).limit(PART)
    rows = connection.execute(old.with_for_update(skip_locked=True)).all()
    if rows:
        gone = usage.delete().where(*(usage.c[name] == bindparam(f"b_{name}") for name in _NAMES))
        run_many(connection, gone, [{f"b_{name}": getattr(row, name) for name in _NAMES} for row in rows])
        book(connection, ((unnamed(_account(row)), _amount(row)) for row in rows))
    return len(rows)


def forget_flushes(connection: Connection, before: float) -> None:
    """Of gateways that said nothing since `before`."""
    connection.execute(usage_flushes.delete().where(usage_flushes.c.at < before))


def _account(row: Any) -> Account:
    return Account(**{name: getattr(row, name) for name in _NAMES})


def _amount(row: Any) -> Amount:
    return Amount(row._mapping["count"], row.prompt_tokens, row.cached_tokens, row.output_tokens)
