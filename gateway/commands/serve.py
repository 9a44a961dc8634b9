"""`turnkeep serve`: the gateway, and with no upstream named the embedded engine.

settings -> address -> secret -> database at head -> model -> app -> the greeting, once all of it answers
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gateway.commands.greeting import greeting
from gateway.commands.listening import listen, run_until_signal
from gateway.commands.model_folder import ensure_model
from gateway.commands.options import Config, Database, settings_of
from gateway.commands.storage import first_key, migrate_database, secret_of
from gateway.logs import write_log


def serve(
    upstream: Annotated[
        list[str] | None,
        typer.Option(help="URL of an engine that runs elsewhere, such as http://HOST:8000; may be repeated."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model of the embedded engine: a name or a folder.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    config: Config = None,
    database: Database = None,
) -> None:
    """Run the gateway. Without an upstream it starts an engine of its own."""
    settings = settings_of(config, upstreams=upstream or None, model=model, host=host, port=port, database_url=database)
    write_log(settings.log_level)
    with listen(settings.host, settings.port) as listener:
        secret = secret_of(settings)
        revision = migrate_database(settings)
        key = first_key(settings, secret)
        if settings.embedded:
            settings = ensure_model(settings, progress=lambda text: typer.echo(text, err=True))
        from gateway.app import create_app  # all of the gateway, which the other words do not need

        host_port = listener.getsockname()[:2]
        run_until_signal(
            create_app(settings),
            listener,
            grace_s=settings.grace_s,
            on_ready=lambda: typer.echo(greeting(settings, host_port, key, revision)),
        )
    sys.stdout.flush()
