"""`turnkeep erase`: erase an end user everywhere, or look at receipts of erasures, over the gateway's API."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import typer

from gateway.client import GatewayClient
from gateway.commands.gateway_call import DEFAULT_URL, Url, call
from gateway.commands.options import Json, date, print_json, print_rows

POLL_S = 0.5  # of a receipt that is waited for


def erase(
    user: Annotated[str | None, typer.Option(help="The end user, as sessions have it in `user_ref`.")] = None,
    receipt: Annotated[str | None, typer.Option(help="Erase nothing: show this receipt.")] = None,
    receipts: Annotated[bool, typer.Option("--receipts", help="Erase nothing: list the latest receipts.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for replicas that are away.")] = 0.0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Erase an end user: every session with all that was kept of it anywhere, for good, and print the receipt."""
    if (user is not None) + (receipt is not None) + receipts != 1:
        raise typer.BadParameter("say one of --user, --receipt and --receipts")
    if receipts:
        _list(call(url, lambda gateway: gateway.get("/v1/erasures")), json)
        return
    if user is not None:
        if not yes and not json:
            typer.confirm(f"Erase all sessions of end user {user!r}, for good?", abort=True)
        told = call(url, lambda gateway: _erased(gateway, {"user": user}, wait))
    else:
        told = call(url, lambda gateway: _awaited(gateway, receipt or "", wait))
    if json:
        print_json(told)
    else:
        _show(told)


async def _erased(gateway: GatewayClient, asked: dict[str, Any], wait_s: float) -> Any:
    told = await gateway.post("/v1/erasures", asked)
    return told if told["status"] == "done" else await _awaited(gateway, told["id"], wait_s)


async def _awaited(gateway: GatewayClient, erasure_id: str, wait_s: float) -> Any:
    until = time.monotonic() + wait_s
    while True:
        told = await gateway.get(f"/v1/erasures/{erasure_id}")
        if told["status"] == "done" or time.monotonic() >= until:
            return told
        await asyncio.sleep(POLL_S)


def _show(told: dict[str, Any]) -> None:
    rows = [(table, count) for table, count in told["erased"].items() if count]
    typer.echo(f"{told['id']}: {told['status']}, {told['sessions']} sessions, {date(told['at'])}")
    print_rows(("TABLE", "ROWS"), rows, empty="No row was left.")
    places = [
        (name, place["state"], place.get("left") or "", ", ".join(f"{n} {tier}" for tier, n in _gone(place)))
        for name, place in told["places"].items()
    ]
    print_rows(("PLACE", "STATE", "LEFT", "BLOCKS GONE"), places, empty="")


def _gone(place: dict[str, Any]) -> list[tuple[str, int]]:
    return [(tier, count) for tier, count in place.get("gone", {}).items() if count]


def _list(page: dict[str, Any], json: bool) -> None:
    if json:
        print_json(page)
        return
    rows = [
        (r["id"], r["scope"], r["session_id"] or r["user_digest"], r["sessions"], r["status"], date(r["at"]))
        for r in page["data"]
    ]
    print_rows(("ID", "SCOPE", "OF", "SESSIONS", "STATUS", "AT"), rows, empty="Nothing was erased yet.")
