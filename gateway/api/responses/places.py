"""Where a response goes on from: another response, a conversation, or nothing. Another tenant's is absent."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from gateway.api.responses.asked import conversation_of
from gateway.api.responses.schemas import ContextFields
from gateway.api.sessions import check_served
from gateway.api.state import Gateway
from gateway.errors import BadRequest, NotFound, SessionBusy
from gateway.sessions.recognise import SESSION_KEY
from gateway.store.records import HEAD, SessionChanges, SessionRecord, TurnRecord, VersionConflict
from gateway.store.responses import DELETED

CONVERSATION = "conv_"  # how the id of one begins that was made as a conversation


@dataclass(frozen=True, slots=True)
class Place:
    """`parent`: the turn it goes on from; HEAD for wherever the conversation stands."""

    session: SessionRecord | None = None
    parent: str | None = None
    conversation: str | None = None  # as the response shows it
    joins: bool = True  # whether the answer becomes the head; not where it only goes on from a conversation's response


async def place_of(gateway: Gateway, tenant_id: str, asked: ContextFields) -> Place:
    """Raises NotFound, BadRequest (there is no answer to go on from), SessionBusy (not yet)."""
    if (named := conversation_of(asked)) is not None:
        session = await conversation(gateway, tenant_id, named, param="conversation")
        return Place(session, HEAD, session.id)
    return await place_after(gateway, tenant_id, asked.previous_response_id)


async def with_model(gateway: Gateway, place: Place, model: str | None) -> Place:
    """A conversation is begun without a model: its first response names it. Raises NotFound (model)."""
    session = place.session
    if session is None or place.conversation is None or model in (None, session.model):
        return place
    last = await gateway.store.last_turn(session.tenant_id, session.id)
    if not session.id.startswith(CONVERSATION) or not (last is None or last.metadata.get("added")):
        return place
    check_served(gateway, model)
    with suppress(VersionConflict):  # somebody else's response names it, or changes the metadata
        changes = SessionChanges({"model": model})
        changed = await gateway.store.update_session(session.tenant_id, session.id, session.version, changes)
        gateway.registry.heads.forget(session.tenant_id, session.id)
        return replace(place, session=changed or session)
    return place


async def place_after(gateway: Gateway, tenant_id: str, response_id: str | None) -> Place:
    """Raises as `place_of`."""
    if response_id is None:
        return Place()
    param, code = "previous_response_id", "previous_response_not_found"
    record, session = await response(gateway, tenant_id, response_id, code, param=param)
    turn = record.turn
    if turn.status == "in_progress":
        raise SessionBusy("the previous response is not complete yet", retry_after_s=1.0, param=param)
    if turn.status == "failed" or (turn.status == "incomplete" and not turn.output):
        raise BadRequest(
            "the previous response holds no answer to go on from",
            code="previous_response_unanswered",
            param=param,
        )
    return Place(session, turn.id, joins=session.origin == "responses")


async def response(
    gateway: Gateway, tenant_id: str, response_id: str, code: str = "response_not_found", *, param: str = "response_id"
) -> tuple[TurnRecord, SessionRecord]:
    """Raises NotFound."""
    turn_id = gateway.response_ids.turn_of(tenant_id, response_id)
    record = await gateway.store.find_turn(tenant_id, turn_id) if turn_id is not None else None
    session = await gateway.store.get_session(tenant_id, record.session_id) if record is not None else None
    if record is None or session is None or record.metadata.get(DELETED):
        raise NotFound(f"no response {response_id[:128]!r}", code=code, param=param)
    return record, session


async def conversation(gateway: Gateway, tenant_id: str, id: str, *, param: str = "conversation_id") -> SessionRecord:
    """Raises NotFound."""
    session = await gateway.store.get_session(tenant_id, id) if SESSION_KEY.fullmatch(id) else None
    if session is None:
        raise NotFound(f"no conversation {id[:128]!r}", code="conversation_not_found", param=param)
    return session
