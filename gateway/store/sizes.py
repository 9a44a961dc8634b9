"""How many bytes a session, or one of its turns, stores: counted from the rows where no running sum tells."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, LargeBinary, cast, func, select, update

from gateway.store.tables import items, sessions, turns


def _bytes(connection: Connection, column: Any) -> ColumnElement[int]:
    if connection.dialect.name == "sqlite":  # whose octet_length came in 3.43
        return func.coalesce(func.length(cast(column, LargeBinary)), 0)
    return func.coalesce(func.octet_length(column), 0)


def stored_by(connection: Connection, tenant_id: str, turn_id: str, part: int | None = None) -> int:
    """Bytes of a turn's items and token ids; of one part (INPUT, OUTPUT) of its items only, where that is named."""
    mine = [items.c.tenant_id == tenant_id, items.c.turn_id == turn_id]
    if part is not None:
        mine.append(items.c.part == part)
    total = func.coalesce(func.sum(_bytes(connection, items.c.payload)), 0)
    ids = _bytes(connection, turns.c.prompt_ids) + _bytes(connection, turns.c.output_ids)
    here = (turns.c.tenant_id == tenant_id, turns.c.id == turn_id)
    in_items = connection.execute(select(total).where(*mine)).scalar_one()
    return int(in_items) + int(connection.execute(select(ids).where(*here)).scalar() or 0)


def recount(connection: Connection, tenant_id: str, session_id: str) -> None:
    """Set the session's sum from its rows."""
    own = (_bytes(connection, sessions.c[name]) for name in ("system", "tools", "metadata"))
    of_turns = (turns.c.tenant_id == tenant_id, turns.c.session_id == session_id)
    ids = _bytes(connection, turns.c.prompt_ids) + _bytes(connection, turns.c.output_ids)
    in_ids = select(func.coalesce(func.sum(ids), 0)).where(*of_turns)
    joined = items.join(turns, (turns.c.tenant_id == items.c.tenant_id) & (turns.c.id == items.c.turn_id))
    payload = func.coalesce(func.sum(_bytes(connection, items.c.payload)), 0)
    in_items = select(payload).select_from(joined).where(*of_turns)
    here = (sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    system, tools, metadata = own
    total = system + tools + metadata + in_ids.scalar_subquery() + in_items.scalar_subquery()
    connection.execute(update(sessions).where(*here).values(bytes=total))
