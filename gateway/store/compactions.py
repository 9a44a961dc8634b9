"""Writes of compactions and pins: each a transaction under its session's lock, for as long as it takes to decide.

    begin    session locked -> nobody else runs one -> the view still stands -> row `running`
    commit   session locked -> row locked -> still running, the view still stands -> row `committed`, view_version + 1

Neither looks at the head or the lease: a turn that begins or ends meanwhile goes on as if nothing were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, func, select, update

from gateway.store.begin import LiveSession
from gateway.store.compaction_records import (
    INTERRUPTED,
    SUPERSEDED,
    CompactionOver,
    CompactionRecord,
    CompactionRunning,
    CompactionStatus,
    NewCompaction,
    ViewMoved,
)
from gateway.store.live import lock_sessions
from gateway.store.reads import read_turns
from gateway.store.records import DuplicateId, TurnRecord, UnknownTurn
from gateway.store.rows import compaction_of, encode, storable
from gateway.store.tables import COMMITTED, RUNNING, compactions, sessions, turns

INTERRUPTION = encode({"code": INTERRUPTED, "message": "its gateway stopped, or it outlasted its deadline"})
SUPERSESSION = encode({"code": SUPERSEDED, "message": "a turn at another gateway could not wait for it"})


def begin_compaction(connection: Connection, new: NewCompaction, now: float) -> CompactionRecord | None:
    """None: no such session. Said twice by its owner, the one that runs is returned.

    Raises CompactionRunning, ViewMoved, UnknownTurn (the head), DuplicateId, ValueError where `base_id` does not stand.
    """
    session = _lock(connection, new.tenant_id, new.session_id, now)
    if session is None:
        return None
    running = connection.execute(select(compactions).where(_in(session), RUNNING)).first()
    if running is not None and (running.id, running.owner) == (new.id, new.owner):
        return compaction_of(running)
    alive = running is not None and running.deadline_at > now
    if running is not None and alive and not new.supersedes:
        raise CompactionRunning(running.id, running.deadline_at)
    if session.view_version != new.view_version or session.running == new.head_turn_id:  # which runs again by its key
        raise ViewMoved(session.view_version)
    if running is not None:
        ended = interrupt(now, SUPERSESSION if alive else INTERRUPTION)
        connection.execute(ended.where(_row(new.tenant_id, running.id)))
    if new.base_id is not None and _find(connection, session, new.base_id, COMMITTED) is None:
        raise ValueError(f"no view of compaction {new.base_id!r} stands in this session")
    if _seq(connection, session, new.head_turn_id) is None:
        raise UnknownTurn(f"the session has no turn {new.head_turn_id!r} to compact up to")
    return _insert(connection, session, new, now, {"status": "running", "report": "{}"})


def note_compaction(
    connection: Connection, new: NewCompaction, error: str | None, report: str, now: float
) -> CompactionRecord | None:
    """One that was skipped before it began. None: no such session. Raises DuplicateId."""
    session = _lock(connection, new.tenant_id, new.session_id, now)
    if session is None:
        return None
    ended = {"status": "skipped", "error": error, "report": report, "completed_at": now}
    return _insert(connection, session, new, now, ended)


def commit_compaction(
    connection: Connection,
    tenant_id: str,
    session_id: str,
    id: str,
    *,
    view: str,
    plan: str,
    report: str,
    anchor_turn_id: str,
    expected_view: int,
    now: float,
) -> int:
    """The session's new view_version. Said twice, it stays as it is.

    Raises CompactionOver, ViewMoved (the row still runs), UnknownTurn (the anchor).
    """
    session = _lock(connection, tenant_id, session_id, now)
    row = None if session is None else _find(connection, session, id, lock=True)
    if session is None or row is None:
        raise CompactionOver(id, None)
    if (row.status, row.view, row.anchor_turn_id) == ("committed", view, anchor_turn_id):
        return expected_view + 1
    if row.status != "running":
        raise CompactionOver(id, row.status)
    if session.view_version != expected_view:
        raise ViewMoved(session.view_version)
    seq = _seq(connection, session, anchor_turn_id)
    if seq is None:
        raise UnknownTurn(f"the session has no turn {anchor_turn_id!r} to anchor a view at")
    made = {"view": view, "plan": plan, "report": report, "anchor_turn_id": anchor_turn_id, "anchor_seq": seq}
    ended = {"status": "committed", "completed_at": now}
    connection.execute(update(compactions).where(_row(tenant_id, id)).values(**made, **ended))
    return _move_view(connection, session)


def end_compaction(
    connection: Connection,
    tenant_id: str,
    session_id: str,
    id: str,
    *,
    status: CompactionStatus,
    error: str | None,
    report: str,
    plan: str | None,
    now: float,
) -> None:
    """Has no effect on one that does not run any more."""
    values: dict[str, Any] = {"status": status, "error": error, "report": report, "completed_at": now}
    if plan is not None:
        values["plan"] = plan
    mine = and_(_row(tenant_id, id), compactions.c.session_id == session_id, RUNNING)
    connection.execute(update(compactions).where(mine).values(**values))


def revert_compaction(
    connection: Connection, tenant_id: str, session_id: str, id: str, now: float
) -> CompactionRecord | None:
    """It and every committed one that builds on it. None: absent. Raises ValueError where it is not committed."""
    session = _lock(connection, tenant_id, session_id, now)
    row = None if session is None else _find(connection, session, id)
    if session is None or row is None:
        return None
    if row.status != "committed":
        raise ValueError(f"compaction {id} is {row.status}: only a committed one can be reverted")
    later = connection.execute(
        select(compactions.c.id, compactions.c.base_id)
        .where(_in(session), COMMITTED, compactions.c.number > row.number)
        .order_by(compactions.c.number)
    )
    fallen = {id}
    for each in later:
        if each.base_id in fallen:
            fallen.add(each.id)
    for each_id in sorted(fallen):
        connection.execute(update(compactions).where(_row(tenant_id, each_id)).values(status="reverted"))
    _move_view(connection, session)
    return compaction_of(_the(connection, session, id))


def pin_turn(
    connection: Connection,
    tenant_id: str,
    session_id: str,
    turn_id: str,
    pinned: bool,
    expected_view: int | None,
    now: float,
) -> TurnRecord | None:
    """None: absent. A turn that is pinned, or not, already changes nothing. Raises ViewMoved."""
    session = _lock(connection, tenant_id, session_id, now)
    if session is None or _seq(connection, session, turn_id) is None:
        return None
    if expected_view not in (None, session.view_version):
        raise ViewMoved(session.view_version)
    mine = and_(turns.c.tenant_id == tenant_id, turns.c.id == turn_id, turns.c.pinned == int(not pinned))
    if connection.execute(update(turns).where(mine).values(pinned=int(pinned))).rowcount:
        _move_view(connection, session)
    return read_turns(connection, tenant_id, [turn_id])[0]


def renew_compaction(
    connection: Connection, tenant_id: str, session_id: str, id: str, deadline_s: float, now: float
) -> bool:
    """Whether it still runs."""
    mine = and_(_row(tenant_id, id), compactions.c.session_id == session_id, RUNNING)
    renewed = connection.execute(update(compactions).where(mine).values(deadline_at=now + deadline_s))
    return renewed.rowcount > 0


def interrupt(now: float, why: str = INTERRUPTION) -> Any:
    """The update that ends running ones: their gateway is gone, they took too long, or another takes their place."""
    return update(compactions).where(RUNNING).values(status="failed", error=why, completed_at=now)


def _lock(connection: Connection, tenant_id: str, session_id: str, now: float) -> LiveSession | None:
    session = lock_sessions(connection, [(tenant_id, session_id)]).get((tenant_id, session_id))
    return None if session is None or session.over(now) else session


def _in(session: LiveSession) -> ColumnElement[bool]:
    return and_(compactions.c.tenant_id == session.tenant_id, compactions.c.session_id == session.id)


def _row(tenant_id: str, id: str) -> ColumnElement[bool]:
    return and_(compactions.c.tenant_id == tenant_id, compactions.c.id == id)


def _find(
    connection: Connection, session: LiveSession, id: str, *which: ColumnElement[bool], lock: bool = False
) -> Row[Any] | None:
    found = select(compactions).where(_in(session), compactions.c.id == id, *which)
    return connection.execute(found.with_for_update() if lock else found).first()


def _the(connection: Connection, session: LiveSession, id: str) -> Row[Any]:
    row = _find(connection, session, id)
    assert row is not None, "it was there a moment ago, under the session's lock"
    return row


def _seq(connection: Connection, session: LiveSession, turn_id: str) -> int | None:
    mine = (turns.c.tenant_id == session.tenant_id, turns.c.session_id == session.id, turns.c.id == turn_id)
    return connection.execute(select(turns.c.seq).where(*mine)).scalar()


def _insert(
    connection: Connection, session: LiveSession, new: NewCompaction, now: float, state: Mapping[str, Any]
) -> CompactionRecord:
    storable(new.id, new.base_id, new.head_turn_id, new.owner)
    if connection.execute(select(compactions.c.id).where(_row(new.tenant_id, new.id))).first() is not None:
        raise DuplicateId(f"there is a compaction {new.id!r} already")
    last = connection.execute(select(func.max(compactions.c.number)).where(_in(session))).scalar()
    row = {
        "tenant_id": new.tenant_id,
        "id": new.id,
        "session_id": new.session_id,
        "number": (last or 0) + 1,
        "base_id": new.base_id,
        "trigger": new.trigger,
        "head_turn_id": new.head_turn_id,
        "plan": encode(new.plan),
        "owner": new.owner,
        "created_at": now,
        "deadline_at": now + new.deadline_s,
    }
    connection.execute(compactions.insert(), row | dict(state))
    return compaction_of(_the(connection, session, new.id))


def _move_view(connection: Connection, session: LiveSession) -> int:
    session.view_version += 1
    place = (sessions.c.tenant_id == session.tenant_id, sessions.c.id == session.id)
    connection.execute(update(sessions).where(*place).values(view_version=session.view_version))
    return session.view_version
