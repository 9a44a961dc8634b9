"""`/admin`: what an operator sees, across tenants. The page is static files over `/admin/v1`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from compression.budget import TRIGGER
from gateway.api.access import needs
from gateway.api.describe import answers
from gateway.api.replica_shapes import replicas_json
from gateway.api.state import Gateway, gateway_of
from gateway.api.streams import EventStream, event, failed_named
from gateway.errors import NotFound
from gateway.store.records import StoreUnavailable, TurnRecord
from gateway.tenancy import Identity

router = APIRouter(tags=["Admin"])
Operator = Annotated[Identity, Depends(needs("admin"))]

FILES = Path(__file__).parent.parent / "dashboard"
SCRIPTS = ("app.js", "audit.js", "keys.js", "parts.js")
TYPES = {"": "text/html", "style.css": "text/css"} | dict.fromkeys(SCRIPTS, "text/javascript")
CSP = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
PAGE_HEADERS = {  # no other page frames it, opens it, or reads a part of it; its forms send nothing by themselves
    "content-security-policy": f"{CSP}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
RECENT_TURNS = 200
SHOWN = 50
LIVE_EVERY_S = 1.0


class Snapshot(BaseModel):
    """How the gateway stands: replicas, counts, the sessions used last and their last turns."""

    object: str
    at: float
    replicas: list[dict[str, Any]]
    counts: dict[str, Any]
    sessions: list[dict[str, Any]]
    turns: list[dict[str, Any]]


async def snapshot(gateway: Gateway) -> dict[str, Any]:
    counts = await gateway.store.overview()
    recent = await gateway.store.recent_turns(RECENT_TURNS)
    return {
        "object": "snapshot",
        "at": gateway.clock(),
        "key_grace_s": gateway.settings.key_grace_s,
        "trigger_ratio": gateway.settings.compaction.trigger_ratio or TRIGGER,
        "replicas": replicas_json(gateway),
        "counts": {
            "tenants": counts.tenants,
            "sessions": counts.sessions,
            "running": counts.running,
            "turns": dict(counts.turns),
        },
        "sessions": sessions_json(recent)[:SHOWN],
        "turns": [turn_line(record) for record in recent[:SHOWN]],
    }


def sessions_json(recent: Sequence[TurnRecord]) -> list[dict[str, Any]]:
    """The sessions of these turns, each by its newest turn."""
    seen: dict[tuple[str, str], dict[str, Any]] = {}
    for record in recent:
        key = (record.tenant_id, record.session_id)
        if key not in seen:
            seen[key] = {
                "tenant": record.tenant_id,
                "id": record.session_id,
                "turns": record.turn.seq,
                "status": record.turn.status,
                "tokens": tokens_of(record),
                "window": record.metadata.get("window"),
                "pin": record.placement.get("replica"),
                "at": record.completed_at or record.created_at,
            }
    return list(seen.values())


def tokens_of(record: TurnRecord) -> int:
    if record.tokens is not None:
        return record.tokens.path_tokens
    return int(record.usage.get("prompt_tokens") or 0) + int(record.usage.get("output_tokens") or 0)


def turn_line(record: TurnRecord) -> dict[str, Any]:
    return {
        "tenant": record.tenant_id,
        "session": record.session_id,
        "id": record.turn.id,
        "seq": record.turn.seq,
        "status": record.turn.status,
        "model": record.model,
        "mode": record.metadata.get("mode"),
        "replica": record.placement.get("replica"),
        "reason": record.placement.get("reason"),
        "expected_cached_tokens": record.placement.get("expected_cached_tokens"),
        **{name: record.usage.get(name) for name in ("prompt_tokens", "cached_tokens", "output_tokens")},
        "prefix_cause": record.prefix_report.get("cause"),
        "error": (record.error or {}).get("code"),
        "created_at": record.created_at,
        "duration_s": record.completed_at - record.created_at if record.completed_at is not None else None,
    }


@router.get(
    "/admin/v1/snapshot", summary="How things stand", response_model=None, responses=answers(200, Snapshot, errors=())
)
async def get_snapshot(request: Request, caller: Operator) -> Response:
    return Response(orjson.dumps(await snapshot(gateway_of(request))), media_type="application/json")


@router.get(
    "/admin/v1/live",
    summary="How things stand, again whenever it changes",
    response_model=None,
    responses=answers(200, None, media_type="text/event-stream", errors=()),
)
async def live(request: Request, caller: Operator) -> Response:
    """A `snapshot` event at once, and one a second while anything changes."""
    gateway = gateway_of(request)

    async def source() -> AsyncGenerator[bytes, None]:
        before: dict[str, Any] = {}
        while not request.app.state.stopping:
            try:
                now = await snapshot(gateway)
            except StoreUnavailable as error:
                now = {"object": "trouble", "message": f"the database does not answer: {error}"}
            if {**now, "at": 0} != before:
                before = {**now, "at": 0}
                yield event(orjson.dumps(now), name=now["object"])
            await asyncio.sleep(LIVE_EVERY_S)

    return EventStream(source(), heartbeat_s=gateway.settings.heartbeat_s, failed=failed_named)


@router.get("/admin", include_in_schema=False)
@router.get("/admin/{file}", include_in_schema=False)
async def page(file: str = "") -> Response:
    """The page itself holds nothing secret: it asks for a key and sends it with each call."""
    if file not in TYPES:
        raise NotFound(f"no file {file[:64]!r} in the dashboard")
    body = await asyncio.to_thread((FILES / (file or "index.html")).read_bytes)
    return Response(body, media_type=TYPES[file], headers=PAGE_HEADERS)
