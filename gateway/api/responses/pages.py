"""Pages of items as OpenAI's lists have them: `after` an id, `limit`, newest first unless asked otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query

from gateway.api.responses.asked import ENCRYPTED, MOOT
from gateway.errors import BadRequest, NotFound

Order = Annotated[Literal["asc", "desc"], Query(description="desc: newest first.")]
Limit = Annotated[int, Query(ge=1, le=100, description="Most items of one page.")]
After = Annotated[str | None, Query(max_length=128, description="The last item of the page before.")]
Include = Annotated[
    list[str] | None, Query(alias="include[]", description="reasoning.encrypted_content: sealed beside the text.")
]
IncludePlain = Annotated[list[str] | None, Query(alias="include", description="The same.")]


def included(*named: Sequence[str] | None) -> frozenset[str]:
    """Raises BadRequest for what is not to be had of an item that is kept."""
    found = frozenset(name for names in named for name in names or ())
    for name in found:
        if name != ENCRYPTED and name not in MOOT:
            raise BadRequest(
                f"include: {name[:64]!r} is not kept; there is {ENCRYPTED}",
                code="unsupported_parameter",
                param="include",
            )
    return found


def page(items: Sequence[dict[str, Any]], *, after: str | None, limit: int, order: str) -> dict[str, Any]:
    """A page of `items`, which come oldest first. Raises NotFound for an `after` that is none of them."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        start = next((n for n, item in enumerate(ordered, 1) if item["id"] == after), 0)
        if not start:
            raise no_item(after, param="after")
    return listed(ordered[start : start + limit], has_more=len(ordered) > start + limit)


def listed(data: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": list(data),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def no_item(item_id: str, *, param: str = "item_id") -> NotFound:
    return NotFound(f"no item {item_id[:128]!r} here", code="item_not_found", param=param)
