"""`/v1/conversations`: a session as OpenAI's conversation, and its items: of the turns on the path to its head."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from compression.conversation import Item
from gateway.api import stored
from gateway.api.access import needs
from gateway.api.auditing import line_of
from gateway.api.body import json_object, validated
from gateway.api.describe import answers, body_of
from gateway.api.responses.ids import named_input, named_items, turn_of_item
from gateway.api.responses.inputs import read_items, sealed_reasoning
from gateway.api.responses.items import shown, shown_all
from gateway.api.responses.pages import After, Include, IncludePlain, Limit, Order, included, listed, no_item
from gateway.api.responses.places import conversation as found_conversation
from gateway.api.responses.schemas import (
    ConversationCreate,
    ConversationShape,
    ConversationUpdate,
    DeletedShape,
    ItemList,
    ItemsCreate,
    ItemShape,
)
from gateway.api.sessions import default_model, erased, json_response
from gateway.api.state import Gateway, gateway_of
from gateway.errors import BadRequest, NotFound
from gateway.sessions.added import add_items, check_sizes
from gateway.sessions.items import check_pairs
from gateway.store.records import NewSession, SessionChanges, SessionRecord, TurnRecord
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/conversations", tags=["OpenAI-compatible"])
Caller = Annotated[Identity, Depends(needs("sessions"))]
Reader = Annotated[Identity, Depends(needs("sessions", "read"))]
PAGE = 100  # turns that are read at a time


def _json(session: SessionRecord) -> dict[str, Any]:
    told = {"id": session.id, "object": "conversation", "created_at": int(session.created_at)}
    return {**told, "metadata": dict(session.metadata)}


@router.post(
    "",
    summary="Begin a conversation",
    response_model=None,
    responses=answers(200, ConversationShape, errors=(400, 404, 413, 415, 422)),
    openapi_extra=body_of(ConversationCreate, required=False),
)
async def create(request: Request, caller: Caller) -> Response:
    """With its first items, at most 20, which nothing answers."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings, images=True, empty=True)
    asked = validated(ConversationCreate, raw)
    items = await _items(gateway, caller, asked.items or [])
    model = default_model(gateway)
    check_pairs({}, items, param="items")
    check_sizes(gateway.room, model, items)
    new = NewSession(gateway.new_id("conv"), caller.tenant_id, model, metadata=asked.metadata or {})
    session = await stored.create(gateway, caller, new)
    if items:
        try:
            await add_items(gateway.room, session, items)
        except BaseException:
            await gateway.store.delete_session(caller.tenant_id, session.id)
            raise
    return json_response(_json(session))


async def _items(gateway: Gateway, caller: Identity, value: list[Any]) -> tuple[Item, ...]:
    return await read_items(gateway.store, gateway.content_seal, caller.tenant_id, value, param="items")


@router.get(
    "/{conversation_id}",
    summary="A conversation",
    response_model=None,
    responses=answers(200, ConversationShape, errors=(404,)),
)
async def get(request: Request, caller: Reader, conversation_id: str) -> Response:
    return json_response(_json(await found_conversation(gateway_of(request), caller.tenant_id, conversation_id)))


@router.post(
    "/{conversation_id}",
    summary="Change a conversation's metadata",
    response_model=None,
    responses=answers(200, ConversationShape, errors=(400, 404, 413, 415)),
    openapi_extra=body_of(ConversationUpdate),
)
async def update(request: Request, caller: Caller, conversation_id: str) -> Response:
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings)
    asked = validated(ConversationUpdate, raw)
    session = await found_conversation(gateway, caller.tenant_id, conversation_id)
    change = SessionChanges({"metadata": asked.metadata or {}})
    changed = await gateway.store.update_session(caller.tenant_id, session.id, None, change)
    gateway.registry.heads.forget(caller.tenant_id, session.id)
    return json_response(_json(changed or await found_conversation(gateway, caller.tenant_id, conversation_id)))


@router.delete(
    "/{conversation_id}",
    summary="Erase a conversation with its items, here and in the engines",
    response_model=None,
    responses=answers(200, DeletedShape, errors=(404,)),
)
async def delete(request: Request, caller: Caller, conversation_id: str) -> Response:
    """Its responses go with it: their words are here and nowhere else."""
    gateway = gateway_of(request)
    session = await found_conversation(gateway, caller.tenant_id, conversation_id)
    line = line_of(request, caller, "session.delete", session.id)
    receipt = await erased(gateway, caller.tenant_id, session.id, line)
    told = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
    shown = {name: receipt[name] for name in ("erased", "erasure", "status")} if receipt is not None else {"erased": {}}
    return json_response({**told, **shown})


