"""`/admin/v1/replicas`: the replicas as they are, and how an operator adds, drains and removes them while all runs."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.auditing import line_of, refusals_noted
from gateway.api.body import json_object, validated
from gateway.api.describe import answers, body_of
from gateway.api.replica_shapes import history_json, pending_json, replica_json, replicas_json
from gateway.api.state import Gateway, gateway_of
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.fleet.addresses import url_refusal
from gateway.fleet.roster import purpose_of
from gateway.store.audit_records import OPERATOR, AuditLine
from gateway.store.replica_records import NewReplica, NoReplica, ReplicaExists, ReplicaState, TooManyReplicas
from gateway.tenancy import Identity
from gateway.upstream import Seconds, UpstreamAddress

router = APIRouter(prefix="/admin/v1/replicas", tags=["Replicas"])
Operator = Annotated[Identity, Depends(needs("admin"))]
Reason = Annotated[str, Field(max_length=200, description="Why, for the replica's history.")]


class DrainOrder(BaseModel):
    model_config = ConfigDict(extra="forbid")
    timeout_s: Seconds | None = Field(None, description="Sessions are moved for so long. Default: `drain_timeout_s`.")
    reason: Reason = ""
    force: bool = Field(False, description="Even where no other replica serves a model of it.")


class UndrainOrder(BaseModel):
    model_config = ConfigDict(extra="forbid")
    reason: Reason = ""


class ReplicaShape(BaseModel):
    """A replica as this gateway sees it. `draining`: how far a drain is, of all gateways."""

    model_config = ConfigDict(extra="allow")
    object: str
    name: str
    url: str
    source: str
    state: str
    draining: dict[str, JsonValue] | None


class ReplicaList(BaseModel):
    object: str
    data: list[ReplicaShape]


class ReplicaGone(BaseModel):
    object: str
    name: str
    removed: bool


# ---- what is shown


def _shown(gateway: Gateway, name: str) -> dict[str, Any]:
    """Raises NotFound."""
    replica = gateway.fleet.get(name)
    if replica is not None:
        return {**replica_json(gateway, replica), "history": history_json(gateway, replica)}
    if name in gateway.roster.pending:
        return {**pending_json(gateway, name, gateway.roster.pending[name]), "history": []}
    raise NotFound(f"no replica {name[:64]!r}", code="replica_not_found")


def _answer(told: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(told), status, media_type="application/json")


# ---- what is done


@router.get("", summary="The replicas", response_model=None, responses=answers(200, ReplicaList, errors=()))
async def list_replicas(request: Request, caller: Operator) -> Response:
    return _answer({"object": "list", "data": replicas_json(gateway_of(request))})


@router.post(
    "",
    summary="Add a replica",
    response_model=None,
    status_code=201,
    responses=answers(201, ReplicaShape, errors=(400, 409, 413, 415, 503)),
    openapi_extra=body_of(UpstreamAddress),
)
async def add_replica(request: Request, caller: Operator) -> Response:
    """It takes turns as soon as it answers, here and at every other gateway of the database within two seconds. Said
    twice, it is there once."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings)
    asked = validated(UpstreamAddress, raw)
    if not gateway.settings.link_local_replicas and (why := await url_refusal(asked.url)) is not None:
        raise BadRequest(f"no replica may be there: {why}", code="address_refused", param="url")
    if not gateway.settings.link_local_replicas and (elsewhere := asked.kv_elsewhere()) is not None:
        message = f"a replica's KV events are on the host of its URL, not at {elsewhere}"
        raise BadRequest(message, code="address_refused", param="kv_events")
    await gateway.roster.refresh()
    line = line_of(request, caller, "replica.add", asked.name, tenant_id=OPERATOR)
    async with refusals_noted(gateway.store, line):
        await _add(gateway, asked, line)
    await gateway.roster.refresh()
    return _answer(_shown(gateway, asked.name), 201)


async def _add(gateway: Gateway, asked: UpstreamAddress, line: AuditLine) -> None:
    """Raises Conflict."""
    if (other := gateway.roster.taken_by(asked.name, asked.url)) is not None:
        raise Conflict(f"the replica {other!r} has that name or that URL", code="replica_exists")
    key = asked.api_key.get_secret_value() if asked.api_key is not None else None
    terms = asked.model_dump(exclude_none=True, exclude={"name", "url", "api_key"}, mode="json")
    sealed = None if key is None else gateway.seal(key, purpose_of(asked.name, asked.url))
    try:
        new = NewReplica(asked.name, asked.url, sealed, terms)
        await gateway.store.add_replica(new, limit=gateway.settings.added_replicas_max, line=line)
    except ReplicaExists as error:
        raise Conflict(str(error), code="replica_exists") from error
    except TooManyReplicas as error:
        details: dict[str, object] = {"added": error.added, "limit": error.limit}
        message = f"{error}: remove one, or raise added_replicas_max"
        raise Conflict(message, code="too_many_replicas", details=details) from error


