"""Limits and what is counted for them in the database: functions of a connection.

counters   name and minute -> how much           two rows a name: this minute's and the one before
slots      whom it counts for, and a turn        one row while the turn runs, good until its gateway is late
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from sqlalchemy import ColumnElement, Connection, and_, func, select, text, update

from gateway.store.leases import in_force_sql
from gateway.store.limit_records import LIMITS, NONE, Bound, Holder, Limited, Limits, TooManySessions
from gateway.store.prepared import INSERT
from gateway.store.rows import storable
from gateway.store.tables import counters, limits, sessions, slots


def read_limits(connection: Connection, tenant_id: str | None = None) -> tuple[Limited, ...]:
    found = select(limits).order_by(limits.c.tenant_id, limits.c.key_id)
    if tenant_id is not None:
        found = found.where(limits.c.tenant_id == tenant_id)
    rows = connection.execute(found).all()
    every = (
        Limited(row.tenant_id, row.key_id, Limits(**{name: getattr(row, name) for name in LIMITS}), row.updated_at)
        for row in rows
    )
    return tuple(one for one in every if one.limits != NONE)


def stamp(connection: Connection) -> tuple[int, int]:
    """It grows with every change of a limit: (how many were ever set, how often any was)."""
    often = func.coalesce(func.sum(limits.c.revision), 0)
    row = connection.execute(select(func.count(), often)).one()
    return int(row[0]), int(row[1])


def set_limits(connection: Connection, holder: Holder, wanted: Limits, now: float) -> bool:
    """In place of what was set. A row with none stays, so that every gateway hears of it; False: there was none."""
    storable(holder.tenant_id, holder.key_id)
    if wanted == NONE and not any(one.key_id == holder.key_id for one in read_limits(connection, holder.tenant_id)):
        return False
    values = {name: getattr(wanted, name) for name in LIMITS} | {"updated_at": now}
    made = INSERT[connection.dialect.name](limits).values(
        tenant_id=holder.tenant_id, key_id=holder.key_id, revision=1, **values
    )
    again = values | {"revision": limits.c.revision + 1}
    connection.execute(made.on_conflict_do_update(index_elements=list(limits.primary_key), set_=again))
    return True


def copy_limits(connection: Connection, old: Holder, new: Holder, now: float) -> None:
    """A key that takes another's place has its limits."""
    found = next((one for one in read_limits(connection, old.tenant_id) if one.key_id == old.key_id), None)
    if found is not None:
        set_limits(connection, new, found.limits, now)


def _of(holder: Holder) -> ColumnElement[bool]:
    return and_(limits.c.tenant_id == holder.tenant_id, limits.c.key_id == holder.key_id)


def lock_holders(connection: Connection, holders: Sequence[Holder]) -> None:
    """One transaction at a time counts for them. SQLite has one writer anyway."""
    for holder in sorted(holders, key=str):
        connection.execute(select(limits.c.revision).where(_of(holder)).with_for_update())


# ---- stored sessions and bytes


def check_sessions(connection: Connection, bounds: Sequence[Bound], more: int = 1) -> None:
    """Raises TooManySessions where `more` would be too many; the holders are locked until the transaction ends."""
    lock_holders(connection, [bound.holder for bound in bounds])
    for bound in bounds:
        stored = int(connection.execute(select(func.count()).where(_theirs(bound.holder))).scalar_one())
        if stored + more > bound.most:
            raise TooManySessions(bound, stored)


def stored_bytes(connection: Connection, holder: Holder) -> int:
    total = select(func.coalesce(func.sum(sessions.c.bytes), 0)).where(_theirs(holder))
    return int(connection.execute(total).scalar_one())


def _theirs(holder: Holder) -> ColumnElement[bool]:
    of_tenant = sessions.c.tenant_id == holder.tenant_id
    return and_(of_tenant, sessions.c.key_id == holder.key_id) if holder.key_id else of_tenant


def session_ids(connection: Connection, holder: Holder, idle_since: float) -> dict[str, bool]:
    """The holder's sessions -> whether nobody has used it since then, and no turn of it runs."""
    idle = and_(sessions.c.running_turn_id.is_(None), sessions.c.updated_at < idle_since)
    rows = connection.execute(select(sessions.c.id, idle).where(_theirs(holder)))
    return {row[0]: bool(row[1]) for row in rows}


# ---- counters


def add_within(connection: Connection, name: str, window: int, previous_weight: float, limit: int, amount: int) -> bool:
    """Add `amount` to the counter where it stays within `limit`, the window before weighing `previous_weight` of what
    it counted. The counter is locked from the look to the commit."""
    lazily(connection)
    made = INSERT[connection.dialect.name](counters).values(name=name, window=window, count=0)
    kept = made.on_conflict_do_update(
        index_elements=list(counters.primary_key), set_={"count": counters.c["count"]}
    ).returning(counters.c["count"])
    current = int(connection.execute(kept).scalar_one())
    before = _count(connection, name, window - 1)
    if floor(before * previous_weight) + current + amount > limit:
        return False
    here = and_(counters.c.name == name, counters.c.window == window)
    connection.execute(update(counters).where(here).values(count=max(0, current + amount)))
    return True


def read_counter(connection: Connection, name: str, window: int) -> tuple[int, int]:
    """(the window before, this one)"""
    return _count(connection, name, window - 1), _count(connection, name, window)


def clear_counter(connection: Connection, name: str) -> None:
    connection.execute(counters.delete().where(counters.c.name == name))


def _count(connection: Connection, name: str, window: int) -> int:
    found = select(counters.c["count"]).where(counters.c.name == name, counters.c.window == window)
    return int(connection.execute(found).scalar() or 0)


# ---- slots


def take_slots(
    connection: Connection, wanted: Sequence[tuple[Holder, int]], id: str, until: float, now: float
) -> tuple[Holder, int] | None:
    """A slot of each holder for `id`, or none at all: then which holder has how many."""
    lazily(connection)
    lock_holders(connection, [holder for holder, _ in wanted])
    for holder, most in wanted:
        mine = (
            slots.c.tenant_id == holder.tenant_id,
            slots.c.key_id == holder.key_id,
            in_force_sql(slots.c.until, now),
        )
        taken = int(connection.execute(select(func.count()).select_from(slots).where(*mine)).scalar_one())
        if taken >= most:
            return holder, taken
    hold_slots(connection, [(holder, id) for holder, _ in wanted], until)
    return None


def hold_slots(connection: Connection, held: Sequence[tuple[Holder, str]], until: float) -> None:
    """Hold them until then, whether they are held already or have lapsed."""
    lazily(connection)
    rows = sorted((h.tenant_id, h.key_id, id) for h, id in held)
    for tenant_id, key_id, id in rows:
        made = INSERT[connection.dialect.name](slots).values(tenant_id=tenant_id, key_id=key_id, id=id, until=until)
        connection.execute(made.on_conflict_do_update(index_elements=list(slots.primary_key), set_={"until": until}))


def free_slots(connection: Connection, id: str) -> None:
    lazily(connection)
    connection.execute(slots.delete().where(slots.c.id == id))


def sweep_counts(connection: Connection, before_window: int, now: float) -> None:
    """Windows that weigh nothing any more, and slots that lapsed."""
    connection.execute(counters.delete().where(counters.c.window < before_window))
    connection.execute(slots.delete().where(slots.c.until <= now))


def lazily(connection: Connection) -> None:
    """What is counted need not outlive a power loss: PostgreSQL commits it without waiting for the disk."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL synchronous_commit = off"))
