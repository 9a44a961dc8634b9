"""Reads of compactions, and of the view that stands on a path. Each is scoped by its tenant.

A view stands on every path that runs through its anchor, the latest turn that it touches. On the way up from a turn the
first anchor decides; of several views anchored there, the newest. (A view builds on the one that stood before it, so
its anchor lies no higher; where a path forked above an anchor, what was compacted on one branch is not on the other.)

    t1 - t2 - t3 - t4* - t5 - t6      #1 anchored at t2, #2 at t4
               \\ - t7 - t8            t6 is seen through #2, t8 through #1

The walk ends at the first anchor, or where seq falls below every anchor's: parents have smaller ones.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Connection, and_, bindparam, case, func, select
from sqlalchemy.sql.selectable import FromClause

from gateway.store.compaction_records import CompactionRecord, StandingView
from gateway.store.rows import compaction_of
from gateway.store.tables import COMMITTED, PINNED, compactions, sessions, turns

_TENANT: BindParameter[str] = bindparam("b_tenant")
_SESSION: BindParameter[str] = bindparam("b_session")
_FLOOR: BindParameter[int] = bindparam("b_floor")
_OF = and_(compactions.c.tenant_id == _TENANT, compactions.c.session_id == _SESSION)

_VERSION = select(sessions.c.view_version).where(sessions.c.tenant_id == _TENANT, sessions.c.id == _SESSION)
_PINNED = select(turns.c.id).where(turns.c.tenant_id == _TENANT, turns.c.session_id == _SESSION, PINNED)
_LOWEST = select(func.min(compactions.c.anchor_seq)).where(_OF, COMMITTED)
_AT = (
    select(compactions)
    .where(_OF, COMMITTED, compactions.c.anchor_seq == bindparam("b_seq"))
    .where(compactions.c.anchor_turn_id == bindparam("b_turn"))
    .order_by(compactions.c.number.desc())
    .limit(1)
)


def _is_anchor(turn: FromClause) -> ColumnElement[int]:
    found = select(compactions.c.id).where(
        _OF, COMMITTED, compactions.c.anchor_seq == turn.c.seq, compactions.c.anchor_turn_id == turn.c.id
    )
    return case((found.correlate(turn).exists(), 1), else_=0).label("is_anchor")


def _first_anchor() -> Any:
    step = turns.alias("step")
    start = turns.c.id == bindparam("b_turn")
    walk = (
        select(turns.c.id, turns.c.parent_id, turns.c.seq, _is_anchor(turns))
        .where(turns.c.tenant_id == _TENANT, turns.c.session_id == _SESSION, start, turns.c.seq >= _FLOOR)
        .cte("walk", recursive=True)
    )
    walk = walk.union_all(
        select(step.c.id, step.c.parent_id, step.c.seq, _is_anchor(step))
        .join(walk, step.c.id == walk.c.parent_id)
        .where(step.c.tenant_id == _TENANT, step.c.seq >= _FLOOR, walk.c.is_anchor == 0)
    )
    return select(walk.c.id, walk.c.seq).where(walk.c.is_anchor == 1)


_FIRST_ANCHOR = _first_anchor()


def view_of(connection: Connection, tenant_id: str, session_id: str, turn_id: str) -> StandingView:
    """What stands on the path to `turn_id`; the raw path where there is no such turn."""
    place = {"b_tenant": tenant_id, "b_session": session_id}
    version = connection.execute(_VERSION, place).scalar()
    if not version:  # nothing was ever compacted or pinned here
        return StandingView(None, frozenset())
    pinned = frozenset(connection.execute(_PINNED, place).scalars())
    return StandingView(_standing(connection, place, turn_id), pinned, version)


def _standing(connection: Connection, place: dict[str, str], turn_id: str) -> CompactionRecord | None:
    floor = connection.execute(_LOWEST, place).scalar()
    if floor is None:
        return None
    anchor = connection.execute(_FIRST_ANCHOR, {**place, "b_turn": turn_id, "b_floor": floor}).first()
    if anchor is None:
        return None
    row = connection.execute(_AT, {**place, "b_turn": anchor.id, "b_seq": anchor.seq}).one()
    return compaction_of(row)


def list_compactions(
    connection: Connection, tenant_id: str, session_id: str, limit: int, before: int | None
) -> tuple[CompactionRecord, ...]:
    """Newest first; `before`: only those with a smaller number."""
    mine = select(compactions).where(compactions.c.tenant_id == tenant_id, compactions.c.session_id == session_id)
    if before is not None:
        mine = mine.where(compactions.c.number < before)
    rows = connection.execute(mine.order_by(compactions.c.number.desc()).limit(limit))
    return tuple(compaction_of(row) for row in rows)


def get_compaction(connection: Connection, tenant_id: str, session_id: str, id: str) -> CompactionRecord | None:
    mine = (compactions.c.tenant_id == tenant_id, compactions.c.session_id == session_id, compactions.c.id == id)
    row = connection.execute(select(compactions).where(*mine)).first()
    return None if row is None else compaction_of(row)
