"""What a session would send: `context` and `count`, from the function that builds every prompt."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import asdict
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from compression.budget import Budget
from compression.segments import Segment
from compression.view import shown as shown_entries
from engines.contract import IdsPrompt
from gateway.api.access import needs
from gateway.api.body import json_object, validated
from gateway.api.describe import answers, body_of
from gateway.api.schemas import ContextShape, Count, CountShape
from gateway.api.sessions import json_response, session_of
from gateway.api.state import Gateway, gateway_of
from gateway.api.turns import inputs_of
from gateway.sessions.command import Ask, Input
from gateway.sessions.counting import estimate, text_of
from gateway.sessions.history import History, load
from gateway.sessions.homes import read_at_home
from gateway.sessions.items import message
from gateway.sessions.prepare import Prepared, prepare
from gateway.sessions.prompt import chat_messages
from gateway.sessions.shown import shown
from gateway.sessions.snapshot import standing_ask
from gateway.sessions.tokens import ModelTokens
from gateway.sessions.windows import window_of
from gateway.store.records import HEAD, SessionRecord
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/sessions", tags=["Context"])
Caller = Annotated[Identity, Depends(needs("sessions"))]
Reader = Annotated[Identity, Depends(needs("sessions", "read"))]


async def _prepared(gateway: Gateway, session: SessionRecord, ask: Ask, history: History) -> Prepared:
    """The prompt that `ask` would go out with; raises what the turn itself would raise."""
    return await prepare(
        ask,
        history,
        fleet=gateway.fleet,
        models=gateway.models,
        session_name=gateway.room.session_name(session.tenant_id, session.id),
        default_max_tokens=gateway.settings.max_output_tokens,
    )


def _ask(gateway: Gateway, session: SessionRecord, inputs: tuple[Input, ...], instructions: str | None = None) -> Ask:
    return Ask(
        model=session.model,
        input=inputs,
        system=session.system,
        old_reasoning=gateway.room.compactions.policy(session).reasoning,
        instructions=instructions,
        tools=tuple(dict(tool) for tool in session.tools),
    )


@router.get(
    "/{session_id}/context",
    summary="Exactly what would be sent",
    response_model=None,
    responses=answers(200, ContextShape, errors=(400, 404, 429)),
)
async def context(
    request: Request,
    caller: Reader,
    session_id: str,
    draft: Annotated[str, Query(max_length=4000, description="A user message to add; `count` takes longer ones.")] = "",
) -> Response:
    """The messages, tokens and prefix of the next prompt, from the function that sends it."""
    gateway = gateway_of(request)
    session = await session_of(gateway, caller, session_id)
    inputs = (Input(message("user", draft)),) if draft else ()
    ask = _ask(gateway, session, inputs)
    history = await load(gateway.store, session, HEAD)
    policy = gateway.room.compactions.policy(session)
    model = read_at_home(session.model, history, gateway.models)
    placement = model.placement if model is not None else "exchange"
    folded = await history.head.load_items(placement, policy.reasoning)
    told: dict[str, Any] = {
        "object": "session.context",
        "model": session.model,
        "pin": history.pin.replica if history.pin is not None else None,
        "prefix_bits": history.last.usage.get("prefix_bits") if history.last is not None else None,
    }
    messages = told["messages"] = chat_messages(ask, folded)
    if inputs:
        prepared = await _prepared(gateway, session, ask, history)
        told |= await _drafted(gateway, session, prepared)
    else:
        told |= await _standing(gateway, session, history)
    told |= await _view(gateway, session, history)
    told["policy"] = asdict(policy)
    told["parts"] = await asyncio.to_thread(_parts, model, messages, ask, told["prompt_tokens"])
    return json_response(told)


async def _view(gateway: Gateway, session: SessionRecord, history: History) -> dict[str, Any]:
    """What stands in the place of old turns, and which turns stay: of the view, no more than is sent."""
    view, pinned = history.view, history.standing.pinned
    told: dict[str, Any] = {"compaction_id": view.id, "segments": [], "elisions": [], "pinned": []}
    if history.head.turn_id is None or not (view.id or pinned):
        return told
    turns = [r.turn for r in await gateway.store.path(session.tenant_id, session.id, history.head.turn_id)]
    seqs = {turn.id: turn.seq for turn in turns}
    sent = shown_entries(turns, view, pinned)
    raw = {entry for entry in sent if isinstance(entry, str)}
    for segment in sent:
        if isinstance(segment, Segment):
            told["segments"].append(
                {
                    **segment.as_json(),
                    "turns": [seqs[id] for id in segment.turn_ids if id not in raw],
                    "turns_beside": [seqs[id] for id in segment.turn_ids if id in raw],
                }
            )
    cuts = [cut for cut in view.elisions if cut.turn_id in raw - pinned]
    told["elisions"] = [{**cut.as_json(), "turn": seqs[cut.turn_id]} for cut in cuts]
    told["pinned"] = sorted(seqs[turn_id] for turn_id in pinned if turn_id in seqs)
    return told


async def _standing(gateway: Gateway, session: SessionRecord, history: History) -> dict[str, Any]:
    """The path as it stands, with nothing new to send."""
    model = read_at_home(session.model, history, gateway.models)
    policy = gateway.room.compactions.policy(session)
    standing = await shown(model, standing_ask(session, policy), history)
    digest = hashlib.sha256(await standing.load_ids()).hexdigest() if standing.load_ids is not None else None
    report = await standing.load_report() if standing.load_report is not None else None
    window = window_of(session.model, gateway.fleet, gateway.models, history)
    reused = report.reused_tokens if report else 0
    told: dict[str, Any] = {
        "mode": "ids" if standing.model is not None else "chat",
        "prompt_sha256": digest,
        "prefix_report": asdict(report) if report is not None else {},
    }
    return _numbers(gateway, session, standing.tokens, window, reused) | told


async def _drafted(gateway: Gateway, session: SessionRecord, prepared: Prepared) -> dict[str, Any]:
    """The prompt that the draft would go out with."""
    built = prepared.built
    cacheable = built.base_tokens if built is not None else 0
    digest = None
    if isinstance(prepared.prompt, IdsPrompt):
        digest = hashlib.sha256(await prepared.prompt.whole()).hexdigest()
    report = dict(built.report) if built is not None else {}
    told = {"mode": prepared.mode, "prompt_sha256": digest, "prefix_report": report}
    return _numbers(gateway, session, prepared.prompt_tokens, prepared.window, cacheable) | told


def _parts(model: ModelTokens | None, messages: list[dict[str, Any]], ask: Ask, total: int) -> list[dict[str, Any]]:
    """Tokens of each part's own text; `template` is what the chat template puts around them."""

    def count(text: str) -> int:
        return model.count(text) if model is not None else estimate(text).tokens

    new = len(ask.input)
    split = [
        ("system", [m for m in messages if m["role"] == "system"][: 1 if ask.system is not None else 0]),
        ("history", messages[1 if ask.system is not None else 0 : len(messages) - new]),
        ("input", messages[len(messages) - new :] if new else []),
    ]
    tokens = {name: sum(count(text_of(m)) for m in found) for name, found in split}
    if ask.tools:
        tokens["tools"] = count(orjson.dumps(list(ask.tools)).decode())
    tokens["template"] = max(0, total - sum(tokens.values()))
    return [{"part": name, "tokens": n} for name, n in tokens.items()]


def _numbers(
    gateway: Gateway, session: SessionRecord, tokens: int, window: int | None, cacheable: int
) -> dict[str, Any]:
    ratio = gateway.room.compactions.policy(session).trigger_ratio
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
    responses=answers(200, CountShape, errors=(400, 404, 413, 415, 422, 429)),
    openapi_extra=body_of(Count),
)
async def count(request: Request, caller: Caller, session_id: str) -> Response:
    """Tokens of the prompt that this input would make, history included. Nothing is generated or saved."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings, images=True)
    asked = validated(Count, raw)
    session = await session_of(gateway, caller, session_id)
    ask = _ask(gateway, session, inputs_of(asked.input), asked.instructions)
    prepared = await _prepared(gateway, session, ask, await load(gateway.store, session, HEAD))
    return json_response(
        {
            "object": "input_tokens",
            "input_tokens": prepared.prompt_tokens,
            "window": prepared.window,
            "exact": prepared.built is not None,
            "counted_by": prepared.counted_by,
        }
    )
