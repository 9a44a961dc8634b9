"""One request that belongs to no session, at a replica that can take it; before its first event, at another one.

Nothing of a client's request goes upstream but the fields of the route: no header, no credential, no salt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from engines.contract import EngineBroken, EngineError, EngineLost, EngineUnreachable, Forwards
from gateway.api.state import Gateway
from gateway.errors import BadRequest, ContextTooLong, GatewayError, NotFound, Unavailable
from gateway.fleet.blame import Blame
from gateway.fleet.replica import Replica
from gateway.fleet.stateless import choose_for, offers
from gateway.limits.told import Told
from gateway.sessions.failures import from_engine
from gateway.store.usage_records import Amount

MOST_TOKENS = 1 << 40  # of a usage that is believed
Events = AsyncGenerator[dict[str, Any], None]


@dataclass(frozen=True, slots=True)
class Job:
    """`param` names the field that holds the text. `by_ids` None: only a replica that has the route will do."""

    route: str
    model: str
    fields: Mapping[str, Any]
    param: str
    tenant_id: str
    request_id: str
    key_id: str = ""
    told: Told | None = None
    user_ref: str | None = None
    stream: bool = False
    by_ids: Callable[[Replica, str], Events] | None = None  # (replica, salt) -> events of the route's shape

    @property
    def cost(self) -> float:
        """What it costs its tenant in the line before a replica, in tokens: four bytes of JSON make one."""
        return len(str(self.fields[self.param])) / 4 + float(self.fields.get("max_tokens") or 0)


async def answered(gateway: Gateway, job: Job) -> AsyncGenerator[tuple[Replica, dict[str, Any]], None]:
    """(replica, event) as they come; of a job that does not stream, one. Raises GatewayError."""
    held = await gateway.room.gate.admit(job.tenant_id, job.key_id, int(job.cost) + 1, job.told)
    used = Amount()
    try:
        async with aclosing(_answered(gateway, job)) as events:
            async for replica, event in events:
                used = max(used, used_in(event), key=lambda amount: amount.tokens)
                yield replica, event
    finally:
        gateway.room.gate.end(held, used.tokens)


def used_in(event: Mapping[str, Any]) -> Amount:
    """Of an engine's own `usage`, whose numbers are not trusted to be any."""
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return Amount()
    details = usage.get("prompt_tokens_details")
    numbers = (
        usage.get("prompt_tokens", usage.get("total_tokens")),
        details.get("cached_tokens") if isinstance(details, dict) else 0,
        usage.get("completion_tokens"),
    )
    prompt, cached, output = (n if isinstance(n, int) and 0 <= n < MOST_TOKENS else 0 for n in numbers)
    return Amount(1, prompt, min(cached, prompt), output) if prompt or output else Amount()


async def _answered(gateway: Gateway, job: Job) -> AsyncGenerator[tuple[Replica, dict[str, Any]], None]:
    tried: list[str] = []
    salt = gateway.room.cache_salt(job.tenant_id)
    failed: EngineError | None = None
    blame = Blame()
    now = gateway.fleet.now
    while True:
        replica = choose_for(
            job.route,
            gateway.fleet,
            model=job.model,
            ids=job.by_ids is not None,
            now=now(),
            tried=tried,
        )
        if replica is None:
            blame.settle(now(), answered=False)
            raise _told(failed, job) if failed is not None else _nobody(gateway, job)
        begun = False
        try:
            async with replica.taken(job.tenant_id, cost=job.cost), aclosing(_events(replica, job, salt)) as events:
                async for event in events:
                    if not begun:
                        begun = True
                        blame.settle(now(), answered=True)
                    yield replica, event
            replica.answered(now())
            return
        except EngineError as error:
            if isinstance(error, EngineBroken) and not begun:
                blame.broke(replica, error)
            elif error.retryable or isinstance(error, EngineLost):
                replica.failed(error, now(), lost=isinstance(error, EngineUnreachable | EngineLost))
            if begun or not error.retryable:
                raise _told(error, job) from error
            tried.append(replica.name)
            failed = error


async def _events(replica: Replica, job: Job, salt: str) -> Events:
    engine, caps = replica.engine, replica.capabilities
    assert caps is not None
    if job.route not in caps.routes:
        assert job.by_ids is not None
        events = job.by_ids(replica, salt)
    else:
        assert isinstance(engine, Forwards)
        if not job.stream:
            yield await engine.forward(job.route, job.fields, request_id=job.request_id, salt=salt)
            return
        events = engine.forward_stream(job.route, job.fields, request_id=job.request_id, salt=salt)
    async with aclosing(events):
        async for event in events:
            yield event


def mode_of(replica: Replica, job: Job) -> str:
    caps = replica.capabilities
    return "forward" if caps is not None and job.route in caps.routes else "ids"


def about(replica: Replica, job: Job) -> dict[str, Any]:
    """Where an answer came from, as its `turnkeep`."""
    kind = replica.capabilities.kind if replica.capabilities is not None else None
    return {"replica": replica.name, "kind": kind, "mode": mode_of(replica, job)}


def _nobody(gateway: Gateway, job: Job) -> GatewayError:
    fleet, model = gateway.fleet, job.model[:100]
    if any(offers(r, job.model, job.route, ids=job.by_ids is not None) for r in fleet):
        message = f"no replica that answers {job.route} for {model!r} can take the request right now"
        return Unavailable(message, retry_after_s=1.0)
    if job.model in fleet.models:
        message = f"no replica of {model!r} answers {job.route} in the way that is asked for"
        return BadRequest(message, code="route_not_served", param="model")
    if any(r.healthy for r in fleet):
        told = f"the model {model!r} is not served here; served are: {', '.join(fleet.models) or 'none'}"
        return NotFound(told, code="model_not_found", param="model")
    return Unavailable(f"no replica that serves {model!r} can take the request right now", retry_after_s=1.0)


def _told(error: EngineError, job: Job) -> GatewayError:
    told = from_engine(error)
    if isinstance(told, ContextTooLong):
        told.param = job.param
    return told
