"""`/v1/chat/completions` and `/v1/models`, as OpenAI's clients speak them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.asked import chat_shape, choice_of, format_of, refuse_unsupported, tools_of
from gateway.api.body import json_object, validated
from gateway.api.describe import answers, body_of
from gateway.api.schemas import ChatAnswer, ChatBody, ModelList
from gateway.api.state import Gateway, gateway_of
from gateway.api.stored import limited
from gateway.api.streams import Awaited, EventStream, event
from gateway.errors import BadRequest, UpstreamFailed
from gateway.policy import min_bits_of
from gateway.sessions.command import Ask, Input, TurnCommand
from gateway.sessions.events import logprob_json
from gateway.sessions.failures import as_event
from gateway.sessions.items import check_answerable, items_from_messages, split_system
from gateway.sessions.recognise import chain_to, find_chain, history_mode, is_side_task, session_key
from gateway.sessions.run import Piece, TurnEnded, TurnRun
from gateway.sessions.turn import start
from gateway.sessions.unsaved import kept_if_possible
from gateway.sessions.windows import window_of
from gateway.settings import HistoryMode
from gateway.store.records import HEAD, NewSession, SessionRecord
from gateway.tenancy import Identity

router = APIRouter(tags=["OpenAI-compatible"])
Caller = Annotated[Identity, Depends(needs("chat"))]
Reader = Annotated[Identity, Depends(needs("chat", "read"))]

# OpenAI's list has no word for a turn that was stopped; `turnkeep.status` says so.
FINISH: dict[str | None, str] = {"cancelled": "stop", "error": "stop", None: "stop"}


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    response_model=None,
    responses=answers(200, ChatAnswer, streams=True, errors=(400, 404, 409, 413, 415, 422, 429, 502, 503, 504)),
    openapi_extra=body_of(ChatBody),
)
async def chat_completions(request: Request, caller: Caller) -> Response:
    gateway = gateway_of(request)
    body, raw = await json_object(request, gateway.settings, images=True)
    asked = validated(ChatBody, raw)
    refuse_unsupported(raw)
    command = await command_of(request, gateway, caller, raw, asked, body)
    created = int(gateway.clock())
    if asked.stream:
        include_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        headers: dict[str, str] = {}
        source = _stream(gateway, command, asked.model, created, include_usage, headers)
        return EventStream(source, heartbeat_s=gateway.settings.heartbeat_s, headers=headers)

    async def answer() -> Response:
        run = await start(gateway.room, command)
        ended = await end_of(run)
        return Response(
            orjson.dumps(_completion(run, ended, created, asked.model)),
            media_type="application/json",
            headers=headers_of(run),
        )

    return Awaited(answer)


async def end_of(run: TurnRun) -> TurnEnded:
    """The terminal event, as a reader; a failed turn raises what it failed with."""
    with run.reading():
        ended = await run.wait_end()
    error = ended.error or {}
    if ended.status == "failed" or error.get("partial"):
        raise run.failure or UpstreamFailed(
            str(error.get("message", "the turn failed")), code=str(error.get("code", "turn_failed"))
        )
    return ended


async def command_of(
    request: Request, gateway: Gateway, caller: Identity, raw: dict[str, Any], asked: ChatBody, body: bytes
) -> TurnCommand:
    system, items = split_system(items_from_messages(asked.messages))
    if not items:
        raise BadRequest("messages holds nothing but a system message", param="messages")
    check_answerable(items, param="messages")
    tools = tools_of(asked.tools)
    ask = Ask(
        model=asked.model,
        input=tuple(Input(item) for item in items),
        system=system,
        tools=tools,
        tool_choice=choice_of(asked, tools),
        parallel_tool_calls=asked.parallel_tool_calls,
        response_format=format_of(asked),
        reasoning_effort=asked.reasoning_effort,
        template_options=asked.chat_template_kwargs or {},
        shape=chat_shape(asked),
    )
    key = session_key(request.headers, raw)
    mode = history_mode(
        _wish(request, gateway, asked),
        key=key,
        items=items,
        store=asked.store is not False,
        side_task=is_side_task(raw, items),
    )
    idempotency_key = idempotency_key_of(request)
    command = TurnCommand(
        tenant_id=caller.tenant_id,
        ask=ask,
        key_id=caller.key_id,
        told=caller.told,
        user_ref=asked.user,
        on_disconnect=_on_disconnect(request, gateway, asked, keyed=mode in ("append", "replace")),
        idempotency_key=idempotency_key,
        request_hash=hashlib.sha256(body).digest() if idempotency_key is not None else None,
        metadata={"history": mode},
        param="messages",
    )
    if mode == "off":
        return replace(command, idempotency_key=None)
    if mode != "append":
        command = replace(command, whole=ask)
    if mode == "match":
        return await kept_if_possible(gateway.room, command, lambda: _matched(gateway, caller, command))
    assert key is not None
    return await kept_if_possible(gateway.room, command, lambda: _keyed(gateway, caller, command, key, mode))


def _wish(request: Request, gateway: Gateway, asked: ChatBody) -> str:
    header = request.headers.get("x-turnkeep-history")
    if header is not None and header not in get_args(HistoryMode):
        raise BadRequest("X-Turnkeep-History is auto, off, match, append or replace", param="X-Turnkeep-History")
    return header or asked.history or gateway.settings.history_mode


def _on_disconnect(request: Request, gateway: Gateway, asked: ChatBody, *, keyed: bool) -> Any:
    wish = request.headers.get("x-turnkeep-on-disconnect") or asked.on_disconnect
    if wish is None:
        return gateway.settings.session_on_disconnect if keyed else gateway.settings.chat_on_disconnect
    if wish not in ("cancel", "finish"):
        raise BadRequest("X-Turnkeep-On-Disconnect is cancel or finish", param="X-Turnkeep-On-Disconnect")
    return wish


def idempotency_key_of(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 1 <= len(key) <= 255 or not key.isascii() or not key.isprintable():
        raise BadRequest("an Idempotency-Key is 1 to 255 printable ASCII characters", param="Idempotency-Key")
    return key


async def _matched(gateway: Gateway, caller: Identity, command: TurnCommand) -> TurnCommand:
    ask, tenant, user_ref = command.ask, command.tenant_id, command.user_ref
    items = ask.kept
    chain = await find_chain(gateway.store, tenant, user_ref, ask.system, items)
    if chain is not None:
        return replace(
            command,
            ask=replace(ask, input=ask.input[chain.length :]),
            session_id=chain.session_id,
            parent=chain.turn_id,
            busy_is_stateless=True,
            move_head=chain.origin_matched,
        )
    key = command.idempotency_key
    session_id = gateway.key_id_of(tenant, key) if key is not None else gateway.new_id("sess")
    new = limited(gateway, caller, _new_session(session_id, command, "matched"))
    return replace(command, session_id=session_id, create=new, busy_is_stateless=key is None)


async def _keyed(gateway: Gateway, caller: Identity, command: TurnCommand, key: str, mode: str) -> TurnCommand:
    ask, tenant = command.ask, command.tenant_id
    known = gateway.registry.heads.get(tenant, key)
    session = known.session if known is not None else await gateway.store.get_session(tenant, key)
    keyed = replace(
        command,
        session_id=key,
        create=limited(gateway, caller, _new_session(key, command, "chat")),
        again=lambda: _keyed(gateway, caller, command, key, mode),
    )
    if session is None:
        return keyed
    if mode == "append":

        def ask_of(session: SessionRecord) -> Ask:
            system = ask.system if ask.system is not None else session.system
            tools = ask.tools or tuple(dict(tool) for tool in session.tools)
            policy = gateway.room.compactions.policy(session)
            return replace(
                ask,
                system=system,
                tools=tools,
                old_reasoning=policy.reasoning,
                kv_shift=policy.kv_shift,
                min_bits=min_bits_of(session.policy),
            )

        return replace(keyed, ask=ask_of(session), version=session.version, ask_of=ask_of)
    chain = chain_to(known.last, ask.system, ask.kept) if known is not None else None
    if chain is None:
        chain = await find_chain(gateway.store, tenant, session.user_ref, ask.system, ask.kept, session_id=key)
    if chain is None:
        return replace(keyed, parent=None)
    parent = HEAD if chain.turn_id == session.head_turn_id else chain.turn_id
    follows = chain.turn_id if parent == HEAD else None
    ask = replace(ask, input=ask.input[chain.length :], min_bits=min_bits_of(session.policy))
    return replace(keyed, ask=ask, parent=parent, follows=follows)


def _new_session(session_id: str, command: TurnCommand, origin: Any) -> NewSession:
    ask, user_ref = command.ask, command.user_ref
    return NewSession(session_id, command.tenant_id, ask.model, ask.system, ask.tools, user_ref=user_ref, origin=origin)


def headers_of(run: TurnRun) -> dict[str, str]:
    headers = {"x-turnkeep-turn": run.turn_id}
    if run.session_id is not None:
        headers["x-turnkeep-session"] = run.session_id
    if run.unsaved is not None:
        headers["x-turnkeep-unsaved"] = run.unsaved
    return headers


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    prompt, output = usage.get("prompt_tokens") or 0, usage.get("output_tokens") or 0
    cached = usage.get("cached_tokens")
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached is not None else {}
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output, **details}


def turnkeep_of(ended: TurnEnded) -> dict[str, Any]:
    told = {"session_id": ended.session_id, "turn_id": ended.turn_id, "seq": ended.seq, "status": ended.status}
    return {**told, **ended.metadata, **({"error": ended.error} if ended.error else {})}


def _completion(run: TurnRun, ended: TurnEnded, created: int, model: str) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "message": _message(ended), "logprobs": _logprobs(run)}
    choice["finish_reason"] = FINISH.get(ended.finish_reason, ended.finish_reason)
    return {
        "id": f"chatcmpl-{ended.turn_id}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": _usage(ended.usage),
        "turnkeep": turnkeep_of(ended),
    }


def _message(ended: TurnEnded) -> dict[str, Any]:
    text = "".join(i.text for i in ended.output if i.type == "message")
    calls = [
        {
            "id": i.payload["call_id"],
            "type": "function",
            "function": {"name": i.payload["name"], "arguments": i.payload["arguments"]},
        }
        for i in ended.output
        if i.type == "function_call"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    thought = "".join(i.text for i in ended.output if i.type == "reasoning")
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _logprobs(run: TurnRun) -> dict[str, Any] | None:
    found = [logprob_json(p) for e in run.events if isinstance(e, Piece) for p in e.logprobs]
    return {"content": found, "refusal": None} if found else None


@dataclass(slots=True)
class _Chunks:
    """Encodes a stream's chunks; a plain text chunk is two joins and one dumps."""

    id: str
    created: int
    model: str
    head: bytes = b""
    text: bytes = b""  # of a chunk that is nothing but content, up to it

    def __post_init__(self) -> None:
        frame = {"id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model}
        self.head = b"data: " + orjson.dumps(frame)[:-1] + b',"choices":[{"index":0,"delta":'
        self.text = self.head + b'{"content":'

    def piece(self, piece: Piece) -> bytes:
        if piece.kind == "content" and not piece.logprobs:
            return self.text + orjson.dumps(piece.text) + b'},"logprobs":null,"finish_reason":null}]}\n\n'
        if piece.kind == "content":
            delta = b'{"content":' + orjson.dumps(piece.text) + b"}"
        elif piece.kind == "reasoning":
            delta = b'{"reasoning_content":' + orjson.dumps(piece.text) + b"}"
        else:
            delta = orjson.dumps({"tool_calls": [_call_delta(piece)]})
        logprobs = b"null"
        if piece.logprobs:
            logprobs = orjson.dumps({"content": [logprob_json(p) for p in piece.logprobs], "refusal": None})
        return self.head + delta + b',"logprobs":' + logprobs + b',"finish_reason":null}]}\n\n'

    def first(self) -> bytes:
        return self.head + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'

    def last(self, ended: TurnEnded, *, include_usage: bool) -> bytes:
        reason = orjson.dumps(FINISH.get(ended.finish_reason, ended.finish_reason))
        tail = b',"turnkeep":' + orjson.dumps(turnkeep_of(ended)) + b"}\n\n"
        out = self.head + b'{},"logprobs":null,"finish_reason":' + reason + b"}]" + tail
        if include_usage:
            frame = self.head[: self.head.index(b',"choices":')]
            out += frame + b',"choices":[],"usage":' + orjson.dumps(_usage(ended.usage)) + b"}\n\n"
        return out


def _call_delta(piece: Piece) -> dict[str, Any]:
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.text}}
    function = {"name": piece.name, "arguments": piece.text}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


