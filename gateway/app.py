"""Wires the gateway once and serves it: `create_app(settings)` is an ASGI application, built as a value.

lifespan   store -> leases of an earlier life voided -> fleet -> embedded engine -> background work
           ... serving ...
           running turns finish or are stopped, background work ends, engine, fleet and store close
"""

from __future__ import annotations

import math
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
from engines.contract import Engine
from gateway.api import (
    admin,
    audit,
    chat,
    compactions,
    completions,
    context,
    erasures,
    health,
    keys,
    limits,
    replicas,
    sessions,
    suspension,
    tenants,
    transfer,
    turns,
    usage,
)
from gateway.api.access import Access
from gateway.api.edge import Edge
from gateway.api.hot import HotRoutes
from gateway.api.messages import routes as messages
from gateway.api.openapi import describer
from gateway.api.problems import on_gateway_error, on_http_error, on_invalid
from gateway.api.responses import compacting, conversations, counting, routes
from gateway.api.responses.ids import ResponseIds
from gateway.api.responses.sealed import ContentSeal
from gateway.api.state import Gateway
from gateway.background import repeated
from gateway.errors import GatewayError
from gateway.fleet.fleet import Fleet
from gateway.fleet.member import member_of
from gateway.fleet.roster import Roster
from gateway.fleet.supervisor import EmbeddedEngine, embedded_engine
from gateway.ids import derived_id, id_maker
from gateway.limits.counters import open_counters
from gateway.limits.gate import Gate
from gateway.limits.kv import EVERY_S as KV_EVERY_S
from gateway.limits.kv import KvKeeper
from gateway.metrics import Metrics
from gateway.policy import policy_of
from gateway.sealing import seal
from gateway.secrets import derive, load_secret
from gateway.sessions.compaction import Compactions
from gateway.sessions.compaction_room import CompactionRoom
from gateway.sessions.draining import Drains
from gateway.sessions.erasing import go_on
from gateway.sessions.handover import TAKE_EVERY_S
from gateway.sessions.models import Models
from gateway.sessions.places import Places
from gateway.sessions.registry import Registry
from gateway.sessions.room import TurnRoom
from gateway.sessions.summariser import Summariser
from gateway.sessions.takeover import take_offers
from gateway.settings import Settings
from gateway.store.records import SessionRecord
from gateway.store.schema import migrate
from gateway.store.sessions import Store, open_store
from gateway.store.usage_records import Account, Amount, Kind, day_of
from gateway.tenancy import affinities, cache_salt, response_checks, subjects

log = structlog.get_logger(__name__)

