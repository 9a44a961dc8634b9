"""`turnkeep keys`: API keys, made, rotated and revoked in the database that the gateway uses."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from gateway.commands.failure import CommandFailed, ExitCode
from gateway.commands.options import Config, Database, Json, date, print_json, print_rows, settings_of
from gateway.commands.storage import every_page, secret_of, with_store
from gateway.shown import key_json
from gateway.store.audit_records import by_command
from gateway.store.key_records import KeyOver, KeyRecord, LastAdminKey
from gateway.tenancy import DEFAULT_TENANT, ID_LENGTH, SCOPES, USER_SCOPES, new_key, successor

if TYPE_CHECKING:
    from gateway.store.sessions import Store

T = TypeVar("T")
app = typer.Typer(no_args_is_help=True, help="API keys. A key is shown once, when it is made.")
Tenant = Annotated[str, typer.Option(help="Whose key it is: tenants see nothing of each other.")]
OfTenant = Annotated[str | None, typer.Option("--tenant", help="Only if it is a key of this tenant.")]
Key = Annotated[str, typer.Argument(help="The key's first characters, as `turnkeep keys list` shows them.")]
Force = Annotated[bool, typer.Option("--force", help="Even where no admin key is left that works.")]
KEPT = "Keep it now: only its digest is stored, and it cannot be shown again."


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
    """Make a key and print it, this once. A tenant that is not there yet is made with it."""
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
    line = by_command(
        "key.create", record.id, tenant, scopes=" ".join(sorted(record.scopes)), expires_at=record.expires_at
    )
    with_store(settings, lambda store: store.add_key(record, line=line))
    if json:
        print_json({"key": key, **key_json(record, now)})
        return
    typer.echo(key)
    typer.echo(KEPT, err=True)


@app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's keys.")] = None,
    json: Json = False,
    config: Config = None,
    database: Database = None,
) -> None:
    """The keys by their first characters; the keys themselves are stored nowhere."""

    async def read(store: Store) -> list[KeyRecord]:
        async def page(cursor: str | None) -> tuple[tuple[KeyRecord, ...], str | None]:
            found = await store.list_keys(tenant, limit=100, cursor=cursor)
            return found.keys, found.next_cursor

        return await every_page(page)

    records, now = with_store(settings_of(config, database_url=database), read), time.time()
    if json:
        print_json([key_json(record, now) for record in records])
        return
    rows = [
        (
            r.id + "...",
            r.tenant_id,
            r.name,
            " ".join(sorted(r.scopes)),
            date(r.created_at),
            date(r.last_used_at),
            _state(r, now),
        )
        for r in records
    ]
    columns = ("KEY", "TENANT", "NAME", "SCOPES", "CREATED", "LAST USED", "STATE")
    print_rows(columns, rows, empty="There is no key yet: `turnkeep keys create` makes one.")


@app.command()
def rotate(
    key: Key,
    grace: Annotated[
        float | None,
        typer.Option(
            help="Seconds that the old key goes on working; 0 ends it at once. Default: `key_grace_s`.",
            min=0.0,
            max=2_592_000.0,
        ),
    ] = None,
    force: Force = False,
    tenant: OfTenant = None,
    json: Json = False,
    config: Config = None,
    database: Database = None,
) -> None:
    """Make a key in the place of one, with its tenant, name, scopes and end, and print it, this once."""
    settings = settings_of(config, database_url=database)
    secret, grace_s = secret_of(settings), settings.key_grace_s if grace is None else grace
    made: list[str] = []

    async def rotated(store: Store, old: KeyRecord) -> tuple[KeyRecord, KeyRecord] | None:
        fresh, new = successor(secret, old, now=time.time())
        made.append(fresh)
        line = by_command("key.rotate", old.id, old.tenant_id, replaced_by=new.id, grace_s=grace_s, force=force)
        return await store.rotate_key(old, new, grace_s=grace_s, force=force, line=line)

    old, new = with_store(settings, _on(key, tenant, rotated))
    if json:
        now = time.time()
        print_json({"key": made[-1], **key_json(new, now), "old": key_json(old, now)})
        return
    typer.echo(made[-1])
    typer.echo(f"{KEPT}\n{old.id}... ends {date(old.expires_at)}", err=True)


@app.command()
def revoke(
    key: Key,
    force: Force = False,
    tenant: OfTenant = None,
    json: Json = False,
    config: Config = None,
    database: Database = None,
) -> None:
    """End a key, for good. Running gateways refuse it within seconds."""

    async def revoked(store: Store, known: KeyRecord) -> KeyRecord | None:
        line = by_command("key.revoke", known.id, known.tenant_id, force=force)
        return await store.revoke_key(known.tenant_id, known.id, force=force, line=line)

    record = with_store(settings_of(config, database_url=database), _on(key, tenant, revoked))
    if json:
        print_json(key_json(record, time.time()))
        return
    typer.echo(f"{record.id}... is revoked")


def _on(
    key: str, tenant: str | None, work: Callable[[Store, KeyRecord], Awaitable[T | None]]
) -> Callable[[Store], Awaitable[T]]:
    """`work` on the key that the command line names. Raises CommandFailed where there is none, or it is refused."""
    key_id = key.removesuffix("...")[:ID_LENGTH]

    async def found(store: Store) -> T:
        known = await store.key_named(key_id)
        done = None
        if known is not None and tenant in (None, known.tenant_id):
            try:
                done = await work(store, known)
            except KeyOver as error:
                after = f": {error.key.replaced_by} was made for it already" if error.state == "ending" else ""
                raise CommandFailed(ExitCode.REFUSED, f"{error}{after}.") from error
            except LastAdminKey as error:
                raise CommandFailed(
                    ExitCode.REFUSED, f"{error}: make another one first (`keys create --admin`), or --force."
                ) from error
        if done is None:
            whose = "There is" if tenant is None else f"Tenant {tenant} has"
            raise CommandFailed(
                ExitCode.REFUSED, f"{whose} no key {key_id}: `turnkeep keys list` shows those that there are."
            )
        return done

    return found


def _state(record: KeyRecord, now: float) -> str:
    by = f", replaced by {record.replaced_by}" if record.replaced_by else ""
    match record.state(now):
        case "revoked":
            return f"revoked {date(record.revoked_at)}{by}"
        case "expired":
            return f"ended {date(record.expires_at)}{by}"
        case _:
            return f"good{by}" if record.expires_at is None else f"ends {date(record.expires_at)}{by}"
