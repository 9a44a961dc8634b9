"""Wires the gateway once and serves it: `create_app(settings)` is an ASGI application, built as a value.

lifespan   store -> leases of an earlier life voided -> fleet -> embedded engine -> background work
           ... serving ...
           running turns finish or are stopped, background work ends, engine, fleet and store close
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException

from compression.budget import Policy
from engines.contract import Engine, EngineError
from engines.remote.connect import Kind, connect
from engines.remote.http import Timeouts
from gateway.api import admin, chat, compactions, context, health, sessions, transfer, turns
from gateway.api.access import Access
from gateway.api.edge import Edge
from gateway.api.hot import HotRoutes
from gateway.api.openapi import describer
from gateway.api.problems import on_gateway_error, on_http_error, on_invalid
from gateway.api.state import Gateway
from gateway.background import repeated
from gateway.errors import GatewayError
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.fleet.supervisor import EmbeddedEngine, embedded_engine
from gateway.ids import derived_id, id_maker
from gateway.metrics import Metrics
from gateway.policy import policy_of
from gateway.secrets import derive, load_secret
from gateway.sessions.compaction import Compactions
from gateway.sessions.compaction_room import CompactionRoom
from gateway.sessions.models import Models
from gateway.sessions.registry import Registry
from gateway.sessions.room import TurnRoom
from gateway.sessions.summariser import Summariser
from gateway.settings import Settings
from gateway.store.records import SessionRecord
from gateway.store.schema import migrate
from gateway.store.sessions import Store, open_store
from gateway.tenancy import affinities, cache_salt

log = structlog.get_logger(__name__)

SWEEP_EVERY_S = 15.0
DESCRIPTION = """Turnkeep keeps conversations: send only the new message.

