"""`turnkeep limits`: what tenants and keys may use, set in the database that the gateways use."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from gateway.commands.failure import CommandFailed, ExitCode
from gateway.commands.options import Config, Database, Json, print_json, print_rows, settings_of
from gateway.commands.storage import with_store
from gateway.store.audit_records import by_command
from gateway.store.limit_records import LIMITS, MOST, NONE, TENANT, Holder, Limited, Limits
from gateway.store.sessions import Store

app = typer.Typer(no_args_is_help=True, help="What tenants and keys may use.")
Tenant = Annotated[str, typer.Argument(help="The tenant's name.")]
Key = Annotated[str | None, typer.Option(help="One of its keys, by its first characters; default: the whole tenant.")]
NO_LIMIT = "none"


@app.command("list")
def list_limits(json: Json = False, config: Config = None, database: Database = None) -> None:
    """All that are set."""
    found = with_store(settings_of(config, database_url=database), lambda store: store.list_limits())
    if json:
        print_json([one.as_json() for one in found])
        return
    rows = [(one.tenant_id, one.key_id, *(getattr(one.limits, name) for name in LIMITS)) for one in found]
    numbers = ("REQUESTS/MIN", "TOKENS/MIN", "TURNS AT ONCE", "SESSIONS", "BYTES", "TOKENS/MONTH", "KV BYTES")
    print_rows(("TENANT", "KEY", *numbers), rows, empty="There is no limit: `turnkeep limits set` sets one.")


@app.command("set")
def set_limits(
    tenant: Tenant,
    key: Key = None,
    requests_per_minute: Annotated[str | None, typer.Option(help="Requests that ask a model for something.")] = None,
    tokens_per_minute: Annotated[str | None, typer.Option(help="Prompt and output tokens.")] = None,
    concurrent_turns: Annotated[str | None, typer.Option(help="Turns that run at once.")] = None,
    sessions: Annotated[str | None, typer.Option(help="Sessions that are stored.")] = None,
    stored_bytes: Annotated[str | None, typer.Option(help="Bytes of their items and token ids.")] = None,
    month_tokens: Annotated[str | None, typer.Option(help="Tokens in a calendar month, UTC.")] = None,
    kv_bytes: Annotated[str | None, typer.Option(help="Bytes of K/V that replicas keep of their sessions.")] = None,
    json: Json = False,
    config: Config = None,
    database: Database = None,
) -> None:
    """Set the limits that are named, each a number or `none`; the others stay. Gateways heed them within seconds."""
    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_turns": concurrent_turns,
        "sessions": sessions,
        "stored_bytes": stored_bytes,
        "month_tokens": month_tokens,
        "kv_bytes": kv_bytes,
    }
    named = {name: _number(name, value) for name, value in given.items() if value is not None}
    if not named:
        raise CommandFailed(ExitCode.SETTINGS, "Nothing was set: name a limit, as --requests-per-minute 60.")
    holder = _holder(tenant, key)

    async def change(store: Store) -> Limits:
        await _check(store, holder)
        wanted = replace(await _of(store, holder), **named)
        line = by_command("limits.set", holder.key_id or holder.tenant_id, holder.tenant_id)
        await store.set_limits(holder, wanted, line=line)
        return wanted

    wanted = with_store(settings_of(config, database_url=database), change)
    if json:
        print_json(Limited(holder.tenant_id, holder.key_id, wanted, None).as_json())
        return
    print_rows(("LIMIT", "VALUE"), list(wanted.named()), empty=f"{holder} has no limit now.")


@app.command()
def remove(tenant: Tenant, key: Key = None, config: Config = None, database: Database = None) -> None:
    """Remove all limits of a tenant, or of one of its keys."""
    holder = _holder(tenant, key)
    line = by_command("limits.remove", holder.key_id or holder.tenant_id, holder.tenant_id)
    settings = settings_of(config, database_url=database)
    if not with_store(settings, lambda store: store.set_limits(holder, NONE, line=line)):
        raise CommandFailed(ExitCode.REFUSED, f"{holder} has no limit: `turnkeep limits list` shows those there are.")
    typer.echo(f"{holder} has no limit now")


def _holder(tenant: str, key: str | None) -> Holder:
    return Holder(tenant, key.removesuffix("...")[:11] if key is not None else TENANT)


def _number(name: str, value: str) -> int | None:
    if value == NO_LIMIT:
        return None
    if not (value.isascii() and value.isdecimal()) or int(value) > MOST:
        option = "--" + name.replace("_", "-")
        raise CommandFailed(ExitCode.SETTINGS, f"{option} is a number from 0 to {MOST}, or none; not {value[:32]!r}.")
    return int(value)


async def _of(store: Store, holder: Holder) -> Limits:
    found = await store.list_limits(holder.tenant_id)
    return next((one.limits for one in found if one.key_id == holder.key_id), NONE)


async def _check(store: Store, holder: Holder) -> None:
    """A limit for nobody would look as if it held."""
    if await store.get_tenant(holder.tenant_id) is None:
        raise CommandFailed(ExitCode.REFUSED, f"There is no tenant {holder.tenant_id}.")
    key = await store.key_named(holder.key_id) if holder.key_id != TENANT else None
    if holder.key_id != TENANT and (key is None or key.tenant_id != holder.tenant_id):
        raise CommandFailed(
            ExitCode.REFUSED, f"Tenant {holder.tenant_id} has no key {holder.key_id}: see `turnkeep keys list`."
        )
