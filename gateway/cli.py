"""The `turnkeep` command: its words, and how failures end. What a word does stands in gateway/commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from gateway.commands import (
    audit,
    chat,
    check,
    engine,
    erase,
    keys,
    limits,
    migrate,
    models,
    replicas,
    serve,
    sessions,
    tenants,
    usage,
)
from gateway.commands.failure import CommandFailed

app = typer.Typer(
    name="turnkeep",
    help="A conversation-aware session gateway in front of LLM inference engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(serve.serve)
app.command()(engine.engine)
app.command()(migrate.migrate)
app.command()(check.check)
app.command()(chat.chat)
app.command()(audit.audit)
app.command()(usage.usage)
app.command()(erase.erase)
app.add_typer(models.app, name="models")
app.add_typer(keys.app, name="keys")
app.add_typer(tenants.app, name="tenants")
app.add_typer(limits.app, name="limits")
app.add_typer(sessions.app, name="sessions")
app.add_typer(replicas.app, name="replicas")


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends the process: 0, or a code that docs/commands.md lists."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="turnkeep")
    except CommandFailed as failure:
        typer.echo(failure.message, err=True)
        sys.exit(int(failure.code))
    except BrokenPipeError:  # whoever read our output has enough
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
