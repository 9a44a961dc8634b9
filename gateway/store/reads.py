"""Reads of turns and sessions: functions of a connection, each scoped by its tenant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from sqlalchemy import CTE, ColumnElement, Connection, Row, and_, bindparam, func, literal, select

from compression.conversation import Item
from gateway.store.leases import in_force, in_force_sql
from gateway.store.records import RunningTurn, SessionRecord, TurnRecord
from gateway.store.rows import item_of, session_of, turn_of
from gateway.store.tables import events, items, sessions, turns

U32 = 4  # bytes of a token id
CHUNK = 1000  # ids in one IN (...): both databases take over 30,000

_HEAD = [column for column in turns.c if column.name not in ("prompt_ids", "output_ids")]
_ITEMS = (
    select(items.c.turn_id, items.c.part, items.c.type, items.c.payload)
    .where(items.c.tenant_id == bindparam("b_tenant"), items.c.turn_id.in_(bindparam("b_ids", expanding=True)))
    .order_by(items.c.turn_id, items.c.part, items.c.idx)
)
_SESSION = select(sessions).where(
    sessions.c.tenant_id == bindparam("b_tenant"), sessions.c.id == bindparam("b_session")
)


def alive(now: float) -> ColumnElement[bool]:
    """Sessions whose time is not over; one with a turn under lease lives until that turn ends."""
    timeless = sessions.c.expires_at.is_(None)
    return timeless | (sessions.c.expires_at > now) | in_force_sql(func.coalesce(sessions.c.lease_until, 0.0), now)


def read_session(connection: Connection, tenant_id: str, session_id: str, now: float) -> SessionRecord | None:
    row = connection.execute(_SESSION, {"b_tenant": tenant_id, "b_session": session_id}).first()
    if row is None:
        return None
    expired = row.expires_at is not None and row.expires_at <= now and not in_force(row.lease_until, now)
    return None if expired else session_of(row, now)


def read_turns(connection: Connection, tenant_id: str, turn_ids: Sequence[str]) -> list[TurnRecord]:
    """The turns that exist, with items and ids, in no particular order."""
    found: list[Row[Any]] = []
    for chunk in _chunks(turn_ids):
        found += connection.execute(select(turns).where(turns.c.tenant_id == tenant_id, turns.c.id.in_(chunk))).all()
    return with_items(connection, tenant_id, found)


def read_turn(
    connection: Connection, tenant_id: str, session_id: str, *, which: ColumnElement[bool]
) -> TurnRecord | None:
    """The one turn of a session that `which` picks."""
    row = connection.execute(select(turns).where(_of(tenant_id, session_id), which)).first()
    return None if row is None else with_items(connection, tenant_id, [row])[0]


def read_head(connection: Connection, tenant_id: str, session_id: str, turn_id: str | None) -> TurnRecord | None:
    """A turn without items and with empty ids, at a cost that does not grow with it. None as id: the session's head."""
    statement = select(*_HEAD).where(_of(tenant_id, session_id))
    if turn_id is not None:
        statement = statement.where(turns.c.id == turn_id)
    else:
        statement = statement.join(
            sessions,
            and_(
                sessions.c.tenant_id == turns.c.tenant_id,
                sessions.c.id == turns.c.session_id,
                sessions.c.head_turn_id == turns.c.id,
            ),
        )
    row = connection.execute(statement).first()
    return None if row is None else turn_of(row, {})


def list_turns(
    connection: Connection,
    tenant_id: str,
    session_id: str,
    *,
    after: int | None,
    before: int | None,
    order: Literal["asc", "desc"],
    limit: int,
    path_of: str | None,
) -> tuple[TurnRecord, ...]:
    """Turns by seq, strictly between `after` and `before`; of one path where `path_of` names its leaf."""
    statement = select(turns).where(_of(tenant_id, session_id))
    if path_of is not None:
        walk = _walk(tenant_id, session_id, path_of)
        statement = statement.join(walk, walk.c.id == turns.c.id)
    if after is not None:
        statement = statement.where(turns.c.seq > after)
    if before is not None:
        statement = statement.where(turns.c.seq < before)
    statement = statement.order_by(turns.c.seq.desc() if order == "desc" else turns.c.seq).limit(limit)
    return tuple(with_items(connection, tenant_id, connection.execute(statement).all()))


