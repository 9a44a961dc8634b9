"""`/v1/usage` and `/admin/v1/usage`: what was used, by day, model, key, end user and session, as JSON or CSV."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any
from urllib.parse import urlencode

import orjson
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.csv_lines import CSV, csv_of
from gateway.api.describe import answers
from gateway.api.state import Gateway, gateway_of
from gateway.api.usage_shapes import UsageList, columns_of, line_json, row_of
from gateway.errors import BadRequest
from gateway.store.usage_records import NAMES, UsagePage, UsageQuery, day_number, day_of, day_text, month_of
from gateway.tenancy import Identity

router = APIRouter(tags=["Usage"])
Reader = Annotated[Identity, Depends(needs("read"))]
Operator = Annotated[Identity, Depends(needs("admin"))]

PAGE, CSV_PAGE, MOST = 100, 10_000, 10_000
FORMATS = "^(json|csv)$"

Groups = Annotated[str, Query(max_length=100, description="day, model, key, user, session; several with commas.")]
Since = Annotated[str | None, Query(max_length=10, description="First day, YYYY-MM-DD. Default: the month's first.")]
Until = Annotated[str | None, Query(max_length=10, description="The day after the last. Default: tomorrow. UTC.")]
Value = Annotated[str | None, Query(max_length=256, description="Only this one's.")]
Limit = Annotated[int | None, Query(ge=1, le=MOST, description="Groups. Default: 100; as CSV 10,000.")]
Cursor = Annotated[str | None, Query(max_length=4096, description="`next_cursor` of the page before.")]
Format = Annotated[str | None, Query(pattern=FORMATS, description="csv, as `Accept: text/csv`; else json.")]
EITHER = answers(200, UsageList, errors=(400,))
EITHER[200]["content"]["text/csv"] = {"schema": {"type": "string"}}


@router.get("/v1/usage", summary="What your tenant used", response_model=None, responses=EITHER)
async def usage(
    request: Request,
    caller: Reader,
    group_by: Groups = "day",
    since: Since = None,
    until: Until = None,
    model: Value = None,
    key: Value = None,
    user: Value = None,
    session: Value = None,
    limit: Limit = None,
    cursor: Cursor = None,
    format: Format = None,
) -> Response:
    where = {"model": model, "key": key, "user": user, "session": session}
    return await _answer(request, caller.tenant_id, where, group_by, since, until, limit, cursor, format)


@router.get("/admin/v1/usage", summary="What all tenants used", response_model=None, responses=EITHER)
async def usage_of_all(
    request: Request,
    caller: Operator,
    group_by: Annotated[str, Query(max_length=100, description="tenant too.")] = "tenant",
    since: Since = None,
    until: Until = None,
    tenant: Value = None,
    model: Value = None,
    key: Value = None,
    user: Value = None,
    session: Value = None,
    limit: Limit = None,
    cursor: Cursor = None,
    format: Format = None,
) -> Response:
    where = {"tenant": tenant, "model": model, "key": key, "user": user, "session": session}
    return await _answer(request, None, where, group_by, since, until, limit, cursor, format)


async def _answer(
    request: Request,
    tenant_id: str | None,
    where: dict[str, str | None],
    group_by: str,
    since: str | None,
    until: str | None,
    limit: int | None,
    cursor: str | None,
    format: str | None,
) -> Response:
    gateway = gateway_of(request)
    names = _names(group_by, tenant=tenant_id is None)
    first, end = _days(gateway, since, until)
    as_csv = format == "csv" or (format is None and "text/csv" in request.headers.get("accept", ""))
    query = UsageQuery(
        tenant_id,
        first,
        end,
        names,
        where={name: value for name, value in where.items() if value is not None},
        after=_after(cursor),
        limit=limit or (CSV_PAGE if as_csv else PAGE),
    )
    for name, value in query.where.items():
        if "\0" in value:
            raise BadRequest(f"{name}: holds a NUL character, which is refused", code="invalid_unicode", param=name)
    try:
        page = await gateway.store.usage(query)
    except ValueError as error:
        raise BadRequest(str(error), param="cursor") from None
    lines = [line_json(line, names, gateway.settings.prices) for line in page.lines]
    following = _cursor(page)
    if not as_csv:
        told = {
            "object": "list",
            "data": lines,
            "since": day_text(first),
            "until": day_text(end),
            "currency": gateway.settings.currency,
            "has_more": page.more,
            "next_cursor": following,
        }
        return Response(orjson.dumps(told), media_type="application/json")
    headers = {"content-disposition": 'attachment; filename="usage.csv"'}
    if following is not None:
        asked = {**dict(request.query_params), "cursor": following}
        headers["link"] = f'<{request.url.path}?{urlencode(asked)}>; rel="next"'
    rows = (row_of(line, names, gateway.settings.currency) for line in lines)
    return Response(csv_of(columns_of(names), rows), media_type=CSV, headers=headers)


def _names(group_by: str, *, tenant: bool) -> tuple[str, ...]:
    names = tuple(name.strip() for name in group_by.split(","))
    known = NAMES if tenant else NAMES[1:]
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None or len(set(names)) < len(names):
        told = "named twice" if wrong is None else f"{wrong[:64]!r} is none"
        raise BadRequest(f"group_by: {told}: there are {', '.join(known)}", param="group_by")
    return names


def _days(gateway: Gateway, since: str | None, until: str | None) -> tuple[int, int]:
    """The first day, and the one after the last. Raises BadRequest."""
    now = gateway.clock()
    first = month_of(now) if since is None else _day(since, "since")
    end = max(day_of(now), first) + 1 if until is None else _day(until, "until")
    if end <= first:
        raise BadRequest(f"until: {day_text(end)} is not after since, {day_text(first)}", param="until")
    return first, end


def _day(text: str, param: str) -> int:
    try:
        return day_number(text)
    except ValueError:
        raise BadRequest(f"{param}: {text[:32]!r} is no date written YYYY-MM-DD", param=param) from None


def _cursor(page: UsagePage) -> str | None:
    if not page.more:
        return None
    return base64.urlsafe_b64encode(orjson.dumps(list(page.lines[-1].group))).decode().rstrip("=")


def _after(cursor: str | None) -> tuple[str | int, ...] | None:
    if cursor is None:
        return None
    try:
        read: Any = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, binascii.Error):
        read = None
    if not isinstance(read, list):
        raise BadRequest("cursor: this cursor was not made here", param="cursor")
    return tuple(read)
