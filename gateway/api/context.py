"""What a session would send: `context` and `count`, from the function that builds every prompt."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from compression.budget import Budget
from engines.contract import IdsPrompt
from gateway.api.access import needs
from gateway.api.body import json_object, validated
from gateway.api.describe import answers, body_of
from gateway.api.schemas import ContextShape, Count, CountShape
from gateway.api.sessions import json_response, session_of
from gateway.api.state import Gateway, gateway_of
from gateway.api.turns import inputs_of
from gateway.sessions.command import Ask, Input
from gateway.sessions.history import load
from gateway.sessions.items import message
from gateway.sessions.prepare import Prepared, prepare
from gateway.sessions.prompt import chat_messages
from gateway.store.records import HEAD, SessionRecord
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/sessions", tags=["Context"])
Caller = Annotated[Identity, Depends(needs("sessions"))]


async def _prepared(gateway: Gateway, session: SessionRecord, ask: Ask) -> Prepared:
    """The prompt that `ask` would go out with; raises what the turn itself would raise."""
    return await prepare(
        ask,
        await load(gateway.store, session, HEAD),
        fleet=gateway.fleet,
        models=gateway.models,
        session_name=gateway.room.session_name(session.tenant_id, session.id),
        default_max_tokens=gateway.settings.max_output_tokens,
    )


def _ask(session: SessionRecord, inputs: tuple[Input, ...], instructions: str | None = None) -> Ask:
    return Ask(
        model=session.model,
        input=inputs,
        system=session.system,
        instructions=instructions,
        tools=tuple(dict(tool) for tool in session.tools),
    )


@router.get(
    "/{session_id}/context",
    summary="Exactly what would be sent",
    response_model=None,
    responses=answers(200, ContextShape, errors=(400, 404)),
)
async def context(
    request: Request,
    caller: Caller,
    session_id: str,
    draft: Annotated[str, Query(max_length=4000, description="A user message to add; `count` takes longer ones.")] = "",
) -> Response:
    """The messages, tokens and prefix of the next prompt, from the function that sends it."""
    gateway = gateway_of(request)
    session = await session_of(gateway, caller, session_id)
    inputs = (Input(message("user", draft)),) if draft else ()
    ask = _ask(session, inputs)
    history = await load(gateway.store, session, HEAD)
    items = tuple(await history.head.load_items())
    told: dict[str, Any] = {
        "object": "session.context",
        "model": session.model,
        "pin": history.pin.replica if history.pin is not None else None,
    }
    told["messages"] = chat_messages(ask, items)
    if not items and not inputs:
        return json_response(told | _history_only(gateway, session, 0))
    if not inputs:
        return json_response(told | _history_only(gateway, session, history.used_tokens))
    prepared = await _prepared(gateway, session, ask)
    return json_response(told | await _full(gateway, session, prepared, history.used_tokens))


def _history_only(gateway: Gateway, session: SessionRecord, tokens: int) -> dict[str, Any]:
    model = gateway.models.tokens(session.model)
    window = model.window if model is not None else None
    mode = "ids" if model is not None else "chat"
    parts = [{"part": "history", "tokens": tokens}]
    return _numbers(gateway, session, tokens, window, tokens) | {
        "mode": mode,
        "prompt_sha256": None,
        "parts": parts,
        "prefix_report": {},
    }


async def _full(gateway: Gateway, session: SessionRecord, prepared: Prepared, used: int) -> dict[str, Any]:
    built = prepared.built
    cacheable = built.base_tokens if built is not None else 0
    digest = None
    if isinstance(prepared.prompt, IdsPrompt):
        digest = hashlib.sha256(await prepared.prompt.whole()).hexdigest()
    parts = [
        {"part": "history", "tokens": min(used, prepared.prompt_tokens)},
        {"part": "input", "tokens": max(0, prepared.prompt_tokens - used)},
    ]
    return _numbers(gateway, session, prepared.prompt_tokens, prepared.window, cacheable) | {
        "mode": prepared.mode,
        "prompt_sha256": digest,
        "parts": parts,
        "prefix_report": dict(built.report) if built is not None else {},
    }


def _numbers(
    gateway: Gateway, session: SessionRecord, tokens: int, window: int | None, cacheable: int
) -> dict[str, Any]:
    ratio = float(session.policy.get("trigger_ratio") or gateway.settings.trigger_ratio)
    reserve = int(session.policy.get("max_output_tokens") or gateway.settings.max_output_tokens)
    told: dict[str, Any] = {
        "prompt_tokens": tokens,
        "window": window,
        "used_ratio": None,
        "headroom_tokens": None,
        "trigger_ratio": ratio,
        "past_trigger": False,
        "cacheable_tokens": cacheable,
    }
    if window is not None:
        budget = Budget(window, tokens, min(reserve, window // 4), ratio)
        told |= {
            "used_ratio": round(budget.used_ratio, 4),
            "headroom_tokens": budget.headroom_tokens,
            "past_trigger": budget.past_trigger,
        }
    return told


@router.post(
    "/{session_id}/count",
    summary="Count a draft with the model's own tokenizer and template",
    response_model=None,
    responses=answers(200, CountShape, errors=(400, 404, 413, 415, 422)),
    openapi_extra=body_of(Count),
)
async def count(request: Request, caller: Caller, session_id: str) -> Response:
    """Tokens of the prompt that this input would make, history included. Nothing is generated or saved."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings, images=True)
    asked = validated(Count, raw)
    session = await session_of(gateway, caller, session_id)
    prepared = await _prepared(gateway, session, _ask(session, inputs_of(asked.input), asked.instructions))
    return json_response(
        {
            "object": "input_tokens",
            "input_tokens": prepared.prompt_tokens,
            "window": prepared.window,
            "exact": prepared.built is not None,
            "counted_by": prepared.counted_by,
        }
    )
