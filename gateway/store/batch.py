"""One transaction for all the turns that begin and end at this moment.

    lock the sessions, in order -> read what the keys name -> decide command by command -> write table by table

A session's row is locked before it is judged (BEGIN IMMEDIATE, or SELECT ... FOR UPDATE), so a fence that holds when it
is compared holds at the commit. A command that is refused writes nothing and harms no other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ClauseElement, Connection

from gateway.store import statements as sql
from gateway.store.begin import Admit, LiveSession, LiveTurn, Reopen, Seen, decide_begin
from gateway.store.commands import Append, Begin, Command, Finish, Release
from gateway.store.erase import delete_rows, erase_expired_session
from gateway.store.leases import in_force
from gateway.store.limit_records import Holder, TooManySessions
from gateway.store.limits import check_sessions
from gateway.store.live import Key, lock_sessions, places, turns_by_key
from gateway.store.prepared import run_many
from gateway.store.reads import read_turns
from gateway.store.records import HEAD, BeginOutcome, Begun, Known, LeaseLost, NewSession, UnknownTurn
from gateway.store.rows import OUTPUT
from gateway.store.sizes import stored_by
from gateway.store.usage import book, booked_of
from gateway.store.usage_records import Account, Amount, amount_of, day_of

Outcome = BeginOutcome | Exception | None


def run_batch(connection: Connection, commands: Sequence[Command], clock: Callable[[], float]) -> list[Outcome]:
    """Outcomes in the order of `commands`; an exception among them is that command's own.

    A session's second command waits for a second round, which reads what the first one wrote.
    """
    outcomes: dict[int, Outcome] = {}
    now = clock()  # read in the transaction: whoever waited for a lock judges leases by the time after it
    for indices in _rounds(commands):
        round_outcomes = _Round(connection, now).run([commands[index] for index in indices])
        outcomes.update(zip(indices, round_outcomes, strict=True))
    return [outcomes[index] for index in range(len(commands))]


def _rounds(commands: Sequence[Command]) -> Iterator[list[int]]:
    """Indices of `commands`, each session at most once a round, sorted by session."""
    seen: dict[Key, int] = defaultdict(int)
    rounds: dict[int, list[int]] = defaultdict(list)
    for index, command in enumerate(commands):
        rounds[seen[command.key]].append(index)
        seen[command.key] += 1
    for number in sorted(rounds):
        yield sorted(rounds[number], key=lambda index: commands[index].key)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A Known whose record is read after the writes."""

    tenant_id: str
    turn_id: str
    same_request: bool