`/v1/chat/completions` speaks OpenAI's protocol; `/v1/sessions` is the session API. Authorize with an API key
(`Authorization: Bearer tk-…`). Errors have one shape: `{"error": {type, code, message, param, request_id}}`."""


def create_app(
    settings: Settings,
    *,
    engines: Mapping[str, Engine] | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The gateway as an application. `engines` (name -> Engine) stand in for upstreams and the embedded engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.gateway = await _wire(app, settings, engines, clock, stack)
            yield
            app.state.stopping = True

    app = FastAPI(
        title="Turnkeep",
        version="0.1.0",
        description=DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.openapi = describer(app)  # type: ignore[method-assign]
    app.state.stopping = False
    app.state.metrics = Metrics()
    for module in (chat, transfer, context, sessions, turns, compactions, health, admin):
        app.include_router(module.router)
    app.add_exception_handler(GatewayError, on_gateway_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_middleware(HotRoutes)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(
        Edge, new_id=id_maker(clock), local_only=not settings.auth, origins=frozenset(settings.cors_origins)
    )
    return app


async def _wire(
    app: FastAPI,
    settings: Settings,
    engines: Mapping[str, Engine] | None,
    clock: Callable[[], float],
    stack: AsyncExitStack,
) -> Gateway:
    secret = load_secret(settings)
    await migrate(settings.database_url)
    store = await stack.enter_async_context(
        open_store(settings.database_url, clock=clock, synchronous=settings.sqlite_synchronous)
    )
    epoch = secrets.token_hex(6)
    await store.void_leases(settings.gateway_name, epoch)
    models = Models(folders=settings.tokenizers, cache_dir=settings.data_dir / "tokenizers")
    fleet = Fleet(clock=time.monotonic, on_probed=models.learn)
    owner = f"{settings.gateway_name}/{epoch}"
    registry = Registry(store, owner=owner, lease_s=settings.lease_s, renew_s=settings.lease_renew_s, clock=clock)
    registry.on_ended = app.state.metrics.turn_ended
    new_id = id_maker(clock)
    salts: dict[str, str] = {}

    def salt_of(tenant: str) -> str:
        return salts.get(tenant) or salts.setdefault(tenant, cache_salt(secret, tenant))

    compaction_room = CompactionRoom(
        store=store,
        fleet=fleet,
        models=models,
        registry=registry,
        summariser=Summariser(fleet, models, timeout_s=settings.summary_timeout_s),
        new_id=new_id,
        session_name=affinities(secret),
        cache_salt=salt_of,
        default_max_tokens=settings.max_output_tokens,
    )
    policy = partial(_policy, settings)
    compactions = Compactions(compaction_room, policy=policy, at_once=settings.compactions_at_once)
    compactions.on_ended = app.state.metrics.compaction_ended
    room = TurnRoom(
        store=store,
        fleet=fleet,
        models=models,
        registry=registry,
        clock=clock,
        new_id=new_id,
        session_name=affinities(secret),
        cache_salt=salt_of,
        lease_s=settings.lease_s,
        max_output_tokens=settings.max_output_tokens,
        compactions=compactions,
    )
    idempotency = derive(secret, "idempotency")
    await stack.enter_async_context(fleet.running())
    await _join_engines(settings, engines, fleet, stack)
    await stack.enter_async_context(registry.leases_kept())
    stack.push_async_callback(compactions.close)
    stack.push_async_callback(registry.drain, settings.grace_s)  # turns end while their leases are still renewed
    sweep = partial(_sweep, store, room, settings, clock)
    await stack.enter_async_context(repeated(sweep, every_s=SWEEP_EVERY_S, name="store-sweep"))
    return Gateway(
        settings=settings,
        store=store,
        fleet=fleet,
        models=models,
        registry=registry,
        room=room,
        access=Access(store, secret, auth=settings.auth, clock=clock),
        clock=clock,
        new_id=new_id,
        key_id_of=lambda tenant, key: derived_id(idempotency, "sess", tenant, key),
    )


async def _join_engines(
    settings: Settings, engines: Mapping[str, Engine] | None, fleet: Fleet, stack: AsyncExitStack
) -> None:
    if engines is not None:
        for name, engine in engines.items():
            await fleet.join(Replica(engine, f"in process: {name}"))
        return
    timeouts = Timeouts(
        connect_s=settings.connect_timeout_s,
        first_delta_s=settings.first_delta_timeout_s,
        idle_s=settings.idle_timeout_s,
        total_s=settings.total_timeout_s,
    )
    for upstream in settings.upstreams:
        key = upstream.api_key.get_secret_value() if upstream.api_key is not None else None
        kind = None if upstream.kind == "auto" else upstream.kind
        task = _keep_connecting(fleet, upstream.url, upstream.name, key, kind, timeouts)
        joined = asyncio.create_task(task, name=f"connect-{upstream.name}")
        stack.push_async_callback(_ended, joined)
        await asyncio.wait({joined}, timeout=settings.connect_timeout_s)
    if settings.embedded:

        async def on_start(embedded: EmbeddedEngine) -> None:
            engine = await connect(embedded.url, name="embedded", kind="turnkeep", timeouts=timeouts)
            await fleet.join(Replica(engine, embedded.url))

        await stack.enter_async_context(
            embedded_engine(
                engine_arguments(settings), on_start=on_start, report=lambda line: log.info("engine: %s", line)
            )
        )


async def _keep_connecting(
    fleet: Fleet, url: str, name: str, api_key: str | None, kind: Kind | None, timeouts: Timeouts
) -> None:
    """An upstream that is not up yet joins when it is."""
    said = ""
    while True:
        try:
            engine = await connect(url, api_key=api_key, name=name, kind=kind, timeouts=timeouts)
        except EngineError as error:
            if str(error) != said:
                log.warning("upstream %s: %s; trying again", name, error)
                said = str(error)
            await asyncio.sleep(1.0)
        else:
            await fleet.join(Replica(engine, url))
            return


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def engine_arguments(settings: Settings) -> list[str]:
    """The command line of the embedded engine."""
    arguments = ["--model", str(settings.model_dir or settings.model), "--port", "0"]
    arguments += ["--served-name", settings.model] if settings.model_dir is not None else []
    arguments += ["--device", settings.engine_device, "--dtype", settings.engine_dtype]
    arguments += ["--block-size", str(settings.engine_block_size)]
    arguments += ["--max-batch-tokens", str(settings.engine_max_batch_tokens)]
    if settings.engine_pool_bytes is not None:
        arguments += ["--pool-bytes", str(settings.engine_pool_bytes)]
    threads = settings.engine_threads or os.cpu_count() or 1
    return [*arguments, "--threads", str(threads)]


def _policy(settings: Settings, session: SessionRecord) -> Policy:
    """A session's policy, over its tenant's, over the gateway's."""
    tenant = settings.tenant_compaction.get(session.tenant_id)
    return policy_of(settings.compaction.named(), tenant.named() if tenant is not None else {}, session.policy)


async def _sweep(store: Store, room: TurnRoom, settings: Settings, clock: Callable[[], float]) -> None:
    """Expired sessions erased, dead leases and compactions ended, old events and idempotency keys let go."""
    await store.lapse_leases()
    await store.lapse_compactions()
    for tenant_id, receipt in await store.erase_expired():
        room.forget(tenant_id, receipt.session_id)
    await store.purge_events(clock() - settings.stream_retention_s)
    await store.forget_keys(clock() - settings.idempotency_ttl_s)
    await store.flush_keys()
