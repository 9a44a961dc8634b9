"""Replicas in the database: functions of a connection. They are the operator's and belong to no tenant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import orjson
from sqlalchemy import Connection, Row, delete, func, or_, select, update

from gateway.store.replica_records import (
    NewReplica,
    NoReplica,
    PinnedSession,
    ReplicaExists,
    ReplicaRecord,
    ReplicaState,
    TooManyReplicas,
)
from gateway.store.rows import encode, storable
from gateway.store.tables import places, replica_reports, replicas, sessions, turns


def list_replicas(connection: Connection) -> tuple[ReplicaRecord, ...]:
    return tuple(_record(row) for row in connection.execute(select(replicas).order_by(replicas.c.name)))


def get_replica(connection: Connection, name: str) -> ReplicaRecord | None:
    row = connection.execute(select(replicas).where(replicas.c.name == name)).first()
    return None if row is None else _record(row)


def add_replica(connection: Connection, new: NewReplica, now: float, *, limit: int) -> ReplicaRecord:
    """Raises ReplicaExists, TooManyReplicas; the same once more, under its name and URL, is returned as it stands.

    Of a replica that stood in the settings of whoever asks, and does no more, a row may be left: its place is taken.
    """
    storable(new.name, new.url)
    connection.execute(delete(replicas).where(replicas.c.name == new.name, replicas.c.source == "settings"))
    taken = connection.execute(select(replicas).where(or_(replicas.c.name == new.name, replicas.c.url == new.url)))
    for row in taken:
        known = _record(row)
        if (known.name, known.url) == (new.name, new.url) and known.terms == new.terms:
            return known
        what = f"the name {new.name!r}" if known.name == new.name else f"the URL {new.url}"
        raise ReplicaExists(f"{what} is taken by the replica {known.name!r}")
    added = connection.execute(select(func.count()).where(replicas.c.source == "api")).scalar_one()
    if added >= limit:
        raise TooManyReplicas(added, limit)
    _insert(connection, new.name, "api", now, url=new.url, credential=new.credential, terms=encode(new.terms))
    return _known(connection, new.name)


def remove_replica(connection: Connection, name: str) -> bool:
    """False: no replica of that name was added at runtime."""
    connection.execute(delete(replica_reports).where(replica_reports.c.replica == name))
    connection.execute(delete(places).where(places.c.name == name))  # nobody reaches it any more
    gone = connection.execute(delete(replicas).where(replicas.c.name == name, replicas.c.source == "api"))
    return gone.rowcount > 0


def set_replica_state(
    connection: Connection,
    name: str,
    state: ReplicaState,
    *,
    reason: str,
    drain_until: float | None,
    now: float,
    added: bool = False,
) -> ReplicaRecord:
    """A replica of the settings gets a row with this. Said twice, a drain goes on as it was begun.

    `added`: at runtime, so it has a row. Raises NoReplica where it has none any more.
    """
    storable(name, reason)
    known = get_replica(connection, name)
    if known is None and added:
        raise NoReplica(f"the replica {name!r} was removed")
    if known is None:
        _insert(connection, name, "settings", now)
    elif known.state == state or (known.state == "drained" and state == "draining"):
        return known
    values = {"state": state, "reason": reason, "drain_until": drain_until, "changed_at": now, "progress": "{}"}
    connection.execute(
        update(replicas)
        .where(replicas.c.name == name)
        .values(revision=replicas.c.revision + 1, worker=None, worker_until=None, **values)
    )
    connection.execute(delete(replica_reports).where(replica_reports.c.replica == name))
    return _known(connection, name)


def work_on_drain(
    connection: Connection, name: str, revision: int, worker: str, until: float, progress: Mapping[str, Any], now: float
) -> bool:
    """Be, or stay, the one who moves its sessions away. False: another one is, or it is not drained any more."""
    free = or_(replicas.c.worker.is_(None), replicas.c.worker == worker, replicas.c.worker_until <= now)
    done = connection.execute(
        update(replicas)
        .where(replicas.c.name == name, replicas.c.revision == revision, replicas.c.state == "draining", free)
        .values(worker=worker, worker_until=until, progress=encode(progress))
    )
    return done.rowcount > 0


def end_drain(
    connection: Connection, name: str, revision: int, worker: str, progress: Mapping[str, Any], now: float
) -> bool:
    """False: it is not this worker's any more."""
    mine = (replicas.c.revision == revision, replicas.c.state == "draining", replicas.c.worker == worker)
    done = connection.execute(
        update(replicas)
        .where(replicas.c.name == name, *mine)
        .values(state="drained", changed_at=now, worker=None, worker_until=None, progress=encode(progress))
    )
    return done.rowcount > 0


