"""`turnkeep sessions`: look at sessions, take one out or erase it, over the gateway's session API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.client import session_path
from gateway.commands.gateway_call import DEFAULT_URL, Url, call
from gateway.commands.options import Json, date, print_json, print_rows

app = typer.Typer(no_args_is_help=True, help="Sessions of a running gateway.")
SessionId = Annotated[str, typer.Argument(help="The session's id.")]


@app.command("list")
def list_sessions(
    limit: Annotated[int, typer.Option(min=1, max=100, help="At most this many, the last used first.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Where the page before ended.")] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Archived ones too.")] = False,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """The sessions of your tenant."""
    wanted = "true" if archived else None
    page = call(url, lambda gateway: gateway.get("/v1/sessions", limit=limit, cursor=cursor, archived=wanted))
    if json:
        print_json(page)
        return
    rows = [(s["id"], s.get("title"), s.get("model"), s.get("status"), date(s.get("updated_at"))) for s in page["data"]]
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
    fields = [(name, date(value) if name.endswith("_at") else value) for name, value in session.items() if value]
    print_rows(("FIELD", "VALUE"), fields, empty="")
    rows = [(turn.get("seq"), turn.get("status"), turn_line(turn)) for turn in turns]
    print_rows(("TURN", "STATUS", "TEXT"), rows, empty="It has no turn yet.")


@app.command()
def compact(
    session_id: SessionId,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only plan, and show the price of each way.")] = False,
    strategy: Annotated[
        str | None, typer.Option(help="summarize, extract or trim; default: the session's own.")
    ] = None,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Compact a session now: old turns become short summaries. The turns themselves stay."""
    asked: dict[str, Any] = {"dry_run": dry_run} | ({"strategy": strategy} if strategy else {})
    made = call(url, lambda gateway: gateway.post(session_path(session_id, "compact"), asked))
    if json:
        print_json(made)
        return
    typer.echo(compaction_line(made))
    rows = [
        (o["way"], o["tokens_after"], round(o["worth"]), o["why"] or "open") for o in made["plan"].get("options", ())
    ]
    print_rows(("WAY", "TOKENS AFTER", "WORTH", "NOT OPEN"), rows, empty="")


@app.command()
def archive(session_id: SessionId, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Put a session aside: hidden from lists, without turns, its KV given up. Its words stay."""
    _standing(call(url, lambda gateway: gateway.post(session_path(session_id, "archive"))), json)


@app.command()
def unarchive(session_id: SessionId, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Take an archived session up again."""
    _standing(call(url, lambda gateway: gateway.post(session_path(session_id, "unarchive"))), json)


def _standing(session: dict[str, Any], json: bool) -> None:
    if json:
        print_json(session)
        return
    archived = f"archived {date(session['archived_at'])}" if session["archived_at"] is not None else session["status"]
    typer.echo(f"{session['id']}: {archived}")


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
def suspend(session_id: SessionId, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Put a session's KV down, off the device of its replica: into a file there, or its host memory."""
    _lying(call(url, lambda gateway: gateway.post(session_path(session_id, "suspend"))), json)


@app.command()
def resume(session_id: SessionId, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Bring a suspended session's KV to where its next turn takes it from; never necessary."""
    _lying(call(url, lambda gateway: gateway.post(session_path(session_id, "resume"))), json)


def _lying(told: dict[str, Any], json: bool) -> None:
    if json:
        print_json(told)
        return
    print_rows(("FIELD", "VALUE"), [(name, value) for name, value in told.items() if value is not None], empty="")


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


def compaction_line(made: dict[str, Any]) -> str:
    """What came of it, in one line."""
    numbers = made.get("report") or made["plan"]
    before, after = numbers.get("tokens_before"), numbers.get("tokens_after")
    line = str(made["status"]) + (f" {made['id']}" if made.get("id") else "")
    if made.get("reason"):
        line += f": {made['reason']}" + (f", {made['message']}" if made.get("message") else "")
    elif made.get("error"):
        line += f": {made['error']['code']}, {made['error']['message']}"
    return line + (f"; {before:,} -> {after:,} tokens" if before is not None and after is not None else "")


def turn_line(turn: dict[str, Any]) -> str:
    """The texts of a turn's items on one line, who said each, cut at 200 characters."""
    texts = []
    for item in [*turn.get("input", []), *turn.get("output", [])]:
        content = item.get("content")
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content or []]
        texts.append(f"{item.get('role') or item.get('type')}: {' '.join(part for part in parts if part)}")
    line = " | ".join(texts)
    return line if len(line) <= 200 else line[:199] + "…"
