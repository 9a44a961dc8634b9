"""`/v1/completions`, `/v1/embeddings`, `/v1/rerank`: passed on to a replica that answers them; nothing is kept."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.body import json_object, validated
from gateway.api.completion_ids import by_ids
from gateway.api.describe import answers, body_of
from gateway.api.problems import request_id_of
from gateway.api.state import Gateway, gateway_of
from gateway.api.stateless import Job, about, answered, used_in
from gateway.api.stateless_schemas import CompletionBody, EmbeddingsBody, Forwarded, RerankBody, Stateless
from gateway.api.streams import Awaited, EventStream, event
from gateway.errors import GatewayError, UpstreamFailed
from gateway.metrics import Metrics
from gateway.sessions.failures import as_event
from gateway.store.usage_records import Account, Amount, day_of
from gateway.tenancy import Identity

router = APIRouter(tags=["OpenAI-compatible"])
Caller = Annotated[Identity, Depends(needs("chat"))]
ERRORS = (400, 404, 408, 413, 415, 429, 502, 503, 504)
DONE = b"data: [DONE]\n\n"


@router.post(
    "/v1/completions",
    summary="Continue a text",
    response_model=None,
    responses=answers(200, Forwarded, streams=True, errors=ERRORS),
    openapi_extra=body_of(CompletionBody),
)
async def completions(request: Request, caller: Caller) -> Response:
    gateway = gateway_of(request)
    asked = validated(CompletionBody, (await json_object(request, gateway.settings))[1])
    job = _job(request, caller, asked, "prompt", by_ids(asked, request_id_of(request), gateway.clock))
    if not job.stream:
        return Awaited(lambda: _whole(request, gateway, job))
    return EventStream(_stream(request, gateway, job), heartbeat_s=gateway.settings.heartbeat_s)


@router.post(
    "/v1/embeddings",
    summary="Texts as vectors",
    response_model=None,
    responses=answers(200, Forwarded, errors=ERRORS),
    openapi_extra=body_of(EmbeddingsBody),
)
async def embeddings(request: Request, caller: Caller) -> Response:
    gateway = gateway_of(request)
    asked = validated(EmbeddingsBody, (await json_object(request, gateway.settings))[1])
    return Awaited(lambda: _whole(request, gateway, _job(request, caller, asked, "input")))


@router.post(
    "/v1/rerank",
    summary="Documents by how well they answer a query",
    response_model=None,
    responses=answers(200, Forwarded, errors=ERRORS),
    openapi_extra=body_of(RerankBody),
)
async def rerank(request: Request, caller: Caller) -> Response:
    gateway = gateway_of(request)
    asked = validated(RerankBody, (await json_object(request, gateway.settings))[1])
    return Awaited(lambda: _whole(request, gateway, _job(request, caller, asked, "documents")))


def _job(request: Request, caller: Identity, asked: Stateless, param: str, ids: Any = None) -> Job:
    fields = asked.model_dump(by_alias=True, exclude_none=True, exclude={"user"})
    return Job(
        request.scope["path"],
        asked.model,
        fields,
        param,
        caller.tenant_id,
        request_id_of(request),
        caller.key_id,
        caller.told,
        asked.user,
        stream=bool(fields.get("stream")),
        by_ids=ids,
    )


@dataclass(slots=True)
class _Counted:
    """Counts one request in the metrics and the ledger, however it ends; what it was told of tokens comes with its
    events, the last of which counts."""

    metrics: Metrics
    gateway: Gateway
    job: Job
    clock: Callable[[], float] = time.monotonic
    status: str = "cancelled"  # until something else is known
    began: float = 0.0
    used: Mapping[str, Any] = field(default_factory=dict)

    def __enter__(self) -> _Counted:
        self.began = self.clock()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, GatewayError):
            self.status = "refused" if error.status < 500 else "failed"
        self.metrics.forwarded_ended(self.job.route, self.status, self.clock() - self.began)
        self.metrics.forwarded_used(self.job.route, self.used)
        if (amount := used_in({"usage": self.used})) != Amount():
            names = (self.job.key_id, self.job.user_ref or "", "", self.job.model)
            account = Account(self.job.tenant_id, day_of(self.gateway.clock()), *names, "request")
            self.gateway.store.note_usage(account, amount)

    def told(self, event: dict[str, Any]) -> None:
        if isinstance(usage := event.get("usage"), dict):
            self.used = usage


async def _whole(request: Request, gateway: Gateway, job: Job) -> Response:
    with _Counted(request.app.state.metrics, gateway, job) as counted:
        async with aclosing(answered(gateway, job)) as found:
            async for replica, reply in found:
                counted.told(reply)
                counted.status = "completed"
                reply["turnkeep"] = about(replica, job)
                return Response(orjson.dumps(reply), media_type="application/json")
    raise UpstreamFailed("the engine answered nothing", code="upstream_broken")


async def _stream(request: Request, gateway: Gateway, job: Job) -> AsyncGenerator[bytes, None]:
    begun = False
    with _Counted(request.app.state.metrics, gateway, job) as counted:
        try:
            async with aclosing(answered(gateway, job)) as found:
                async for replica, told in found:
                    begun = True
                    counted.told(told)
                    if any(choice.get("finish_reason") for choice in told.get("choices") or ()):
                        told["turnkeep"] = about(replica, job)
                    yield event(orjson.dumps(told))
            counted.status = "completed"
            yield DONE
        except GatewayError as error:
            if not begun:
                raise
            counted.status = "failed"
            yield event(orjson.dumps({"error": as_event(error)})) + DONE
