"""Where the sessions stand whose last turn this gateway ended, so that their next turn begins without a read.

    turn ends here -> put          PATCH, archive, delete here -> forget
    next turn      -> get -> transaction 1 compares head and version -> HeadMoved or NoSession -> forget, read the store

Another gateway may have moved a head meanwhile: what is remembered is a guess that transaction 1 proves, never more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from compression.conversation import Turn
from gateway.sessions.command import TurnCommand
from gateway.sessions.history import UNSEEN
from gateway.store.compaction_records import StandingView
from gateway.store.records import FinishTurn, NewSession, SessionRecord, TurnRecord

KEPT = 1024  # sessions; 2 to 3 KB each, and the system prompt's size


@dataclass(frozen=True, slots=True)
class Standing:
    """A session with the turn at its head, as `Store.get_session` and `Store.last_turn` would give them."""

    session: SessionRecord
    last: TurnRecord
    view: StandingView = UNSEEN


class Heads:
    """`clock`: seconds since 1970."""

    def __init__(self, clock: Callable[[], float], kept: int = KEPT) -> None:
        self._clock = clock
        self._kept = kept
        self._known: OrderedDict[tuple[str, str], Standing] = OrderedDict()

    def get(self, tenant_id: str, session_id: str) -> Standing | None:
        known = self._known.get((tenant_id, session_id))
        if known is None:
            return None
        expires_at = known.session.expires_at
        if expires_at is not None and expires_at <= self._clock():
            self.forget(tenant_id, session_id)
            return None
        return known

    def put(self, standing: Standing) -> None:
        key = standing.session.tenant_id, standing.session.id
        self._known[key] = standing
        self._known.move_to_end(key)
        if len(self._known) > self._kept:
            self._known.popitem(last=False)

    def forget(self, tenant_id: str, session_id: str) -> bool:
        """Whether there was something to forget."""
        return self._known.pop((tenant_id, session_id), None) is not None

    def forget_at(self, replica: str) -> None:
        """Forget the sessions whose last turn ran at this replica: it is drained, and they are moved."""
        for key in [key for key, known in self._known.items() if known.last.placement.get("replica") == replica]:
            del self._known[key]


def made_with(new: NewSession, now: float) -> SessionRecord:
    """The session that a turn's first transaction made of `new`; only its instants are guessed."""
    return SessionRecord(
        id=new.id,
        tenant_id=new.tenant_id,
        version=1,
        model=new.model,
        system=new.system,
        tools=tuple(new.tools),
        title=new.title,
        metadata=new.metadata,
        policy=new.policy,
        user_ref=new.user_ref,
        origin=new.origin,
        head_turn_id=None,
        next_seq=1,
        status="idle",
        created_at=now,
        updated_at=now,
        expires_at=new.expires_at,
        archived_at=None,
    )


def standing(
    session: SessionRecord,
    command: TurnCommand,
    write: FinishTurn,
    *,
    parent_id: str | None,
    seq: int,
    now: float,
    view: StandingView,
) -> Standing:
    """What `write`, which made its turn the head of `session`, leaves in the store. Ids and items are left out."""
    turn = Turn(id=write.turn_id, parent_id=parent_id, seq=seq, status=write.status, input=())
    last = TurnRecord(
        turn=turn,
        tenant_id=write.tenant_id,
        session_id=write.session_id,
        model=command.ask.model,
        fence=write.fence,
        idempotency_key=command.idempotency_key,
        request_hash=command.request_hash,
        on_disconnect=command.on_disconnect,
        created_at=now,
        completed_at=now,
        finish_reason=write.finish_reason,
        tokens=write.tokens and replace(write.tokens, prompt_ids=b"", output_ids=b""),
        meaning=write.meaning,
        usage=write.usage,
        placement=write.placement,
        prefix_report=write.prefix_report,
        error=write.error,
        metadata=write.metadata,
    )
    moved = replace(session, head_turn_id=write.turn_id, next_seq=seq + 1, status="idle", updated_at=now)
    return Standing(moved, last, view)
