"""Which gateway the commands that are its clients speak to, and how its refusals are told."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from gateway.client import GatewayClient, Refused, Unreachable
from gateway.commands.failure import CommandFailed, ExitCode

T = TypeVar("T")
Url = Annotated[
    str, typer.Option("--url", envvar="TURNKEEP_URL", help="The gateway. Its key is read from TURNKEEP_API_KEY.")
]
DEFAULT_URL = "http://127.0.0.1:8080"


def call(url: str, work: Callable[[GatewayClient], Awaitable[T]]) -> T:
    """Do `work` with a client of the gateway at `url`. Raises CommandFailed."""

    async def connected() -> T:
        client = GatewayClient(url, os.environ.get("TURNKEEP_API_KEY") or None)
        try:
            return await work(client)
        finally:
            await client.aclose()

    try:
        return asyncio.run(connected())
    except (Unreachable, Refused) as error:
        raise told(url, error) from error
    except ValueError as error:  # of the URL
        raise CommandFailed(ExitCode.UNREACHABLE, f"{error}. --url is written http://HOST:PORT") from error


def told(url: str, error: Unreachable | Refused) -> CommandFailed:
    if isinstance(error, Unreachable):
        return CommandFailed(
            ExitCode.UNREACHABLE,
            f"No gateway answered: {error}. Start one with `turnkeep serve`, or name it with --url or TURNKEEP_URL.",
        )
    if error.status == 401:
        why = "export TURNKEEP_API_KEY=tk-...; `turnkeep keys create`, where the gateway's database is, makes a key"
        return CommandFailed(ExitCode.REFUSED, f"{url} wants an API key: {error}\n{why}")
    request = f" (request {error.request_id})" if error.request_id else ""
    return CommandFailed(ExitCode.REFUSED, f"{url} refused: {error}{request}")
