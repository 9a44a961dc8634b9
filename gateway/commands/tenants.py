"""`turnkeep tenants`: whose sessions and keys there are, in the database that the gateway uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gateway.commands.failure import CommandFailed, ExitCode
from gateway.commands.options import Config, Database, Json, date, print_json, print_rows, settings_of
from gateway.commands.storage import every_page, with_store
from gateway.shown import tenant_json
from gateway.store.audit_records import by_command
from gateway.store.key_records import TenantRecord
from gateway.tenancy import TENANT, tenant_refusal

if TYPE_CHECKING:
    from gateway.store.sessions import Store

app = typer.Typer(no_args_is_help=True, help="Tenants: they see nothing of each other.")
TenantId = Annotated[str, typer.Argument(help="The tenant's id: 1 to 64 of A-Z a-z 0-9 _ . -")]


@app.command("list")
def list_tenants(json: Json = False, config: Config = None, database: Database = None) -> None:
    """The tenants, the newest first."""

    async def read(store: Store) -> list[TenantRecord]:
        async def page(cursor: str | None) -> tuple[tuple[TenantRecord, ...], str | None]:
            found = await store.list_tenants(limit=100, cursor=cursor)
            return found.tenants, found.next_cursor

        return await every_page(page)

    _told(with_store(settings_of(config, database_url=database), read), json)


@app.command()
def show(tenant: TenantId, json: Json = False, config: Config = None, database: Database = None) -> None:
    """One tenant."""
    settings = settings_of(config, database_url=database)
    found = with_store(settings, lambda store: store.get_tenant(tenant)) if TENANT.fullmatch(tenant) else None
    if found is None:
        raise CommandFailed(ExitCode.REFUSED, f"There is no tenant {tenant[:64]!r}: `turnkeep tenants list` shows all.")
    if json:
        print_json(tenant_json(found))
        return
    _told([found], json=False)


@app.command()
def create(
    tenant: TenantId,
    name: Annotated[str | None, typer.Option(help="What people call it. Default: its id.")] = None,
    json: Json = False,
    config: Config = None,
    database: Database = None,
) -> None:
    """Make a tenant. `turnkeep keys create --tenant` makes one too, where it is new."""
    settings = settings_of(config, database_url=database)
    if why := tenant_refusal(tenant):
        raise CommandFailed(ExitCode.SETTINGS, f"No tenant was made: {why}")

    async def made(store: Store) -> TenantRecord | None:
        line = by_command("tenant.create", tenant, tenant)
        added = await store.add_tenant(tenant, name or tenant, line=line)
        return await store.get_tenant(tenant) if added else None

    found = with_store(settings, made)
    if found is None:
        raise CommandFailed(ExitCode.REFUSED, f"There is a tenant {tenant} already.")
    if json:
        print_json(tenant_json(found))
    else:
        typer.echo(f"{found.id} is made: `turnkeep keys create --tenant {found.id}` makes a key for it")


def _told(records: list[TenantRecord], json: bool) -> None:
    if json:
        print_json([tenant_json(record) for record in records])
        return
    rows = [(r.id, r.name, date(r.created_at), r.keys) for r in records]
    print_rows(("ID", "NAME", "CREATED", "WORKING KEYS"), rows, empty="There is no tenant.")
