"""`turnkeep audit`: who did what, read in the database that the gateway uses."""

from __future__ import annotations

import json as json_text
import time
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.commands.failure import CommandFailed, ExitCode
from gateway.commands.options import Config, Database, Json, moment, print_json, print_rows, settings_of
from gateway.commands.storage import with_store
from gateway.shown import audit_json
from gateway.store.audit_records import AuditFilter, AuditPage, AuditRecord

if TYPE_CHECKING:
    from gateway.store.sessions import Store


def audit(
    tenant: Annotated[
        str | None, typer.Option(help="Only what is this tenant's; empty: only what is no tenant's.")
    ] = None,
    action: Annotated[str | None, typer.Option(help="Only this action, as key.rotate.")] = None,
    days: Annotated[float | None, typer.Option(help="Only the last so many days.", min=0.0)] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="At most this many lines, the newest first.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Where the page before ended.")] = None,
    json: Json = False,
    config: Config = None,
    database: Database = None,
) -> None:
    """The audit log: who did what to which object, and what came of it."""
    since = None if days is None else time.time() - days * 86_400
    filter = AuditFilter(tenant, action, since)
    settings = settings_of(config, database_url=database)

    async def read(store: Store) -> AuditPage:
        try:
            return await store.list_audit(limit=limit, cursor=cursor, filter=filter)
        except ValueError as error:
            raise CommandFailed(ExitCode.REFUSED, f"--cursor: {error}") from error

    page = with_store(settings, read)
    if json:
        print_json({"data": [audit_json(record) for record in page.records], "next_cursor": page.next_cursor})
        return
    columns = ("AT", "TENANT", "WHO", "ACTION", "TARGET", "OUTCOME", "DETAILS", "REQUEST")
    print_rows(columns, [_row(record) for record in page.records], empty="Nothing was done yet that is told here.")
    if page.next_cursor:
        typer.echo(f"more: turnkeep audit --cursor {page.next_cursor}", err=True)


def _row(record: AuditRecord) -> tuple[object, ...]:
    line = record.line
    details = json_text.dumps(dict(line.details)) if line.details else ""
    told = (line.tenant_id, line.who, line.action, line.object, line.outcome, details, line.request_id)
    return (moment(record.at), *told)
