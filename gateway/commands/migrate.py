"""`turnkeep migrate`: bring the database to the schema of this version. `turnkeep serve` does so at its start, too."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.commands.options import Config, Database, settings_of
from gateway.commands.storage import migrate_database
from gateway.settings import masked_url


def migrate(
    to: Annotated[str, typer.Option(help="A revision, an older one included; `base` empties the database.")] = "head",
    config: Config = None,
    database: Database = None,
) -> None:
    """Bring the database to the schema of this version."""
    settings = settings_of(config, database_url=database)
    reached = migrate_database(settings, to)
    typer.echo(f"{masked_url(settings.database_url)} is at schema {reached or 'base (empty)'}")