SWEEP_EVERY_S = 15.0
FLUSH_EVERY_S = 1.0  # what turns without a session used is in the ledger within this time
LOOK_EVERY_S = 0.5  # a database that is away is asked for this often
STOP_SEEN_S = 0.1  # a signal to stop is heard of within this time
OFFERS_KEPT_S = 60.0  # of a gateway that died over them
TOLD_TO_PAGES = ("x-request-id", "x-turnkeep-session", "x-turnkeep-turn", "retry-after", "etag", "link")
DESCRIPTION = """Turnkeep keeps conversations: send only the new message.

`/v1/chat/completions`, `/v1/responses` and `/v1/conversations` speak OpenAI's protocol, `/v1/messages` Anthropic's;
`/v1/sessions` is the session API. Authorize with an API key
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
    for module in (chat, counting, compacting, routes, conversations, messages, completions):
        app.include_router(module.router)
    for module in (transfer, context, suspension, sessions, erasures, turns, compactions, usage, health):
        app.include_router(module.router)
    for module in (replicas, keys, tenants, limits, audit, admin):
        app.include_router(module.router)
    app.add_exception_handler(GatewayError, on_gateway_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_middleware(HotRoutes)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=list(TOLD_TO_PAGES),
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
    fleet = Fleet(clock=time.monotonic, on_probed=models.learn, wall=clock, pin_ttl_s=settings.pin_ttl_s)
    fleet.on_left.append(models.forget)
    owner = f"{settings.gateway_name}/{epoch}"
    registry = Registry(
        store,
        owner=owner,
        lease_s=settings.lease_s,
        renew_s=settings.lease_renew_s,
        clock=clock,
        handover_s=settings.handover_s,
    )
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
        summariser=Summariser(
            fleet, models, timeout_s=settings.summary_timeout_s, spent=partial(_note_own, store, clock)
        ),
        new_id=new_id,
        session_name=affinities(secret),
        cache_salt=salt_of,
        default_max_tokens=settings.max_output_tokens,
    )
    policy = partial(_policy, settings)
    compactions = Compactions(compaction_room, policy=policy, at_once=settings.compactions_at_once)
    compactions.on_ended = app.state.metrics.compaction_ended
    counters = await stack.enter_async_context(
        open_counters(settings.counted_in, store, clock, lease_s=settings.lease_s)
    )
    gate = Gate(
        store,
        counters,
        clock=clock,
        renew_s=settings.lease_renew_s,
        blind_refuses=settings.limits_failure == "refuse",
        refused=app.state.metrics.refused,
        blind=app.state.metrics.limits_blind.inc,
    )
    await stack.enter_async_context(gate.open())
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
        gate=gate,
        without_database=settings.without_database == "unsaved",
    )
    keeper = KvKeeper(
        store,
        fleet,
        gate,
        clock=clock,
        name_of=affinities(secret),
        salt_of=salt_of,
        forgot=app.state.metrics.kv_given_up.inc,
    )
    idempotency = derive(secret, "idempotency")
    await stack.enter_async_context(fleet.running())
    roster = Roster(
        store, fleet, settings if engines is None else settings.model_copy(update={"upstreams": ()}), secret=secret
    )
    fleet.find = roster.find
    places = Places(room, gateway=settings.gateway_name, gone_after_s=settings.replica_gone_s)
    kept = settings.engine_kv_dir is not None
    roster.on_joining = lambda replica, own: places.joins(replica, own, lasts=not own or kept)
    roster.on_draining = lambda replica: registry.heads.forget_at(replica.name)
    await stack.enter_async_context(places.running())
    await stack.enter_async_context(roster.running())
    await _join_engines(settings, engines, roster, stack)
    await stack.enter_async_context(registry.leases_kept())
    drains = Drains(compaction_room, roster, owner=owner, policy=policy, pin_ttl_s=settings.pin_ttl_s)
    await stack.enter_async_context(drains.running())
    stack.push_async_callback(compactions.close)
    stack.push_async_callback(registry.drain, settings.grace_s)  # turns end while their leases are still renewed
    stopped = partial(_drain_when_stopped, app, registry, settings.grace_s)
    await stack.enter_async_context(repeated(stopped, every_s=STOP_SEEN_S, name="stop-watch"))
    await stack.enter_async_context(repeated(partial(take_offers, room), every_s=TAKE_EVERY_S, name="handovers"))
    await stack.enter_async_context(repeated(store.flush_usage, every_s=FLUSH_EVERY_S, name="usage-flush"))
    await stack.enter_async_context(repeated(store.look, every_s=LOOK_EVERY_S, name="database-watch"))
    await stack.enter_async_context(repeated(keeper.round, every_s=KV_EVERY_S, name="kv-limits"))
    sweep = partial(_sweep, store, room, places, settings, clock)
    await stack.enter_async_context(repeated(sweep, every_s=SWEEP_EVERY_S, name="store-sweep"))
    return Gateway(
        settings=settings,
        store=store,
        fleet=fleet,
        roster=roster,
        seal=partial(seal, secret),
        models=models,
        registry=registry,
        room=room,
        access=Access(
            store,
            secret,
            auth=settings.auth,
            clock=clock,
            believed_s=settings.keys_without_database_s if room.without_database else 0.0,
        ),
        clock=clock,
        new_id=new_id,
        places=places,
        subject_of=subjects(secret),
        key_id_of=lambda tenant, key: derived_id(idempotency, "sess", tenant, key),
        response_ids=ResponseIds(response_checks(secret)),
        content_seal=ContentSeal.of(secret),
    )


async def _join_engines(
    settings: Settings, engines: Mapping[str, Engine] | None, roster: Roster, stack: AsyncExitStack
) -> None:
    """What this gateway runs itself. Upstreams, and what was added at runtime, join by the roster."""
    if engines is not None:
        for name, engine in engines.items():
            await roster.join(member_of(settings, name=name, url=f"in process: {name}").replica(engine))
    elif settings.embedded:

        async def on_start(embedded: EmbeddedEngine) -> None:
            member = member_of(settings, name="embedded", url=embedded.url, kind="turnkeep")
            await roster.join(member.replica(await member.connected()))

        await stack.enter_async_context(
            embedded_engine(
                engine_arguments(settings), on_start=on_start, report=lambda line: log.info("engine: %s", line)
            )
        )


def engine_arguments(settings: Settings) -> list[str]:
    """The command line of the embedded engine."""
    arguments = ["--model", str(settings.model_dir or settings.model), "--port", "0"]
    arguments += ["--served-name", settings.model] if settings.model_dir is not None else []
    arguments += ["--device", settings.engine_device, "--dtype", settings.engine_dtype]
    arguments += ["--block-size", str(settings.engine_block_size)]
    arguments += ["--max-batch-tokens", str(settings.engine_max_batch_tokens)]
    arguments += ["--eviction", settings.engine_eviction, "--max-sessions", str(settings.engine_max_sessions)]
    arguments += ["--kv-precision", settings.engine_kv_precision]
    arguments += ["--kv-events", "tcp://127.0.0.1:0"]  # so that the gateway knows what its cache holds
    for option, at in (("--kv-int8-at", settings.engine_kv_int8_at), ("--kv-int4-at", settings.engine_kv_int4_at)):
        arguments += [option, str(at)] if at is not None else []
    if settings.engine_pool_bytes is not None:
        arguments += ["--pool-bytes", str(settings.engine_pool_bytes)]
    if settings.engine_host_bytes is not None:
        arguments += ["--host-bytes", str(settings.engine_host_bytes)]
    if settings.engine_kv_dir is not None:
        arguments += ["--kv-dir", str(settings.engine_kv_dir)]
    if settings.engine_disk_bytes is not None:
        arguments += ["--disk-bytes", str(settings.engine_disk_bytes)]
    threads = settings.engine_threads or os.cpu_count() or 1
    return [*arguments, "--threads", str(threads)]


def _policy(settings: Settings, session: SessionRecord) -> Policy:
    """A session's policy, over its tenant's, over the gateway's."""
    tenant = settings.tenant_compaction.get(session.tenant_id)
    return policy_of(settings.compaction.named(), tenant.named() if tenant is not None else {}, session.policy)


