"""A request for a response as the turn that will be its answer."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from fastapi import Request

from compression.budget import OnOverflow
from compression.conversation import Item
from gateway.api.asked import plain
from gateway.api.chat import idempotency_key_of
from gateway.api.responses.asked import (
    flat_tools,
    format_of,
    old_reasoning,
    response_shape,
    settings_of,
    tools_and_choice,
)
from gateway.api.responses.places import Place
from gateway.api.responses.schemas import ContextFields, ResponseCreate
from gateway.api.sessions import default_model
from gateway.api.state import Gateway
from gateway.api.stored import limited
from gateway.errors import BadRequest
from gateway.policy import min_bits_of
from gateway.sessions.command import Ask, Input, OnDisconnect, Shape, TurnCommand
from gateway.sessions.items import check_answerable
from gateway.sessions.terms import RESPONSE, system_of, tools_of
from gateway.store.records import HEAD, NewSession, SessionRecord
from gateway.tenancy import Identity

BESIDE_S = 60.0  # a branch beside a response that is being answered waits this long for it
OVERFLOW: dict[str, OnOverflow] = {"auto": "truncate", "disabled": "error"}


def ask_of(
    gateway: Gateway, asked: ContextFields, items: tuple[Item, ...], session: SessionRecord | None, shape: Shape
) -> Ask:
    """Raises BadRequest."""
    own = tools_of(session, ())
    tools, choice = tools_and_choice(asked, own if not flat_tools(asked) else ())
    policy = gateway.room.compactions.policy(session) if session is not None else None
    reasoning = old_reasoning(asked, policy.reasoning if policy is not None else "template")
    return Ask(
        model=asked.model or (session.model if session is not None else default_model(gateway)),
        input=tuple(Input(item) for item in items),
        system=system_of(session, asked.instructions),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=asked.parallel_tool_calls,
        response_format=format_of(asked),
        reasoning_effort=asked.reasoning.effort if asked.reasoning is not None else None,
        template_options=asked.chat_template_kwargs or {},
        old_reasoning=reasoning,
        kv_shift=policy.kv_shift if policy is not None else False,
        min_bits=min_bits_of({"cache": plain(asked.cache)}, session.policy if session is not None else None),
        shape=shape,
    )


def command_of(
    request: Request,
    gateway: Gateway,
    caller: Identity,
    asked: ResponseCreate,
    body: bytes,
    items: tuple[Item, ...],
    place: Place,
) -> TurnCommand:
    """Raises BadRequest."""
    check_answerable(items, param="input")
    session, saved, shape = place.session, asked.store is not False, response_shape(asked)
    key = idempotency_key_of(request) if saved else None
    command = TurnCommand(
        tenant_id=caller.tenant_id,
        key_id=caller.key_id,
        told=caller.told,
        user_ref=asked.user or asked.safety_identifier,
        ask=ask_of(gateway, asked, items, session, shape),
        saved=saved,
        idempotency_key=key,
        request_hash=hashlib.sha256(request.url.path.encode() + b"\0" + body).digest() if key is not None else None,
        on_disconnect=_on_disconnect(gateway, asked, saved=saved),
        persist_events=saved and bool(asked.stream or asked.background),
        on_overflow=OVERFLOW.get(asked.truncation or ""),
        compact_past=_compact_past(gateway, asked, session),
        metadata={RESPONSE: settings_of(asked, conversation=place.conversation)},
    )
    if session is not None:
        return replace(
            command,
            session_id=session.id,
            parent=place.parent,
            move_head=place.joins,
            waits_s=0.0 if place.parent == HEAD else BESIDE_S,
            version=session.version,
            ask_of=lambda session: ask_of(gateway, asked, items, session, shape),
        )
    if not saved:
        return command
    session_id = gateway.key_id_of(caller.tenant_id, key) if key is not None else gateway.new_id("sess")
    new = NewSession(session_id, caller.tenant_id, command.ask.model, user_ref=command.user_ref, origin="responses")
    return replace(command, session_id=session_id, create=limited(gateway, caller, new), parent=None)


def _on_disconnect(gateway: Gateway, asked: ResponseCreate, *, saved: bool) -> OnDisconnect:
    if asked.background:
        return "finish"
    default = gateway.settings.session_on_disconnect if saved else gateway.settings.chat_on_disconnect
    return asked.on_disconnect or default


def _compact_past(gateway: Gateway, asked: ResponseCreate, session: SessionRecord | None) -> int | None:
    if not asked.context_management:
        return None
    if session is not None and gateway.room.compactions.policy(session).strategy == "off":
        raise BadRequest("this conversation's policy turns compaction off", param="context_management")
    return asked.context_management[0].compact_threshold
