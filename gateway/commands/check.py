"""`turnkeep check`: whether a gateway could start here, and what each setting is and who set it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from gateway.commands.options import Config, Json, print_json, print_rows, settings_of


def check(
    explain: Annotated[bool, typer.Option("--explain", help="Show every setting with its value and source.")] = False,
    json: Json = False,
    config: Config = None,
) -> None:
    """Read the settings, and look at the address, the secret and the database. Changes nothing."""
    settings = settings_of(config)
    if explain:
        lines = settings.explain()
        if json:
            print_json([asdict(line) for line in lines])
        else:
            print_rows(("SETTING", "VALUE", "SOURCE"), [(e.name, e.value, e.source) for e in lines], empty="")
        return
    from gateway.commands.listening import listen
    from gateway.commands.model_folder import ECHO, need_engine_extra
    from gateway.commands.storage import schema_of

    listen(settings.host, settings.port).close()
    database = schema_of(settings)
    if settings.embedded and settings.model != ECHO:
        need_engine_extra()
    found = {"address": f"{settings.host}:{settings.port} is free", "database": database, "settings": "good"}
    if json:
        print_json(found)
    else:
        print_rows(("WHAT", "FOUND"), list(found.items()), empty="")