@router.get(
    "/{name}",
    summary="One replica, with the history of its health",
    response_model=None,
    responses=answers(200, ReplicaShape, errors=(404,)),
)
async def show_replica(request: Request, caller: Operator, name: str) -> Response:
    return _answer(_shown(gateway_of(request), name))


@router.post(
    "/{name}/drain",
    summary="Take no more turns at a replica and move its sessions",
    response_model=None,
    status_code=202,
    responses=answers(202, ReplicaShape, errors=(400, 404, 409, 413, 415, 503)),
    openapi_extra=body_of(DrainOrder, required=False),
)
async def drain_replica(request: Request, caller: Operator, name: str) -> Response:
    """Running turns end there; sessions likely to return are computed elsewhere in idle time and pinned there.
    `draining` of the answer, and of `GET`, says how far it is; it ends in the state `drained`."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings, empty=True)
    asked = validated(DrainOrder, raw)
    await gateway.roster.refresh()
    _shown(gateway, name)
    line = line_of(request, caller, "replica.drain", name, tenant_id=OPERATOR, force=asked.force)
    if not asked.force:
        async with refusals_noted(gateway.store, line):
            _refuse_last(gateway, name, "drain")
    timeout_s = asked.timeout_s or gateway.settings.drain_timeout_s
    await _set_state(gateway, name, "draining", asked.reason, line, timeout_s)
    return _answer(_shown(gateway, name), 202)


@router.post(
    "/{name}/undrain",
    summary="Take turns at a replica again",
    response_model=None,
    responses=answers(200, ReplicaShape, errors=(400, 404, 413, 415, 503)),
    openapi_extra=body_of(UndrainOrder, required=False),
)
async def undrain_replica(request: Request, caller: Operator, name: str) -> Response:
    """Sessions that were moved stay where they are now."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings, empty=True)
    asked = validated(UndrainOrder, raw)
    await gateway.roster.refresh()
    _shown(gateway, name)
    if name in gateway.roster.records:
        line = line_of(request, caller, "replica.undrain", name, tenant_id=OPERATOR)
        await _set_state(gateway, name, "active", asked.reason, line)
    return _answer(_shown(gateway, name))


@router.delete(
    "/{name}",
    summary="Remove a replica that was added at runtime",
    response_model=None,
    responses=answers(200, ReplicaGone, errors=(400, 404, 409, 503)),
)
async def remove_replica(
    request: Request,
    caller: Operator,
    name: str,
    force: Annotated[bool, Query(description="Even where no other replica serves a model of it.")] = False,
) -> Response:
    """Running turns end there, those that wait go elsewhere; its sessions are placed anew with their next turn, and
    those of no other replica move. Drain it before, so that they find their prefix computed."""
    gateway = gateway_of(request)
    await gateway.roster.refresh()
    shown = _shown(gateway, name)
    line = line_of(request, caller, "replica.remove", name, tenant_id=OPERATOR, force=force)
    async with refusals_noted(gateway.store, line):
        if shown["source"] != "api":
            raise Conflict(f"{name} stands in the settings: drain it, or take it out there", code="replica_of_settings")
        if not force:
            _refuse_last(gateway, name, "remove")
    removed = await gateway.store.remove_replica(name, line=line)
    await gateway.roster.refresh()
    return _answer({"object": "replica.removed", "name": name, "removed": removed})


async def _set_state(
    gateway: Gateway, name: str, state: ReplicaState, reason: str, line: AuditLine, timeout_s: float | None = None
) -> None:
    """Raises NotFound where another gateway removed it meanwhile."""
    added = _shown(gateway, name)["source"] == "api"
    try:
        await gateway.store.set_replica_state(name, state, reason=reason, timeout_s=timeout_s, added=added, line=line)
    except NoReplica as error:
        raise NotFound(str(error), code="replica_not_found") from error
    finally:
        await gateway.roster.refresh()


def _refuse_last(gateway: Gateway, name: str, what: str) -> None:
    """Raises Conflict where turns of some model would find no replica any more."""
    now, replica = gateway.fleet.now(), gateway.fleet.get(name)
    if replica is None or replica.capabilities is None or not replica.available(now):
        return
    others = [other for other in gateway.fleet if other is not replica and other.available(now)]
    alone = [model for model in replica.capabilities.models if not any(other.serves(model) for other in others)]
    if alone:
        raise Conflict(
            f"no other replica can serve {alone[0][:100]!r} now; `force` to {what} {name} all the same",
            code="last_replica",
        )