async def _stream(
    gateway: Gateway, command: TurnCommand, model: str, created: int, include_usage: bool, headers: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    """What has happened since the last value, encoded; the end comes in one value with what is ready before it."""
    run = await start(gateway.room, command)
    headers |= headers_of(run)
    chunks = _Chunks(f"chatcmpl-{run.turn_id}", created, model)
    seen, begun = 0, False
    with run.reading():
        while True:
            await run.wait_beyond(seen)
            told = [chunks.piece(happened) for happened in run.events[seen:] if isinstance(happened, Piece)]
            seen = len(run.events)
            if told and not begun:
                told[0], begun = chunks.first() + told[0], True
            if run.ended is not None or run.moved:
                break
            if told:
                yield told[0] if len(told) == 1 else b"".join(told)
    if run.ended is None:
        if not begun:
            raise run.handed_over()
        told.append(event(orjson.dumps({"error": as_event(run.handed_over())})))
    elif run.ended.status == "failed" or (run.ended.error or {}).get("partial"):
        if not begun and run.failure is not None:
            raise run.failure
        told.append(event(orjson.dumps({"error": run.ended.error})))
    else:
        told.append((b"" if begun else chunks.first()) + chunks.last(run.ended, include_usage=include_usage))
    yield b"".join(told) + b"data: [DONE]\n\n"


@router.get(
    "/v1/models",
    summary="The models that are served",
    response_model=None,
    responses=answers(200, ModelList, errors=()),
)
async def models(request: Request, caller: Reader) -> Response:
    gateway = gateway_of(request)
    data = [
        {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "turnkeep",
            "max_model_len": window_of(name, gateway.fleet, gateway.models),
        }
        for name in gateway.fleet.models
    ]
    return Response(orjson.dumps({"object": "list", "data": data}), media_type="application/json")
