"""`turnkeep sessions`: look at sessions, take one out or erase it, over the gateway's session API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.client import session_path
from gateway.commands.gateway_call import DEFAULT_URL, Url, call
from gateway.commands.options import Json, print_json, print_rows

app = typer.Typer(no_args_is_help=True, help="Sessions of a running gateway.")
SessionId = Annotated[str, typer.Argument(help="The session's id.")]


@app.command("list")
def list_sessions(
    limit: Annotated[int, typer.Option(min=1, max=100, help="At most this many, the last used first.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Where the page before ended.")] = None,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """The sessions of your tenant."""
    page = call(url, lambda gateway: gateway.get("/v1/sessions", limit=limit, cursor=cursor))
    if json:
        print_json(page)
        return
    rows = [(s["id"], s.get("title"), s.get("model"), s.get("status"), s.get("updated_at")) for s in page["data"]]
    print_rows(("ID", "TITLE", "MODEL", "STATUS", "UPDATED"), rows, empty="There is no session yet: `turnkeep chat`.")
    if page.get("next_cursor"):
        typer.echo(f"more: turnkeep sessions list --cursor {page['next_cursor']}", err=True)


@app.command()
def show(session_id: SessionId, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """A session and its turns."""

    async def read(gateway: Any) -> tuple[Any, list[Any]]:
        session = await gateway.get(session_path(session_id))
        turns, after = [], None
        while True:
            page = await gateway.get(session_path(session_id, "turns"), limit=100, after=after)
            turns += page["data"]
            if not page.get("has_more"):
                return session, turns
            after = page["data"][-1]["seq"]

    session, turns = call(url, read)
    if json:
        print_json({"session": session, "turns": turns})
        return
    print_rows(("FIELD", "VALUE"), [(name, value) for name, value in session.items() if value], empty="")
    rows = [(turn.get("seq"), turn.get("status"), turn_line(turn)) for turn in turns]
    print_rows(("TURN", "STATUS", "TEXT"), rows, empty="It has no turn yet.")


@app.command()
def delete(
    session_id: SessionId,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Erase a session with all its turns, for good, and print the receipt."""
    if not yes:
        typer.confirm(f"Erase session {session_id} and all its turns, for good?", abort=True)
    print_json(call(url, lambda gateway: gateway.delete(session_path(session_id))))


@app.command()
def export(
    session_id: SessionId,
    output: Annotated[Path | None, typer.Option(help="A file. Default: standard output.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """A session as JSON lines, as the gateway's import takes them."""
    lines = call(url, lambda gateway: gateway.get_bytes(session_path(session_id, "export")))
    if output is None:
        typer.echo(lines, nl=False)
    else:
        output.write_bytes(lines)
        typer.echo(f"{output}: {len(lines):,} bytes", err=True)


def turn_line(turn: dict[str, Any]) -> str:
    """The texts of a turn's items on one line, who said each, cut at 200 characters."""
    texts = []
    for item in [*turn.get("input", []), *turn.get("output", [])]:
        content = item.get("content")
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content or []]
        texts.append(f"{item.get('role') or item.get('type')}: {' '.join(part for part in parts if part)}")
    line = " | ".join(texts)
    return line if len(line) <= 200 else line[:199] + "…"
