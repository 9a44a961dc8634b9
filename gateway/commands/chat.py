"""`turnkeep chat`: a conversation on the terminal. Only the new message is sent; the gateway has the history."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

import typer

from gateway.client import GatewayClient, Refused, session_path
from gateway.commands.failure import CommandFailed, ExitCode
from gateway.commands.gateway_call import DEFAULT_URL, Url, call

ENDS = frozenset({"session.turn.completed", "session.turn.incomplete", "session.turn.failed"})
HELP = "An empty line or Ctrl-D ends the conversation; it stays in the gateway, under its session id."


def chat(
    message: Annotated[str | None, typer.Argument(help="Say only this, and end.")] = None,
    session: Annotated[str | None, typer.Option(help="Go on with this session. Default: a new one.")] = None,
    model: Annotated[str | None, typer.Option(help="Model of a new session. Default: the gateway's first.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of a new session.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Talk to a model through a session; each answer streams, with its tokens and its TTFT after it."""
    call(url, lambda gateway: _converse(gateway, message, session, model, system))


async def _converse(
    gateway: GatewayClient, message: str | None, session: str | None, model: str | None, system: str | None
) -> None:
    if session is None:
        session = await _new_session(gateway, model, system)
    typer.secho(f"session {session}" if message else f"session {session}. {HELP}", dim=True, err=True)
    async for said in _messages(message):
        await _turn(gateway, session, said)


async def _new_session(gateway: GatewayClient, model: str | None, system: str | None) -> str:
    wanted = {name: value for name, value in (("model", model), ("system", system)) if value is not None}
    made = await gateway.post("/v1/sessions", wanted)
    return str(made["id"])


async def _messages(only: str | None) -> AsyncIterator[str]:
    if only is not None:
        yield only
        return
    while True:
        if sys.stdin.isatty():
            typer.secho("> ", bold=True, nl=False, err=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


async def _turn(gateway: GatewayClient, session: str, said: str) -> None:
    """Print one answer as it streams, then what it cost."""
    body = {"input": said, "stream": True}
    started, first = time.monotonic(), None
    try:
        async with aclosing(gateway.events(session_path(session, "turns"), body)) as events:
            async for event in events:
                if text := event_text(event):
                    first = first or time.monotonic()
                    typer.echo(text, nl=False)
                    sys.stdout.flush()
                elif ended := event_end(event):
                    typer.echo()
                    ttft = None if first is None else first - started
                    typer.secho(turn_summary(ended, ttft, time.monotonic() - started), dim=True, err=True)
                    return
    except Refused as error:
        if error.code not in ("session_busy", "context_length_exceeded"):
            raise
        typer.secho(str(error), fg="red", err=True)
        return
    raise CommandFailed(ExitCode.UNREACHABLE, "The stream ended without an end; `turnkeep sessions show` has the turn.")


def event_text(event: dict[str, Any]) -> str:
    """The piece of answer in an event, "" for other events."""
    return str(event.get("delta", "")) if event.get("type") == "response.output_text.delta" else ""


def event_end(event: dict[str, Any]) -> dict[str, Any] | None:
    """The terminal event, or None while there is more."""
    return event if event.get("type") in ENDS else None


def turn_summary(end: dict[str, Any], ttft_s: float | None, total_s: float) -> str:
    """One line: tokens, cached tokens, TTFT, speed; or why the answer is not whole."""
    turn = end["turn"]
    usage = turn.get("usage") or {}
    prompt, output, cached = (usage.get(name) for name in ("prompt_tokens", "output_tokens", "cached_tokens"))
    told = []
    if turn["status"] != "completed":
        why = (turn.get("error") or {}).get("message") or turn.get("finish_reason")
        told.append(f"{turn['status']}: {why}")
    if prompt is not None:
        told.append(f"{prompt:,} prompt tokens" + ("" if cached is None else f", {cached:,} of them cached"))
    if output is not None:
        told.append(f"{output:,} answered")
    if ttft_s is not None:
        told.append(f"TTFT {ttft_s * 1000:,.0f} ms")
        if output and output > 1 and total_s > ttft_s:
            told.append(f"{(output - 1) / (total_s - ttft_s):.1f} tokens/s")
    return " · ".join(told)