class _Round:
    def __init__(self, connection: Connection, now: float) -> None:
        self._connection = connection
        self._now = now
        self._rows: dict[ClauseElement, list[dict[str, Any]]] = defaultdict(list)
        self._unmade: list[Key] = []  # sessions that a released turn had made
        self._spent: list[tuple[Account, Amount]] = []

    def run(self, commands: Sequence[Command]) -> list[Outcome]:
        self._sessions = lock_sessions(self._connection, (command.key for command in commands))
        self._drop_expired()
        begins = [command.turn for command in commands if isinstance(command, Begin)]
        self._by_key = turns_by_key(
            self._connection,
            (
                (turn.tenant_id, turn.session_id, turn.idempotency_key)
                for turn in begins
                if turn.idempotency_key is not None and (turn.tenant_id, turn.session_id) in self._sessions
            ),
        )
        named = {(turn.tenant_id, turn.parent) for turn in begins if turn.parent not in (None, HEAD)}
        named |= {(c.tenant_id, c.turn_id) for c in commands if isinstance(c, (Append, Release))}
        self._places = places(self._connection, ((tenant_id, str(turn_id)) for tenant_id, turn_id in named))
        outcomes = [self._decide(command) for command in commands]
        self._write()
        return [self._known(outcome) if isinstance(outcome, _Seen) else outcome for outcome in outcomes]

    def _drop_expired(self) -> None:
        for key, session in list(self._sessions.items()):
            if session.over(self._now):
                erase_expired_session(self._connection, *key, self._now)
                del self._sessions[key]

    def _decide(self, command: Command) -> Outcome | _Seen:
        match command:
            case Begin():
                return self._begin(command)
            case Finish():
                return self._finish(command)
            case Release():
                return self._release(command)
            case Append():
                return self._append(command)

    def _begin(self, command: Begin) -> Outcome | _Seen:
        begin, session = command.turn, self._sessions.get(command.key)
        known = self._by_key.get((*command.key, begin.idempotency_key or ""))
        if session is not None and session.running is not None and not in_force(session.lease_until, self._now):
            self._lapse(session, known)
        decision = decide_begin(begin, session, known, self._now)
        match decision:
            case Seen(turn, same_request):
                return _Seen(begin.tenant_id, turn.id, same_request)
            case Reopen(turn):
                assert session is not None, "a key is known in a session that exists"
                return self._reopen(command, session, turn)
            case Admit():
                return self._admit(command, session, decision)
            case _:
                return decision

    def _lapse(self, session: LiveSession, known: LiveTurn | None) -> None:
        """Its holder is gone: what it ran is incomplete, and the session is free."""
        self._rows[sql.LAPSE_TURN].append(
            {
                "b_tenant": session.tenant_id,
                "b_id": session.running,
                "status": "incomplete",
                "completed_at": self._now,
            }
        )
        if known is not None and known.id == session.running:
            known.status = "incomplete"
        self._free(session)

    def _admit(self, command: Begin, session: LiveSession | None, admitted: Admit) -> Outcome:
        begin = command.turn
        if begin.parent not in (None, HEAD):
            place = self._places.get((begin.tenant_id, str(begin.parent)))
            if place is None or place.session_id != begin.session_id:
                return UnknownTurn(f"the session has no turn {begin.parent!r} to go on from")
        if session is None:
            assert begin.create is not None, "decide_begin admits to an absent session only to create it"
            try:
                self._check_bounds(begin.create)
            except TooManySessions as refused:
                return refused
            session = self._create(command, begin.create)
        session.bytes += command.bytes
        if admitted.rekey is not None:
            self._rows[sql.REKEY_TURN].append({"b_tenant": begin.tenant_id, "b_id": admitted.rekey.id})
        if session.new is None and session.user_ref is None and begin.user_ref is not None:
            session.user_ref = begin.user_ref
            owner = {"b_tenant": begin.tenant_id, "b_id": begin.session_id, "user_ref": begin.user_ref}
            for statement in (sql.OWN_SESSION, sql.OWN_TURNS):
                self._rows[statement].append(owner)
        seq = session.next_seq
        session.next_seq += 1
        self._lease(session, begin.turn_id, begin.owner, begin.lease_s)
        self._rows[sql.INSERT_TURN].append(
            {
                "tenant_id": begin.tenant_id,
                "id": begin.turn_id,
                "session_id": begin.session_id,
                "parent_id": admitted.parent_id,
                "seq": seq,
                "status": "in_progress",
                "model": begin.model,
                "fence": session.fence,
                "attempt": 1,
                "idempotency_key": begin.idempotency_key,
                "request_hash": begin.request_hash,
                "on_disconnect": begin.on_disconnect,
                "created_at": self._now,
                "user_ref": session.user_ref or "",
                "open_answer": 0,
                "usage": "{}",
                "placement": "{}",
                "prefix_report": "{}",
                "metadata": command.notes,
                "key_id": begin.key_id,
            }
        )
        self._rows[sql.INSERT_ITEM].extend(command.items)
        made = session.new is not None
        return Begun(seq=seq, fence=session.fence, parent_id=admitted.parent_id, turn_id=begin.turn_id, made=made)

    def _check_bounds(self, new: NewSession) -> None:
        """Sessions that this round makes are not in the database yet."""
        for bound in new.bounds:
            made = sum(1 for s in self._sessions.values() if s.new is not None and made_by(s, bound.holder))
            check_sessions(self._connection, [bound], 1 + made)

    def _create(self, command: Begin, new: NewSession) -> LiveSession:
        session = LiveSession(
            tenant_id=new.tenant_id,
            id=new.id,
            head=None,
            next_seq=1,
            fence=0,
            owner=None,
            lease_until=None,
            running=None,
            cancel=0,
            user_ref=new.user_ref,
            origin=new.origin,
            expires_at=new.expires_at,
            version=1,
            bytes=command.session["bytes"],
            new=command.session | {"created_at": self._now, "updated_at": self._now},
        )
        self._rows[sql.INSERT_METADATA].extend(command.metadata)
        self._sessions[new.tenant_id, new.id] = session
        return session

    def _reopen(self, command: Begin, session: LiveSession, turn: LiveTurn) -> Begun:
        begin, place = command.turn, {"b_tenant": command.turn.tenant_id, "b_id": turn.id}
        if session.head == turn.id:
            session.head = turn.parent_id
        if (booked := booked_of(self._connection, begin.tenant_id, turn.id)) is not None:
            account, amount = booked
            self._spent.append((account, -amount))  # it runs again, and is booked then
        session.bytes += command.bytes - stored_by(self._connection, begin.tenant_id, turn.id, part=OUTPUT)
        self._lease(session, turn.id, begin.owner, begin.lease_s)
        for statement in (sql.DELETE_OUTPUT, sql.DELETE_EVENTS):
            self._rows[statement].append(place)
        self._rows[sql.REOPEN_TURN].append(
            place
            | {
                "fence": session.fence,
                "attempt": turn.attempt + 1,
                "model": begin.model,
                "on_disconnect": begin.on_disconnect,
                "metadata": command.notes,
                "key_id": begin.key_id,
            }
        )
        return Begun(turn.seq, session.fence, turn.parent_id, reopened=True, turn_id=turn.id)

    def _lease(self, session: LiveSession, turn_id: str, owner: str, lease_s: float) -> None:
        session.fence += 1
        session.owner, session.lease_until = owner, self._now + lease_s
        session.running, session.cancel, session.dirty = turn_id, 0, True

    def _free(self, session: LiveSession) -> None:
        session.owner = session.lease_until = session.running = None
        session.cancel, session.dirty = 0, True

    def _finish(self, command: Finish) -> Outcome:
        finish, session = command.turn, self._sessions.get(command.key)
        if session is None or session.fence != finish.fence or session.running != finish.turn_id:
            return None if self._landed(command) else _lost(finish.turn_id, finish.fence)
        if finish.move_head:
            session.head = finish.turn_id
        self._free(session)
        session.bytes += command.bytes
        self._rows[sql.FINISH_TURN].append(command.row | {"completed_at": self._now})
        self._rows[sql.INSERT_ITEM].extend(command.items)
        if finish.spender is not None:
            names = (finish.spender.key_id, session.user_ref or "", session.id, finish.spender.model)
            account = Account(session.tenant_id, day_of(self._now), *names, "turn")
            self._spent.append((account, amount_of(finish.usage)))
        return None

    def _landed(self, command: Finish) -> bool:
        """Whether this finish was stored before, its commit not heard of, and the caller tries again.

        A lapse leaves `incomplete` under the same fence, so an incomplete finish cannot be told from it: refused.
        """
        turn = command.turn
        place = places(self._connection, [(turn.tenant_id, turn.turn_id)]).get((turn.tenant_id, turn.turn_id))
        same = place is not None and (place.session_id, place.fence) == (turn.session_id, turn.fence)
        return same and place is not None and place.status == turn.status != "incomplete"

    def _release(self, command: Release) -> Outcome:
        session = self._sessions.get(command.key)
        if session is None or session.fence != command.fence or session.running != command.turn_id:
            return _lost(command.turn_id, command.fence)
        place = self._places[command.tenant_id, command.turn_id]
        if place.attempt > 1:
            self._lapse(session, None)
            return None
        self._free(session)
        session.bytes -= stored_by(self._connection, command.tenant_id, command.turn_id)
        for statement in (sql.DELETE_EVENTS, sql.DELETE_ITEMS, sql.DELETE_TURN):
            self._rows[statement].append({"b_tenant": command.tenant_id, "b_id": command.turn_id})
        if session.next_seq == place.seq + 1:
            session.next_seq = place.seq
        if session.next_seq == 1 and session.origin != "api":  # made by this turn, for it alone
            self._unmade.append(command.key)
        return None

    def _append(self, command: Append) -> Outcome:
        place = self._places.get((command.tenant_id, command.turn_id))
        if place is None or place.session_id != command.session_id or command.fence not in (None, place.fence):
            return _lost(command.turn_id, command.fence)
        self._rows[sql.INSERT_EVENT].extend(
            {
                "tenant_id": command.tenant_id,
                "turn_id": command.turn_id,
                "seq": command.first_seq + offset,
                "payload": event,
                "created_at": self._now,
            }
            for offset, event in enumerate(command.events)
        )
        return None

    def _write(self) -> None:
        for session in self._sessions.values():
            if session.new is not None:
                self._rows[sql.INSERT_SESSION].append(session.new | _state(session))
            elif session.dirty:
                place = {"b_tenant": session.tenant_id, "b_id": session.id}
                self._rows[sql.UPDATE_SESSION].append(place | _state(session) | {"updated_at": self._now})
        for statement in sql.ORDER:
            if rows := self._rows.get(statement):
                run_many(self._connection, statement, rows)
        book(self._connection, self._spent)
        for key in self._unmade:
            delete_rows(self._connection, *key)

    def _known(self, seen: _Seen) -> Known:
        (record,) = read_turns(self._connection, seen.tenant_id, [seen.turn_id])
        return Known(record, seen.same_request)


def _state(session: LiveSession) -> dict[str, Any]:
    return {
        "head_turn_id": session.head,
        "next_seq": session.next_seq,
        "fence": session.fence,
        "lease_owner": session.owner,
        "lease_until": session.lease_until,
        "running_turn_id": session.running,
        "cancel_requested": session.cancel,
        "bytes": session.bytes,
    }


def made_by(session: LiveSession, holder: Holder) -> bool:
    """A session that this round makes counts for this holder."""
    assert session.new is not None
    return session.tenant_id == holder.tenant_id and holder.key_id in ("", session.new["key_id"])


def _lost(turn_id: str, fence: int | None) -> LeaseLost:
    return LeaseLost(f"turn {turn_id} no longer holds its session under fence {fence}")
