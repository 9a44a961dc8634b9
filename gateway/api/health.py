"""Health: `/livez` (the loop turns), `/readyz` (the store takes a write, a replica takes turns), `/metrics`."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.responses import Response

from gateway.api.describe import inlined
from gateway.api.state import Gateway, gateway_of
from gateway.metrics import observe
from gateway.store.records import StoreUnavailable

router = APIRouter(tags=["Health"])


class Readiness(BaseModel):
    ready: bool
    checks: dict[str, str]


def _told(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": inlined(Readiness)}}}


@router.get(
    "/livez",
    summary="The gateway's loop turns",
    response_model=None,
    responses={200: {"description": "Alive.", "content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def livez() -> Response:
    return Response("alive\n", media_type="text/plain")


@router.get(
    "/readyz",
    summary="A turn can be taken",
    response_model=None,
    responses={200: _told("Ready."), 503: _told("Not ready; `checks` says why.")},
)
async def readyz(request: Request) -> Response:
    gateway = gateway_of(request)
    checks = {}
    checks["store"] = await _store(gateway)
    checks["replicas"] = _replicas(gateway)
    if request.app.state.stopping:
        checks["shutdown"] = "the gateway is shutting down"
    needed = [value for name, value in checks.items() if name != "store" or not gateway.room.without_database]
    ready = all(value == "ok" for value in needed)
    told = orjson.dumps({"ready": ready, "checks": checks})
    return Response(told, 200 if ready else 503, media_type="application/json")


async def _store(gateway: Gateway) -> str:
    """A gateway that answers chats without it says at once that it is away: it goes on being sent some."""
    if gateway.room.without_database and gateway.store.away:
        return "the database is away: chats are answered unsaved, sessions are refused"
    try:
        await gateway.store.ping()
    except StoreUnavailable as error:
        return f"the database takes no write: {error}"
    return "ok"


def _replicas(gateway: Gateway) -> str:
    """One that answers is not enough: by ids a turn needs the model's tokenizer here, and proof that it reads them."""
    why = "no replica answers"
    for replica in gateway.fleet:
        caps = replica.capabilities
        if caps is None or not replica.available(gateway.fleet.now()):
            continue
        if caps.takes_chat or any(gateway.models.by_ids(model, replica) for model in caps.models):
            return "ok"
        why = "no tokenizer is loaded of those that answer; the dashboard says why"
    return why


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_model=None,
    responses={200: {"description": "Text.", "content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    gateway = gateway_of(request)
    observe(request.app.state.metrics, gateway.fleet, gateway.registry, gateway.store)
    return Response(generate_latest(request.app.state.metrics.registry), media_type=CONTENT_TYPE_LATEST)