def read_path(connection: Connection, tenant_id: str, session_id: str, turn_id: str) -> tuple[TurnRecord, ...]:
    """The turns from the root to `turn_id`; none where the session has no such turn."""
    walk = _walk(tenant_id, session_id, turn_id)
    statement = (
        select(turns)
        .join(walk, walk.c.id == turns.c.id)
        .where(_of(tenant_id, session_id))
        .order_by(walk.c.depth.desc())
    )
    return tuple(with_items(connection, tenant_id, connection.execute(statement).all()))


def read_path_ids(connection: Connection, tenant_id: str, session_id: str, turn_id: str) -> bytes:
    """The token ids of the path, u32 little-endian, path_tokens of the leaf in number.

    Walked from the leaf up; each turn fills what lies between its own base_tokens and what is filled already:

        parent's path   [0 ............................ path_tokens)
        own ids                     [base_tokens ............ path_tokens)
        taken from      parent      | own
    """
    walk = _walk(tenant_id, session_id, turn_id)
    rows = connection.execute(
        select(turns.c.base_tokens, turns.c.prompt_ids, turns.c.output_ids)
        .join(walk, walk.c.id == turns.c.id)
        .where(_of(tenant_id, session_id), turns.c.fingerprint.is_not(None))
        .order_by(walk.c.depth)
    ).all()
    pieces: list[bytes] = []
    end: int | None = None  # bytes of the path, from its start, that are still to be filled; None: all of them
    for base_tokens, prompt_ids, output_ids in rows:
        own, start = prompt_ids + output_ids, base_tokens * U32
        if end is None or start < end:
            pieces.append(own if end is None else own[: end - start])
            end = start
    assert not end, f"the ids of turn {turn_id} do not reach back to the start of its path"
    return b"".join(reversed(pieces))


def _walk(tenant_id: str, session_id: str, turn_id: str) -> CTE:
    """The path from `turn_id` (depth 0) up to its root."""
    step = turns.alias("step")
    walk = (
        select(turns.c.id, turns.c.parent_id, literal(0).label("depth"))
        .where(_of(tenant_id, session_id), turns.c.id == turn_id)
        .cte("walk", recursive=True)
    )
    return walk.union_all(
        select(step.c.id, step.c.parent_id, walk.c.depth + 1)
        .join(walk, step.c.id == walk.c.parent_id)
        .where(step.c.tenant_id == tenant_id)
    )


def _of(tenant_id: str, session_id: str) -> ColumnElement[bool]:
    return and_(turns.c.tenant_id == tenant_id, turns.c.session_id == session_id)


def with_items(connection: Connection, tenant_id: str, rows: Sequence[Row[Any]]) -> list[TurnRecord]:
    """Records of rows that hold a turn and its ids, in their order, with the items read in as few queries as can be."""
    found: dict[str, dict[int, list[Item]]] = defaultdict(lambda: defaultdict(list))
    for chunk in _chunks([row.id for row in rows]):
        for item in connection.execute(_ITEMS, {"b_tenant": tenant_id, "b_ids": chunk}):
            found[item.turn_id][item.part].append(item_of(item))
    return [
        turn_of(
            row,
            {part: tuple(entries) for part, entries in found[row.id].items()},
            (row.prompt_ids or b"", row.output_ids or b""),
        )
        for row in rows
    ]


def recent_turns(connection: Connection, limit: int) -> tuple[TurnRecord, ...]:
    """The newest turns of all tenants, without items and with empty ids."""
    rows = connection.execute(select(*_HEAD).order_by(turns.c.created_at.desc(), turns.c.seq.desc()).limit(limit))
    return tuple(turn_of(row, {}) for row in rows)


