"""`turnkeep replicas`: the replicas of a running gateway, added, drained and removed while it serves."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gateway.client import GatewayClient
from gateway.commands.failure import CommandFailed, ExitCode
from gateway.commands.gateway_call import DEFAULT_URL, Url, call
from gateway.commands.options import Json, moment, print_json, print_rows

app = typer.Typer(no_args_is_help=True, help="Replicas of a running gateway, and of all that share its database.")
ROUTE = "/admin/v1/replicas"
LOOK_EVERY_S = 0.5

Name = Annotated[str, typer.Argument(help="The replica's name, as `turnkeep replicas list` shows it.")]
Reason = Annotated[str, typer.Option(help="Why, for the replica's history.")]
Force = Annotated[bool, typer.Option("--force", help="Even where no other replica serves a model of it.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is drained, and tell how far it is meanwhile.")]


@app.command("list")
def list_replicas(json: Json = False, url: Url = DEFAULT_URL) -> None:
    """The replicas, how they are and how busy."""
    found = call(url, lambda gateway: gateway.get(ROUTE))
    if json:
        print_json(found)
        return
    rows = [_row(replica) for replica in found["data"]]
    columns = ("NAME", "STATE", "KIND", "MODELS", "RUN+WAIT", "CACHE", "RESIDENT", "RIGHT", "SOURCE", "UNSEEN", "NOTE")
    print_rows(columns, rows, empty="There is no replica: `turnkeep replicas add URL` names one.")


@app.command()
def show(name: Name, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """One replica, with the history of its health."""
    found = call(url, lambda gateway: gateway.get(_path(name)))
    if json:
        print_json(found)
        return
    history = found.pop("history")
    told = [(field, _plain(value)) for field, value in found.items() if value not in (None, [], {})]
    print_rows(("FIELD", "VALUE"), told, empty="")
    rows = [(moment(change["at"]), change["state"], change["reason"]) for change in history]
    print_rows(("AT", "STATE", "REASON"), rows, empty="Nothing has happened to it yet.")


@app.command()
def add(
    address: Annotated[str, typer.Argument(help="Where it is: http://HOST:PORT.", metavar="ADDRESS")],
    name: Annotated[str | None, typer.Option(help="What to call it. Default: HOST:PORT.")] = None,
    kind: Annotated[str | None, typer.Option(help="As in settings; default: the replica itself is asked.")] = None,
    api_key_variable: Annotated[
        str | None, typer.Option(help="Variable of this command's environment that holds the replica's API key.")
    ] = None,
    max_in_flight: Annotated[int | None, typer.Option(min=1, help="Turns there at once.")] = None,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="It takes a turn, by chat, only where no other replica can.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="Names the weights of what it serves, where its engine cannot.")
    ] = None,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Add a replica; it takes turns as soon as it answers."""
    body: dict[str, Any] = {"url": address, "name": name, "kind": kind, "max_in_flight": max_in_flight}
    body |= {"fallback": fallback or None, "revision": revision}
    if api_key_variable is not None:
        body["api_key"] = os.environ.get(api_key_variable)
        if not body["api_key"]:
            raise CommandFailed(ExitCode.SETTINGS, f"The variable {api_key_variable} is not set here.")
    named = {field: value for field, value in body.items() if value is not None}
    _told(call(url, lambda gateway: gateway.post(ROUTE, named)), json)


@app.command()
def drain(
    name: Name,
    timeout: Annotated[float | None, typer.Option(help="Seconds in which sessions are moved.", min=0.1)] = None,
    reason: Reason = "",
    force: Force = False,
    wait: Wait = False,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Take no more turns there, let those that run end, and move its sessions."""
    asked: dict[str, Any] = {"reason": reason, "force": force} | ({"timeout_s": timeout} if timeout else {})

    async def drained(gateway: GatewayClient) -> Any:
        found = await gateway.post(_path(name, "drain"), asked)
        said = ""
        while wait and found["state"] == "draining":
            if (line := _progress(found)) != said:
                typer.echo(line, err=True)
                said = line
            await asyncio.sleep(LOOK_EVERY_S)
            found = await gateway.get(_path(name))
        return found

    _told(call(url, drained), json)


@app.command()
def undrain(name: Name, reason: Reason = "", json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Take turns there again."""
    _told(call(url, lambda gateway: gateway.post(_path(name, "undrain"), {"reason": reason})), json)


@app.command()
def remove(name: Name, force: Force = False, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Remove a replica that was added at runtime; its turns end there."""
    query = "?force=true" if force else ""
    gone = call(url, lambda gateway: gateway.delete(_path(name) + query))
    if json:
        print_json(gone)
    else:
        typer.echo(f"{name} is removed")


def _told(found: dict[str, Any], json: bool) -> None:
    if json:
        print_json(found)
    else:
        typer.echo(f"{found['name']} is {found['state']}" + (f": {why}" if (why := _why(found)) else ""))


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    work = f"{found['in_flight']}+{found['queued']}"
    models = ", ".join(found["models"])
    cache, unseen = found["cache"], ", ".join(found["unseen"])
    right = "" if cache["right_share"] is None else f"{cache['right_share']:.0%} of {cache['predictions']}"
    feed = cache["feed"]["state"]
    believed = cache["trust"] + ("" if feed == "none" else f", feed {feed}")
    resident, source = str(cache["resident_tokens"]), found["source"]
    return (
        *(found["name"], found["state"], found["kind"] or "", models, work),
        *(believed, resident, right, source, unseen, _why(found)),
    )


def _why(found: dict[str, Any]) -> str:
    if found["draining"] is not None:
        return _progress(found)
    trouble = str(found["last_error"] or "") if found["state"] != "ready" else ""
    return ": ".join(filter(None, ["fallback" if found["fallback"] else "", trouble]))


def _plain(value: object) -> object:
    """Tables and lists as JSON says them."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value


def _progress(found: dict[str, Any]) -> str:
    told = found["draining"]
    parts = [f"{told['moved']} moved", f"{told['sessions_left']} left", f"{told['released']} released"]
    parts += [f"{told['failed']} failed"] if told["failed"] else []
    return ", ".join([*parts, f"{told['running']} turns running"])


def _path(name: str, *rest: str) -> str:
    return "/".join([ROUTE, quote(name, safe=""), *rest])
