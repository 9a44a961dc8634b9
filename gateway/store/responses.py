"""Deletes a response: at once where nothing rests on its turn, else it is marked and goes with the last that does.

    r1 <- r2 <- r3      delete r2: marked, r3 rests on it      delete r3: r3 and r2 are erased, r1 stays

Only in conversations that responses made for themselves: what stands in another is the conversation's. Words that a
summary tells of go with their session.
"""

from __future__ import annotations

from collections import Counter

import orjson
from sqlalchemy import ColumnElement, Connection, Delete, Select, and_, select, update

from gateway.store.erase import erase_session, forget_later
from gateway.store.erasure_records import NOBODYS
from gateway.store.live import lock_sessions
from gateway.store.rows import encode
from gateway.store.sizes import recount
from gateway.store.tables import compactions, events, handovers, items, sessions, turns

DELETED = "deleted"  # in the turn's metadata, in front
_MARKED = turns.c.metadata.startswith('{"deleted":true', autoescape=True)


def delete_response(
    connection: Connection, tenant_id: str, session_id: str, turn_id: str, now: float
) -> dict[str, int] | None:
    """Table -> rows erased; none where it is only marked. None: it runs."""
    session = lock_sessions(connection, [(tenant_id, session_id)]).get((tenant_id, session_id))
    if session is None:
        return {}
    if session.running == turn_id:
        return None
    mine = and_(turns.c.tenant_id == tenant_id, turns.c.session_id == session_id)
    _mark(connection, mine, turn_id)
    if session.origin != "responses":
        return {}
    if connection.execute(select(turns.c.id).where(mine, ~_MARKED).limit(1)).first() is None:
        receipt = erase_session(connection, tenant_id, session_id, now, None)  # the response has its own line
        return dict(receipt.erased) if receipt is not None else {}
    if _summarised(connection, tenant_id, session_id):
        return {}
    erased: Counter[str] = Counter()
    head, at = session.head, turn_id
    while (found := connection.execute(_leaf(mine, at)).first()) is not None:
        for name, statement in _deletes(tenant_id, at):
            erased[name] += connection.execute(statement).rowcount
        head = found.parent_id if head == at else head
        if found.parent_id is None:
            break
        at = found.parent_id
    if head != session.head:
        here = and_(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
        connection.execute(update(sessions).where(here).values(head_turn_id=head, updated_at=now))
    if erased:
        forget_later(connection, tenant_id, session_id, NOBODYS, now)
        recount(connection, tenant_id, session_id)
    return {name: count for name, count in erased.items() if count}


def _mark(connection: Connection, mine: ColumnElement[bool], turn_id: str) -> None:
    here = and_(mine, turns.c.id == turn_id)
    row = connection.execute(select(turns.c.metadata).where(here)).first()
    if row is not None:
        marked = encode({DELETED: True, **orjson.loads(row.metadata)})
        connection.execute(update(turns).where(here).values(metadata=marked))


def _leaf(mine: ColumnElement[bool], turn_id: str) -> Select[tuple[str | None]]:
    """The parent of a turn that is deleted, and that none goes on from; no row where it is neither."""
    later = turns.alias("later")
    children = (
        select(later.c.id)
        .where(later.c.tenant_id == turns.c.tenant_id, later.c.session_id == turns.c.session_id)
        .where(later.c.parent_id == turns.c.id)
        .correlate(turns)
        .exists()
    )
    return select(turns.c.parent_id).where(mine, turns.c.id == turn_id, _MARKED, ~children)


def _summarised(connection: Connection, tenant_id: str, session_id: str) -> bool:
    """Whether some summary was made in the session."""
    mine = and_(compactions.c.tenant_id == tenant_id, compactions.c.session_id == session_id)
    found = connection.execute(select(compactions.c.id).where(mine, compactions.c.view.is_not(None)).limit(1))
    return found.first() is not None


def _deletes(tenant_id: str, turn_id: str) -> list[tuple[str, Delete]]:
    parts = [
        (str(table.name), table.delete().where(table.c.tenant_id == tenant_id, table.c.turn_id == turn_id))
        for table in (events, handovers, items)
    ]
    return [*parts, (str(turns.name), turns.delete().where(turns.c.tenant_id == tenant_id, turns.c.id == turn_id))]
