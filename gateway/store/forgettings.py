"""What places have still to forget: functions of a connection. A place is a replica, a gateway's memory, or the
database's own files.

    noted (erase.forget_later) -> claimed by who reaches the place -> done: gone, and noted in the receipt
                                      ^-- put off, and tried again --'    place gone: the same
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import Connection, and_, bindparam, select, update

from gateway.store.erasure_records import ARCHIVED, NOBODYS, Forgetting, Place, PlaceState
from gateway.store.erasures import note_done
from gateway.store.leases import in_force
from gateway.store.prepared import run_many, upserts
from gateway.store.tables import forgettings, places, sessions

Standing = Literal["gone", "running", "idle", "archived"]

_SEEN = update(places).where(places.c.name == bindparam("b_name")).values(seen_at=bindparam("b_at"))


_ADD = upserts(places, lambda new: {"seen_at": new.seen_at})


def add_place(connection: Connection, place: Place, now: float) -> None:
    """From now on erasures wait for it. Gateways that begin together add the same ones at the same time."""
    row = {"name": place.name, "kind": place.kind, "gateway": place.gateway, "seen_at": now}
    run_many(connection, _ADD[connection.dialect.name], [row])


def see_places(connection: Connection, names: Sequence[str], now: float) -> None:
    """They are still there. One that was removed stays removed."""
    for name in names:
        connection.execute(_SEEN, {"b_name": name, "b_at": now})


def leave_place(connection: Connection, name: str) -> None:
    """What it held is gone with it."""
    connection.execute(places.delete().where(places.c.name == name))


def drop_unseen(connection: Connection, *, memory_before: float, replicas_before: float) -> int:
    """Places that no gateway has seen since: taken for gone -> how many."""
    gone = 0
    for kinds, before in ((("memory", "engine"), memory_before), (("replica",), replicas_before)):
        mine = and_(places.c.kind.in_(kinds), places.c.seen_at < before)
        gone += connection.execute(places.delete().where(mine)).rowcount
    return gone


def due_places(connection: Connection, now: float) -> frozenset[str]:
    """Where something is to be forgotten now."""
    rows = connection.execute(select(forgettings.c.place).where(forgettings.c.due_at <= now).distinct())
    return frozenset(rows.scalars())


def claim(
    connection: Connection,
    place: str,
    limit: int,
    now: float,
    until: float,
    *,
    of: tuple[str, str] | None = None,
) -> list[Forgetting]:
    """Up to `limit` that are due at a place, nobody else's until `until`. `of`: (tenant, receipt) alone."""
    wanted = select(forgettings).where(forgettings.c.place == place, forgettings.c.due_at <= now)
    if of is not None:
        wanted = wanted.where(forgettings.c.tenant_id == of[0], forgettings.c.erasure_id == of[1])
    rows = connection.execute(
        wanted.order_by(forgettings.c.due_at).limit(limit).with_for_update(skip_locked=True)
    ).all()
    claimed = [Forgetting(row.tenant_id, row.erasure_id, row.session_id, row.place, row.tries + 1) for row in rows]
    for one in claimed:
        connection.execute(update(forgettings).where(_row(one)).values(due_at=until, tries=one.tries))
    return claimed


def put_off(connection: Connection, one: Forgetting, until: float, error: str | None) -> None:
    """It could not be done now."""
    connection.execute(update(forgettings).where(_row(one)).values(due_at=until, error=error))


def done(connection: Connection, one: Forgetting, state: PlaceState, gone: dict[str, int], now: float) -> None:
    """The place forgot, cannot, or is gone itself. Said twice, it counts once."""
    if not connection.execute(forgettings.delete().where(_row(one))).rowcount:
        return
    if one.erasure_id not in (NOBODYS, ARCHIVED):
        said: dict[str, Any] = {"state": state, **({"gone": gone} if gone else {})}
        note_done(connection, one.tenant_id, one.erasure_id, one.place, said, now)


def settle_gone(connection: Connection, limit: int, now: float) -> int:
    """What waits for places that are gone is done -> how many."""
    lost = select(forgettings).where(forgettings.c.place.not_in(select(places.c.name)))
    rows = connection.execute(lost.limit(limit).with_for_update(skip_locked=True)).all()
    for row in rows:
        one = Forgetting(row.tenant_id, row.erasure_id, row.session_id, row.place, row.tries)
        done(connection, one, "gone", {}, now)
    return len(rows)


def standing(connection: Connection, tenant_id: str, session_id: str, now: float) -> Standing:
    """Of a session, one of the same id that was made since included."""
    here = (sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    row = connection.execute(
        select(sessions.c.archived_at, sessions.c.running_turn_id, sessions.c.lease_until).where(*here)
    ).first()
    if row is None:
        return "gone"
    if row.running_turn_id is not None and in_force(row.lease_until, now):
        return "running"
    return "idle" if row.archived_at is None else "archived"


def _row(one: Forgetting) -> Any:
    return and_(
        forgettings.c.tenant_id == one.tenant_id,
        forgettings.c.erasure_id == one.erasure_id,
        forgettings.c.session_id == one.session_id,
        forgettings.c.place == one.place,
    )