@router.post(
    "/{conversation_id}/items",
    summary="Add items that nothing answers",
    response_model=None,
    responses=answers(200, ItemList, errors=(400, 404, 409, 413, 415, 422)),
    openapi_extra=body_of(ItemsCreate),
)
async def create_items(
    request: Request,
    caller: Caller,
    conversation_id: str,
    include: Include = None,
    include_: IncludePlain = None,
) -> Response:
    """At most 20 at once, in one turn that no model sees before the next response does."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings, images=True)
    asked = validated(ItemsCreate, raw)
    included(include, include_)
    session = await found_conversation(gateway, caller.tenant_id, conversation_id)
    await gateway.room.gate.check_stored(caller.tenant_id, caller.key_id)
    turn_id = await add_items(gateway.room, session, await _items(gateway, caller, asked.items))
    record = await gateway.store.get_turn(caller.tenant_id, session.id, turn_id)
    if record is None:
        raise NotFound("the conversation was deleted meanwhile", code="conversation_not_found")
    return json_response(listed(shown_all(named_input(record.turn)), has_more=False))


@router.get(
    "/{conversation_id}/items",
    summary="A conversation's items",
    response_model=None,
    responses=answers(200, ItemList, errors=(400, 404)),
)
async def list_items(
    request: Request,
    caller: Reader,
    conversation_id: str,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
    include: Include = None,
    include_: IncludePlain = None,
) -> Response:
    """Of the path to its head: those of a response that runs, failed, or is on another branch are none of it."""
    gateway = gateway_of(request)
    wanted = included(include, include_)
    session = await found_conversation(gateway, caller.tenant_id, conversation_id)
    found: list[dict[str, Any]] = []
    turn, skipping = await _turn_of(gateway, session, after) if after is not None else None, after is not None
    seq = None
    if turn is not None:  # from this turn on, itself included
        seq = turn.turn.seq - 1 if order == "asc" else turn.turn.seq + 1
    while len(found) <= limit and session.head_turn_id is not None:
        records = await gateway.store.list_turns(
            session.tenant_id,
            session.id,
            after=seq if order == "asc" else None,
            before=seq if order == "desc" else None,
            order=order,
            limit=min(PAGE, limit + 2),
            path_of=session.head_turn_id,
        )
        if not records:
            break
        for record in records:
            named = named_items(record.turn)
            for item_id, item in named if order == "asc" else reversed(named):
                if not skipping:
                    found.append(_shown(gateway, caller, item_id, item, wanted))
                skipping = skipping and item_id != after
        seq = records[-1].turn.seq
    return json_response(listed(found[:limit], has_more=len(found) > limit))


def _shown(gateway: Gateway, caller: Identity, item_id: str, item: Item, wanted: frozenset[str]) -> dict[str, Any]:
    told = shown(item_id, item)
    if item.type == "reasoning" and "reasoning.encrypted_content" in wanted:
        told["encrypted_content"] = sealed_reasoning(gateway.content_seal, caller.tenant_id, told)
    return told


async def _turn_of(gateway: Gateway, session: SessionRecord, item_id: str, *, param: str = "after") -> TurnRecord:
    """The turn on the path to the head that holds the item. Raises NotFound."""
    turn_id = turn_of_item(item_id)
    record = await gateway.store.get_turn(session.tenant_id, session.id, turn_id) if turn_id is not None else None
    if record is None or session.head_turn_id is None or item_id not in dict(named_items(record.turn)):
        raise no_item(item_id, param=param)
    seq = record.turn.seq
    on_path = await gateway.store.list_turns(
        session.tenant_id, session.id, after=seq - 1, before=seq + 1, limit=1, path_of=session.head_turn_id
    )
    if not on_path:
        raise no_item(item_id, param=param)
    return record


@router.get(
    "/{conversation_id}/items/{item_id}",
    summary="One item",
    response_model=None,
    responses=answers(200, ItemShape, errors=(400, 404)),
)
async def get_item(
    request: Request,
    caller: Reader,
    conversation_id: str,
    item_id: str,
    include: Include = None,
    include_: IncludePlain = None,
) -> Response:
    gateway = gateway_of(request)
    wanted = included(include, include_)
    session = await found_conversation(gateway, caller.tenant_id, conversation_id)
    record = await _turn_of(gateway, session, item_id, param="item_id")
    return json_response(_shown(gateway, caller, item_id, dict(named_items(record.turn))[item_id], wanted))


@router.delete(
    "/{conversation_id}/items/{item_id}",
    summary="Refused: items are parts of turns, which do not change",
    response_model=None,
    responses=answers(200, ConversationShape, errors=(400, 404)),
)
async def delete_item(request: Request, caller: Caller, conversation_id: str, item_id: str) -> Response:
    """What later turns, their token ids and their caches were made of stays as it was. Delete the conversation, or go
    on in another one with the items that shall stay."""
    gateway = gateway_of(request)
    session = await found_conversation(gateway, caller.tenant_id, conversation_id)
    await _turn_of(gateway, session, item_id, param="item_id")
    raise BadRequest(
        "an item of a conversation cannot be deleted by itself: delete the conversation, or begin another one with the "
        "items that shall stay",
        code="items_are_immutable",
        param="item_id",
    )
