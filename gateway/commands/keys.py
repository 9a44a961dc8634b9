"""`turnkeep keys`: API keys, made and revoked in the database that the gateway uses."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from gateway.commands.failure import CommandFailed, ExitCode
from gateway.commands.options import Config, Database, Json, date, print_json, print_rows, settings_of
from gateway.commands.storage import secret_of, with_store
from gateway.store.records import KeyRecord
from gateway.tenancy import DEFAULT_TENANT, SCOPES, USER_SCOPES, new_key

app = typer.Typer(no_args_is_help=True, help="API keys. A key is shown once, when it is made.")
Tenant = Annotated[str, typer.Option(help="Whose key it is: tenants see nothing of each other.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is for, to tell it from others.")] = "unnamed",
    admin: Annotated[bool, typer.Option("--admin", help="A key that may do everything.")] = False,
    scope: Annotated[list[str] | None, typer.Option(help="chat, sessions, read or admin; may be repeated.")] = None,
    tenant: Tenant = DEFAULT_TENANT,
    days: Annotated[float | None, typer.Option(help="The key ends after this many days.", min=0.0)] = None,
    json: Json = False,
    config: Config = None,
    database: Database = None,
) -> None:
    """Make a key and print it, this once."""
    settings = settings_of(config, database_url=database)
    scopes = SCOPES if admin else frozenset(scope or USER_SCOPES)
    now = time.time()
    expires_at = None if days is None else now + days * 86_400
    try:
        key, record = new_key(
            secret_of(settings), tenant_id=tenant, name=name, scopes=scopes, now=now, expires_at=expires_at
        )
    except ValueError as error:
        raise CommandFailed(ExitCode.SETTINGS, f"No key was made: {error}") from error
    with_store(settings, lambda store: store.add_key(record))
    if json:
        print_json({"key": key, **_told(record)})
        return
    typer.echo(key)
    typer.echo("Keep it now: only its digest is stored, and it cannot be shown again.", err=True)


@app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's keys.")] = None,
    json: Json = False,
    config: Config = None,
    database: Database = None,
) -> None:
    """The keys by their first characters; the keys themselves are stored nowhere."""
    records = with_store(settings_of(config, database_url=database), lambda store: store.list_keys(tenant))
    if json:
        print_json([_told(record) for record in records])
        return
    rows = [
        (
            r.id + "...",
            r.tenant_id,
            r.name,
            " ".join(sorted(r.scopes)),
            date(r.created_at),
            date(r.last_used_at),
            _state(r),
        )
        for r in records
    ]
    columns = ("KEY", "TENANT", "NAME", "SCOPES", "CREATED", "LAST USED", "STATE")
    print_rows(columns, rows, empty="There is no key yet: `turnkeep keys create` makes one.")


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="The key's first characters, as `turnkeep keys list` shows them.")],
    tenant: Tenant = DEFAULT_TENANT,
    config: Config = None,
    database: Database = None,
) -> None:
    """End a key, for good. Running gateways refuse it within seconds."""
    key_id = key.removesuffix("...")[:11]
    if not with_store(settings_of(config, database_url=database), lambda store: store.revoke_key(tenant, key_id)):
        raise CommandFailed(
            ExitCode.REFUSED, f"Tenant {tenant} has no key {key_id}: `turnkeep keys list` shows those that there are."
        )
    typer.echo(f"{key_id}... is revoked")


def _told(record: KeyRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "tenant": record.tenant_id,
        "name": record.name,
        "scopes": sorted(record.scopes),
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "revoked_at": record.revoked_at,
        "last_used_at": record.last_used_at,
    }


def _state(record: KeyRecord) -> str:
    if record.revoked_at is not None:
        return f"revoked {date(record.revoked_at)}"
    return "good" if record.expires_at is None else f"ends {date(record.expires_at)}"
