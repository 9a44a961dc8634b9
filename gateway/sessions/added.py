"""Items that join a conversation without an answer: a turn that was never sent to a model.

It has no token ids; the next prompt is rendered anew, and what it has in common with the path before is reused.
"""

from __future__ import annotations

from collections.abc import Sequence

from compression.conversation import Item, open_calls
from gateway.errors import NotFound, SessionBusy, TooLarge
from gateway.sessions.history import TAIL, History, load
from gateway.sessions.items import check_pairs, has_images, meaning
from gateway.sessions.room import TurnRoom
from gateway.sessions.turn import check_taken
from gateway.store.records import HEAD, BeginTurn, Begun, Busy, FinishTurn, SessionRecord

TRIES = 5  # a head that moves between reading and writing is read again this often
ADDED = {"added": True}  # metadata of such a turn


async def add_items(room: TurnRoom, session: SessionRecord, items: tuple[Item, ...], *, param: str = "items") -> str:
    """The id of the turn that now is the head. Raises Unprocessable (pairs), TooLarge, SessionBusy, Conflict
    (archived), NotFound."""
    check_sizes(room, session.model, items)
    for _ in range(TRIES):
        check_taken(session)
        history = await load(room.store, session, HEAD)
        check_pairs(history.open_calls, items, param=param)
        turn_id = await room.registry.see_through(_written(room, session, history, items), lambda _: None)
        room.registry.heads.forget(session.tenant_id, session.id)
        if turn_id is not None:
            return turn_id
        found = await room.store.get_session(session.tenant_id, session.id)
        if found is None:
            raise NotFound(f"no conversation {session.id[:64]!r}", code="conversation_not_found")
        session = found
    raise SessionBusy("turns keep moving this conversation's head; try again", retry_after_s=1.0)


def check_sizes(room: TurnRoom, model: str, items: Sequence[Item]) -> None:
    """Raises TooLarge for a text that the model's tokenizer would refuse: no turn could follow it."""
    tokens = room.models.tokens(model)
    if tokens is None:
        return
    for item in items:
        if (size := len(item.text.encode())) > tokens.max_bytes:
            raise TooLarge(
                f"an item holds a text of {size} bytes; at most {tokens.max_bytes} are tokenized for {model[:100]}",
                details={"bytes": size, "limit": tokens.max_bytes},
            )


async def _written(room: TurnRoom, session: SessionRecord, history: History, items: tuple[Item, ...]) -> str | None:
    """None: the head has moved, or the session is gone."""
    turn_id = room.new_id("turn")
    begun = await room.store.begin_turn(
        BeginTurn(
            tenant_id=session.tenant_id,
            session_id=session.id,
            turn_id=turn_id,
            owner=room.registry.owner,
            lease_s=room.lease_s,
            input=items,
            model=session.model,
            parent=HEAD,
            expected_head=history.head.turn_id,
            metadata=ADDED,
        )
    )
    if isinstance(begun, Busy):
        raise SessionBusy("this conversation is answering", retry_after_s=max(1.0, round(begun.retry_after_s)))
    if not isinstance(begun, Begun):
        return None
    await room.store.finish_turn(
        FinishTurn(
            tenant_id=session.tenant_id,
            session_id=session.id,
            turn_id=turn_id,
            fence=begun.fence,
            status="completed",
            output=(),
            finish_reason=None,
            tokens=None,
            meaning=meaning(history.meaning(session.system), items),
            usage={},
            placement={},
            prefix_report={},
            metadata={**ADDED, TAIL: _tail(history, items)},
        )
    )
    return turn_id


def _tail(history: History, items: tuple[Item, ...]) -> dict[str, object]:
    """What the next turn must know of this one's end."""
    answered = {str(item.payload["call_id"]) for item in items if item.type == "function_call_output"}
    waiting = {call: name for call, name in history.open_calls.items() if call not in answered}
    before = (history.last.metadata.get(TAIL) or {}) if history.last is not None else {}
    return {
        "open_calls": {**waiting, **open_calls(items)},
        "reasoning": history.head.reasoning or any(item.type == "reasoning" for item in items),
        "images": history.pictured or has_images(items),
        **({"answered": before["answered"]} if "answered" in before else {}),
    }