def read_events(
    connection: Connection, tenant_id: str, session_id: str, turn_id: str, after_seq: int
) -> list[tuple[int, bytes]]:
    rows = connection.execute(
        select(events.c.seq, events.c.payload)
        .join(turns, and_(turns.c.tenant_id == events.c.tenant_id, turns.c.id == events.c.turn_id))
        .where(
            events.c.tenant_id == tenant_id,
            events.c.turn_id == turn_id,
            turns.c.session_id == session_id,
            events.c.seq > after_seq,
        )
        .order_by(events.c.seq)
    )
    return [(row.seq, bytes(row.payload)) for row in rows]


def cancelled_turns(connection: Connection, owner: str) -> list[RunningTurn]:
    rows = connection.execute(
        select(sessions.c.tenant_id, sessions.c.id, sessions.c.running_turn_id).where(
            sessions.c.running_turn_id.is_not(None),
            sessions.c.lease_owner == owner,
            sessions.c.cancel_requested == 1,
        )
    )
    return [RunningTurn(*row) for row in rows]


def find_meaning(
    connection: Connection, tenant_id: str, user_ref: str | None, digests: Sequence[bytes], now: float
) -> TurnRecord | None:
    """The newest turn whose meaning is the last in `digests` that any turn of this end user has."""
    for start in range(len(digests), 0, -MATCHES):
        chunk = digests[max(0, start - MATCHES) : start]
        rows = connection.execute(_MATCH, _match_parameters(tenant_id, user_ref, chunk) | {"b_now": now}).all()
        if rows:
            best = max(rows, key=lambda row: row.place)
            found = read_turns(connection, tenant_id, [best.id])
            return found[0] if found else None
    return None


def find_meaning_in(
    connection: Connection, tenant_id: str, session_id: str, digests: Sequence[bytes]
) -> TurnRecord | None:
    """The newest turn of one session whose meaning is the last in `digests` that any of its turns has."""
    for start in range(len(digests), 0, -IN_SESSION):
        chunk = digests[max(0, start - IN_SESSION) : start]
        found = select(turns.c.id, turns.c.meaning, turns.c.seq).where(
            turns.c.tenant_id == tenant_id, turns.c.session_id == session_id, turns.c.meaning.in_(chunk)
        )
        rows = connection.execute(found).all()
        if rows:
            places = {digest: place for place, digest in enumerate(chunk)}
            best = max(rows, key=lambda row: (places[bytes(row.meaning)], row.seq))
            read = read_turns(connection, tenant_id, [best.id])
            return read[0] if read else None
    return None


IN_SESSION = 256  # digests looked up by one statement within a session
MATCHES = 16  # digests looked up by one statement


def _match_one(place: int) -> Any:
    """One newest turn for one digest: the index answers it alone, however many turns mean the same."""
    newest = (
        select(turns.c.id)
        .join(sessions, and_(sessions.c.tenant_id == turns.c.tenant_id, sessions.c.id == turns.c.session_id))
        .where(
            turns.c.tenant_id == bindparam("b_tenant"),
            turns.c.user_ref == bindparam("b_user_ref"),
            turns.c.meaning == bindparam(f"b_{place}"),
            turns.c.meaning.is_not(None),
            sessions.c.archived_at.is_(None),
            sessions.c.expires_at.is_(None) | (sessions.c.expires_at > bindparam("b_now")),
        )
        .order_by(turns.c.created_at.desc())
        .limit(1)
        .subquery(f"newest_{place}")
    )
    return select(literal(place).label("place"), newest.c.id)


_MATCH = _match_one(0).union_all(*(_match_one(place) for place in range(1, MATCHES)))


def _match_parameters(tenant_id: str, user_ref: str | None, chunk: Sequence[bytes]) -> dict[str, Any]:
    padded = [*chunk, *[b""] * (MATCHES - len(chunk))]
    named = {f"b_{place}": digest for place, digest in enumerate(padded)}
    return {"b_tenant": tenant_id, "b_user_ref": user_ref or "", **named}


def _chunks(ids: Sequence[str]) -> Iterable[Sequence[str]]:
    return (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))