async def _drain_when_stopped(app: FastAPI, registry: Registry, grace_s: float) -> None:
    """Before the server ends its streams: those that a turn outlives are sent on to where it goes on."""
    if app.state.stopping:
        await registry.drain(grace_s)


def _note_own(
    store: Store, clock: Callable[[], float], session: SessionRecord, model: str, kind: Kind, amount: Amount
) -> None:
    """The gateway's own work for a session."""
    account = Account(session.tenant_id, day_of(clock()), "", session.user_ref or "", session.id, model, kind)
    store.note_usage(account, amount)


async def _sweep(store: Store, room: TurnRoom, places: Places, settings: Settings, clock: Callable[[], float]) -> None:
    """Expired sessions erased, dead leases and compactions ended; old events, idempotency keys, audit lines let go."""
    await store.lapse_leases()
    await store.lapse_compactions()
    expired = await store.erase_expired()
    if settings.session_ttl_s is not None or settings.tenant_session_ttl_s:
        tenants = {name: ttl_s or math.inf for name, ttl_s in settings.tenant_session_ttl_s.items()}
        expired += await store.erase_idle(settings.session_ttl_s or math.inf, tenants)
    await go_on(room)
    if expired:
        await places.soon()
    await store.purge_events(clock() - settings.stream_retention_s)
    await store.purge_audit(clock() - settings.audit_retention_s)
    await store.purge_handovers(clock() - OFFERS_KEPT_S)
    await store.forget_keys(clock() - settings.idempotency_ttl_s)
    await store.flush_keys()
    await store.roll_up_usage(settings.usage_names_s)
