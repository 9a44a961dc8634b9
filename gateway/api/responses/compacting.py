"""`/v1/responses/compact`: a conversation as a shorter input that says the same, for clients that keep it themselves.

Nothing is saved: the summary is sealed into an item that the client carries. A conversation that is kept here is
compacted by itself, or by `/v1/sessions/{session_id}/compact`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from compression.conversation import Item, Turn
from compression.segments import HEADING
from compression.summarize import standalone, write_segment
from gateway.api.access import needs
from gateway.api.body import json_object, validated
from gateway.api.describe import answers, body_of
from gateway.api.responses.asked import refuse_undone
from gateway.api.responses.inputs import COMPACTION, read_items
from gateway.api.responses.items import shown
from gateway.api.responses.places import place_after
from gateway.api.responses.schemas import CompactedShape, CompactWindow
from gateway.api.responses.shapes import Standing, usage_json
from gateway.api.sessions import check_served, default_model, json_response
from gateway.api.state import Gateway, gateway_of
from gateway.api.streams import Awaited
from gateway.errors import BadRequest, Forbidden, GatewayError, QueueRefused, RateLimited
from gateway.sessions.command import Ask, Input, Shape, TurnCommand
from gateway.sessions.history import load
from gateway.sessions.items import message, split_system
from gateway.sessions.run import TurnEnded
from gateway.sessions.sizing import counter
from gateway.sessions.turn import start
from gateway.sessions.windows import window_of
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/responses", tags=["OpenAI-compatible"])
Caller = Annotated[Identity, Depends(needs("chat"))]
TOKENS_PER_TURN, LEAST_TOKENS = 40, 120  # of the summary, for each exchange; at least
SUMMARY_SHARE, SOURCE_SHARE = 8, 2  # a summary takes at most this part of the window; what is quoted of its turns
DEFAULT_WINDOW = 8192  # where nobody knows it


@router.post(
    "/compact",
    summary="Make a conversation shorter",
    response_model=None,
    responses=answers(200, CompactedShape, errors=(400, 404, 409, 413, 415, 422, 429)),
    openapi_extra=body_of(CompactWindow),
)
async def compact(request: Request, caller: Caller) -> Response:
    """The user's messages as they are, and one item that stands for the rest; give both with the next input. The model
    writes the summary, and it is checked; where it cannot, statements are extracted."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings, images=True)
    refuse_undone(raw)
    asked = validated(CompactWindow, raw)
    check_served(gateway, asked.model)
    items = await _items(gateway, caller.tenant_id, asked)
    if not items:
        raise BadRequest("there is nothing to compact: give input or previous_response_id", param="input")
    model = asked.model or default_model(gateway)

    async def answer() -> Response:
        return json_response(await _compacted(gateway, caller, model, items))

    return Awaited(answer)


async def _items(gateway: Gateway, tenant_id: str, asked: CompactWindow) -> list[Item]:
    before: list[Item] = []
    place = await place_after(gateway, tenant_id, asked.previous_response_id)
    if place.session is not None:
        history = await load(gateway.store, place.session, place.parent)
        before = list((await history.head.load_items("exchange", "template")).items)
    new = asked.input if asked.input is not None else []
    return [*before, *await read_items(gateway.store, gateway.content_seal, tenant_id, new, param="input")]


async def _compacted(gateway: Gateway, caller: Identity, model: str, items: Sequence[Item]) -> dict[str, Any]:
    turns = exchanges(split_system(items)[1])
    window = window_of(model, gateway.fleet, gateway.models) or DEFAULT_WINDOW
    budget = max(LEAST_TOKENS, min(TOKENS_PER_TURN * len(turns), window // SUMMARY_SHARE))
    count = counter(gateway.models.tokens(model))
    quoted = await asyncio.to_thread(
        standalone, turns, budget_tokens=budget, source_tokens=window // SOURCE_SHARE, count=count
    )
    ended = await _asked(gateway, caller, model, quoted, budget)
    text = "".join(item.text for item in ended.output if item.type == "message") if ended is not None else None
    finished = ended is not None and ended.finish_reason == "stop"
    written = await asyncio.to_thread(write_segment, text, turns, budget_tokens=budget, count=count, finished=finished)
    made, now = gateway.new_id("cmp"), gateway.clock()
    sealed = gateway.content_seal.seal(caller.tenant_id, COMPACTION, {"text": written.text, "turns": len(turns)})
    kept = [shown(f"{made}_{n}", item) for n, item in enumerate(items) if _stays(item)]
    usage = usage_json(Standing(made, made, None, model, now, usage=ended.usage if ended is not None else {}))
    return {
        "id": f"resp_{made.removeprefix('cmp_')}",
        "object": "response.compaction",
        "created_at": int(now),
        "output": [*kept, {"id": made, "type": "compaction", "encrypted_content": sealed}],
        "usage": usage,
        "turnkeep": {"source": written.source, "summary_tokens": count(written.text), "turns": len(turns)},
    }


def _stays(item: Item) -> bool:
    """What the user and the system say stays as it is; an earlier summary goes into the new one."""
    return item.type == "message" and item.role != "assistant" and not item.text.startswith(HEADING)


def exchanges(items: Sequence[Item]) -> list[Turn]:
    """Items as turns: each begins with what comes after an answer, at a message that is not the assistant's."""
    turns: list[list[Item]] = []
    answered = True
    for item in items:
        asks = item.type == "message" and item.role != "assistant"
        if (answered and asks) or not turns:
            turns.append([])
        turns[-1].append(item)
        answered = not asks
    return [Turn(f"t{n}", None, n, "completed", tuple(found)) for n, found in enumerate(turns)]


async def _asked(
    gateway: Gateway, caller: Identity, model: str, messages: Sequence[Mapping[str, str]], budget: int
) -> TurnEnded | None:
    """What the model says; None where it cannot be asked, and statements are extracted instead."""
    ask = Ask(
        model,
        (Input(message("user", messages[1]["content"])),),
        system=messages[0]["content"],
        shape=Shape(max_tokens=budget + budget // 4, temperature=0.0),
    )
    command = TurnCommand(caller.tenant_id, ask, caller.key_id, told=caller.told, on_disconnect="cancel")
    try:
        run = await start(gateway.room, command)
        with run.reading():
            ended = await run.wait_end()
    except GatewayError as error:
        if isinstance(error, RateLimited | Forbidden) and not isinstance(error, QueueRefused):
            raise  # a limit of who asks
        return None
    return ended if ended.status == "completed" else None
