"""The options that several commands share, and the settings they make."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.commands.failure import CommandFailed, ExitCode
from gateway.configure import SettingsError, load_settings
from gateway.settings import Settings

Config = Annotated[Path | None, typer.Option("--config", help="The TOML file. Default: turnkeep.toml here, if any.")]
Database = Annotated[str | None, typer.Option("--database", help="sqlite:///PATH or postgresql://USER@HOST/NAME.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def settings_of(config: Path | None, **command_line: Any) -> Settings:
    """Settings with what the command line named (None: not named). Raises CommandFailed."""
    try:
        return load_settings(command_line, environ=os.environ, config=config)
    except SettingsError as error:
        lines = "\n".join(f"  {problem}" for problem in error.problems)
        raise CommandFailed(
            ExitCode.SETTINGS, f"The settings cannot be used:\n{lines}\ndocs/settings.md says what each may be."
        ) from error


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """A table on a terminal, without columns that hold nothing; elsewhere tab-separated lines, for other programs."""
    if not rows:
        typer.echo(empty, err=True)
        return
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            typer.echo("\t".join("" if value is None else _one_line(str(value)) for value in row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    told = filled(rows)
    for nth in told:
        table.add_column(columns[nth], overflow="fold", min_width=len(columns[nth]), no_wrap=nth == 0)
    for row in rows:
        table.add_row(*(Text("" if row[nth] is None else _one_line(str(row[nth]))) for nth in told))
    Console().print(table)


def filled(rows: Sequence[Sequence[object]]) -> list[int]:
    """The columns in which some row says something."""
    return [
        nth for nth, column in enumerate(zip(*rows, strict=True)) if any(value not in (None, "") for value in column)
    ]


def date(instant: float | None) -> str:
    """Seconds since 1970 as people read them, in UTC."""
    return "" if instant is None else datetime.fromtimestamp(instant, UTC).strftime("%Y-%m-%d %H:%M")


def moment(instant: float) -> str:
    """Seconds since 1970 as people read them, in UTC, to the millisecond."""
    return datetime.fromtimestamp(instant, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False, default=str))


def _one_line(text: str) -> str:
    """Without control characters: what a title holds must not move the cursor."""
    return "".join(character if character.isprintable() else " " for character in text)
