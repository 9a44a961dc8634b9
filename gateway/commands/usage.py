"""`turnkeep usage`: what was used and what it cost, from the ledger of a running gateway."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from gateway.api.csv_lines import csv_of
from gateway.api.usage_shapes import columns_of, row_of
from gateway.client import GatewayClient
from gateway.commands.failure import CommandFailed, ExitCode
from gateway.commands.gateway_call import DEFAULT_URL, Url, call
from gateway.commands.options import Json, print_json, print_rows

PAGE = 1000
COLUMNS = ("turns", "requests", "prompt_tokens", "cached_tokens", "output_tokens", "cost")


def usage(
    by: Annotated[str, typer.Option(help="day, model, key, user, session; several with commas.")] = "day",
    since: Annotated[str | None, typer.Option(help="First day, YYYY-MM-DD. Default: the month's first.")] = None,
    until: Annotated[str | None, typer.Option(help="The day after the last. Default: tomorrow.")] = None,
    all_tenants: Annotated[
        bool, typer.Option("--all-tenants", help="Of every tenant, with an admin's key; `--by` takes tenant then.")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV, which no spreadsheet takes for formulas.")] = False,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """What was used: turns, tokens and their cost. The gateway's own work stands in columns of its own."""
    if csv and json:
        raise CommandFailed(ExitCode.SETTINGS, "--csv and --json exclude each other.")
    path = "/admin/v1/usage" if all_tenants else "/v1/usage"
    asked = {"group_by": by, "since": since, "until": until}
    found = call(url, lambda gateway: _pages(gateway, path, asked))
    names = [name.strip() for name in by.split(",")]
    if csv:
        rows = (row_of(line, names, found["currency"]) for line in found["data"])
        sys.stdout.buffer.write(csv_of(columns_of(names), rows))
        return
    if json:
        print_json(found)
        return
    columns = (
        *(name.upper() for name in names),
        "TURNS",
        "REQUESTS",
        "PROMPT",
        "CACHED",
        "OUTPUT",
        "COST",
        "OWN TOKENS",
    )
    print_rows(columns, [_row(line, names) for line in found["data"]], empty="Nothing was used in that time.")
    if any(line["cost"] is not None for line in found["data"]):
        typer.echo(f"cost in {found['currency']}, by the prices as they are now", err=True)


async def _pages(gateway: GatewayClient, path: str, asked: dict[str, str | None]) -> dict[str, Any]:
    found: dict[str, Any] = await gateway.get(path, limit=PAGE, **asked)
    cursor = found["next_cursor"]
    while cursor is not None:
        page = await gateway.get(path, limit=PAGE, cursor=cursor, **asked)
        found["data"] += page["data"]
        cursor = page["next_cursor"]
    return found | {"has_more": False, "next_cursor": None}


def _row(line: dict[str, Any], names: list[str]) -> list[object]:
    own = line["own"]["prompt_tokens"] + line["own"]["output_tokens"]
    return [*(line[name] for name in names), *(line[name] for name in COLUMNS), own or None]