def report_running(connection: Connection, replica: str, gateway: str, running: int, now: float) -> None:
    place = (replica_reports.c.replica == replica, replica_reports.c.gateway == gateway)
    if not connection.execute(update(replica_reports).where(*place).values(running=running, at=now)).rowcount:
        row = {"replica": replica, "gateway": gateway, "running": running, "at": now}
        connection.execute(replica_reports.insert(), row)


def running_at(connection: Connection, replica: str, since: float) -> int:
    """Turns there, as the gateways said since `since`: one that is silent for longer is dead, and its turns with it."""
    said = select(replica_reports.c.running).where(replica_reports.c.replica == replica, replica_reports.c.at >= since)
    return sum(connection.execute(said).scalars())


def pinned_sessions(connection: Connection, replica: str, since: float, limit: int) -> tuple[PinnedSession, ...]:
    """Idle sessions used since `since` whose next turn would go to this replica, the last used first.

    Looks through the newest sessions of all tenants: a rare question of an operator, for which no turn keeps an index.
    """
    named = turns.c.placement.contains(f'"replica":{encode(replica)}', autoescape=True)
    rows = connection.execute(
        select(
            sessions.c.tenant_id,
            sessions.c.id,
            turns.c.id.label("turn_id"),
            sessions.c.created_at,
            sessions.c.updated_at,
            sessions.c.next_seq,
            turns.c.path_tokens,
            turns.c.placement,
        )
        .join(turns, (turns.c.tenant_id == sessions.c.tenant_id) & (turns.c.id == sessions.c.head_turn_id))
        .where(sessions.c.updated_at >= since, sessions.c.running_turn_id.is_(None), named)
        .order_by(sessions.c.updated_at.desc())
        .limit(limit)
    )
    return tuple(
        PinnedSession(
            row.tenant_id, row.id, row.turn_id, row.created_at, row.updated_at, row.next_seq - 1, row.path_tokens or 0
        )
        for row in rows
        if home_of(orjson.loads(row.placement)).get("replica") == replica
    )


def home_of(placement: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the session goes on: where its last turn ran, unless it was moved since."""
    home: Mapping[str, Any] = placement.get("home") or placement
    return home


def rehome(connection: Connection, tenant_id: str, session_id: str, turn_id: str, home: Mapping[str, Any]) -> bool:
    """The session's next turn goes on at `home`. False: the session is gone, or its head is another turn by now."""
    head = select(sessions.c.head_turn_id).where(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    place = (turns.c.tenant_id == tenant_id, turns.c.id == turn_id)
    row = connection.execute(select(turns.c.placement).where(*place, turns.c.id == head.scalar_subquery())).first()
    if row is None:
        return False
    placement = {**orjson.loads(row.placement), "home": dict(home)}
    connection.execute(update(turns).where(*place).values(placement=encode(placement)))
    return True


def _insert(connection: Connection, name: str, source: str, now: float, **more: Any) -> None:
    standing = {"state": "active", "revision": 1, "reason": "", "progress": "{}", "created_at": now, "changed_at": now}
    connection.execute(replicas.insert(), {"name": name, "source": source, "terms": "{}", **standing, **more})


def _known(connection: Connection, name: str) -> ReplicaRecord:
    known = get_replica(connection, name)
    assert known is not None
    return known


def _record(row: Row[Any]) -> ReplicaRecord:
    return ReplicaRecord(
        name=row.name,
        source=cast('Literal["settings", "api"]', row.source),
        url=row.url,
        credential=None if row.credential is None else bytes(row.credential),
        terms=orjson.loads(row.terms),
        state=cast(ReplicaState, row.state),
        revision=row.revision,
        reason=row.reason,
        created_at=row.created_at,
        changed_at=row.changed_at,
        drain_until=row.drain_until,
        progress=orjson.loads(row.progress),
    )
