"""Secrets and words are fed through every route of a gateway that logs all it can: none is in its log or audit log.

The gateway is the real process, at the log level debug, with its own engine and an upstream that wants a key.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from gateway.app import create_app
from gateway.secrets import load_secret
from gateway.settings import Settings
from gateway.store.schema import migrate
from gateway.store.sessions import open_store
from gateway.tenancy import SCOPES, USER_SCOPES, new_key

ROOT = Path(__file__).parents[2]
WORDS = "heliotropemongoose"  # stands in every text
TEXT = f"{WORDS} {WORDS}"  # no id: ids have no blanks, and may be told
UPSTREAM_KEY = "sk-upstream-periwinklebadger-0123456789"
WRONG_KEY = "tk-" + "saffronwalrus" * 3 + "ABCD"
OPENAPI: dict[str, Any] = create_app(Settings(auth=False)).openapi()
ROUTES = sorted((method.upper(), path) for path, methods in OPENAPI["paths"].items() for method in methods)
ENDLESS = ("/live", "/stream")
JSON_LINES = "application/x-ndjson"


@dataclass
class Process:
    url: str
    folder: Path
    admin: str
    user: str

    def log(self) -> str:
        return (self.folder / "stdout").read_text() + (self.folder / "stderr").read_text()

    def audit(self) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{self.folder}/turnkeep.db?mode=ro", uri=True)) as database:
            return database.execute("SELECT * FROM audit").fetchall()


@contextmanager
def logging_gateway(folder: Path) -> Iterator[Process]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TURNKEEP_")}
    environ |= {"PYTHONPATH": str(ROOT), "TURNKEEP_LOG_LEVEL": "debug", "TURNKEEP_DATA_DIR": str(folder)}
    upstream = {"url": "http://127.0.0.1:9", "name": "far", "api_key": UPSTREAM_KEY, "fallback": True}
    environ["TURNKEEP_UPSTREAMS"] = json.dumps([upstream])
    admin, user = asyncio.run(two_keys(folder))
    serve = [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", "--model", "echo"]
    with (
        (folder / "stdout").open("w") as out,
        (folder / "stderr").open("w") as errors,
        subprocess.Popen(serve, cwd=folder, env=environ, stdout=out, stderr=errors) as process,
    ):
        try:
            deadline = time.monotonic() + 60
            while (found := re.search(r"answers on (\S+)", (folder / "stdout").read_text())) is None:
                assert process.poll() is None, (folder / "stderr").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield Process(found[1], folder, admin, user)
        finally:
            process.terminate()
            process.wait(30)


async def two_keys(folder: Path) -> tuple[str, str]:
    """An admin's and a user's, made before the gateway starts: it would print the first one itself."""
    settings = Settings(data_dir=folder)
    await migrate(settings.database_url)
    made = []
    async with open_store(settings.database_url) as store:
        for scopes in (SCOPES, USER_SCOPES):
            key, record = new_key(load_secret(settings), name="made before", scopes=scopes, now=time.time())
            await store.add_key(record)
            made.append(key)
    return made[0], made[1]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with logging_gateway(tmp_path_factory.mktemp("redaction")) as process:
        flood(process)
        yield process


def flood(process: Process) -> None:
    """Every route with texts in all places, well made and ill, with good keys and bad; then the keys' own life."""
    made: list[str] = [process.user]
    with httpx.Client(base_url=process.url, trust_env=False, timeout=30) as http:
        http.headers["authorization"] = f"Bearer {process.admin}"
        spoken(http)
        for method, path in ROUTES:
            operation = OPENAPI["paths"][path][method.lower()]
            *others, filled = bodies(operation)
            for key in (process.user, process.admin, WRONG_KEY):
                send(http, method, path, operation, filled, key)
            for body in others:
                send(http, method, path, operation, body, process.admin)
        told = http.post("/admin/v1/keys", json={"name": WORDS, "scopes": ["chat"]}).json()
        made += [told["key"], http.post(f"/admin/v1/keys/{told['id']}/rotate", json={}).json()["key"]]
        for key in made:
            http.get(f"/admin/v1/keys/{key}")
            http.post(f"/admin/v1/keys/{key}/revoke", json={})
            http.get("/v1/models", params={"key": key}, headers={"authorization": f"Bearer {key}x"})
            http.get("/v1/models", headers={"x-api-key": key})
        upstream = {"url": "http://127.0.0.1:9/more", "name": "added", "api_key": UPSTREAM_KEY}
        http.post("/admin/v1/replicas", json=upstream).raise_for_status()
        http.post("/admin/v1/replicas", json={**upstream, "name": "other"})
        http.post("/admin/v1/replicas/added/drain", json={"reason": WORDS, "force": True}).raise_for_status()
        http.delete("/admin/v1/replicas/added").raise_for_status()
        http.post("/admin/v1/tenants", json={"id": "t", "name": WORDS}).raise_for_status()
    (process.folder / "made").write_text(json.dumps(made))


def spoken(http: httpx.Client) -> None:
    """A talk on each API, to its end: turns, tools, a summary, a file, a deletion."""
    said = {"role": "user", "content": WORDS}
    fields = {"title": WORDS, "system": WORDS, "metadata": {WORDS: WORDS}, "user_ref": WORDS}
    http.post("/v1/sessions", json={"id": "talk", **fields}).raise_for_status()
    for _ in range(3):
        http.post("/v1/sessions/talk/turns", json={"input": WORDS * 40}).raise_for_status()
    http.post("/v1/sessions/talk/compact", json={}).raise_for_status()
    file = http.get("/v1/sessions/talk/export").content
    headers = {"content-type": JSON_LINES}
    http.post("/v1/sessions/import", params={"id": "again"}, content=file, headers=headers).raise_for_status()
    http.delete("/v1/sessions/again").raise_for_status()
    for stream in (False, True):
        tools = {"model": "echo", "messages": [said], "tools": [{"type": "function", "function": {"name": WORDS}}]}
        http.post("/v1/chat/completions", json=tools)
        chat = {"model": "echo", "messages": [said], "stream": stream, "user": WORDS}
        http.post("/v1/chat/completions", json=chat).raise_for_status()
        http.post("/v1/messages", json={"model": "echo", "max_tokens": 9, "messages": [said], "stream": stream})
        http.post("/v1/responses", json={"model": "echo", "input": WORDS, "stream": stream}).raise_for_status()
    response = http.post("/v1/responses", json={"model": "echo", "input": WORDS, "instructions": WORDS}).json()
    http.delete(f"/v1/responses/{response['id']}").raise_for_status()
    items = [{"role": "user", "content": WORDS}]
    conversation = http.post("/v1/conversations", json={"items": items, "metadata": {"a": WORDS}}).json()
    http.delete(f"/v1/conversations/{conversation['id']}").raise_for_status()


def bodies(operation: dict[str, Any]) -> list[bytes]:
    """None, one that is broken after the words, one with the words in every field that the schema names."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    filled = {name: worded(field) for name, field in schema.get("properties", {}).items()}
    broken = b'{"input": "' + TEXT.encode() + b'", "messages": [' + TEXT.encode()
    return [b"", broken, json.dumps(filled or {"input": TEXT}).encode()] if content else [b"", broken]


def worded(field: dict[str, Any]) -> Any:
    kinds = {field.get("type"), *(each.get("type") for each in field.get("anyOf", ()))}
    if "array" in kinds:
        return [TEXT, {"role": "user", "content": TEXT, TEXT: TEXT}]
    return {TEXT: TEXT} if "object" in kinds and "string" not in kinds else TEXT


def send(http: httpx.Client, method: str, template: str, operation: dict[str, Any], body: bytes, key: str) -> None:
    path = re.sub(r"\{\w+\}", quote(TEXT), template)
    query = {each["name"]: TEXT for each in operation.get("parameters", ()) if each["in"] == "query"}
    endless = method == "GET" and template.endswith(ENDLESS)
    tried = [{**query, "no such": TEXT}] if endless else [{}, query]  # refused, where it would not end
    headers = {
        "authorization": f"Bearer {key}",
        "content-type": "application/json",
        "idempotency-key": TEXT,
        "if-match": TEXT,
        "last-event-id": TEXT,
        "user-agent": TEXT,
        "x-session-id": TEXT,
        "x-request-id": TEXT,
        "cookie": f"session={key}",
    }
    for asked in tried:
        answer = http.request(method, path, params=asked, content=body, headers=headers)
        assert answer.status_code != 500, f"{method} {path}: {answer.text}"


def secrets_of(process: Process) -> dict[str, str]:
    """What stands nowhere, by what it is: of a key all but the characters that people see."""
    made = json.loads((process.folder / "made").read_text())
    keys = {f"key {number}": key[11:] for number, key in enumerate([process.admin, *made])}
    secret = (process.folder / "secret").read_text().strip()
    return {"words": WORDS, "upstream key": UPSTREAM_KEY, "wrong key": WRONG_KEY[11:], "secret": secret, **keys}


def test_the_log_holds_no_word_and_no_secret(gateway: Process) -> None:
    log = gateway.log()
    assert "far" in log, "the log tells of the upstream that does not answer: it is read, and it is the gateway's"
    assert {what: context(log, secret) for what, secret in secrets_of(gateway).items() if secret in log} == {}


def test_the_audit_log_holds_no_word_and_no_secret(gateway: Process) -> None:
    lines = gateway.audit()
    actions = {row[4] for row in lines}
    assert {
        "key.rotate",
        "replica.add",
        "replica.drain",
        "session.delete",
        "session.import",
        "response.delete",
    } <= actions
    told = json.dumps(lines)
    assert {what: context(told, secret) for what, secret in secrets_of(gateway).items() if secret in told} == {}


def test_what_is_fed_did_arrive(gateway: Process) -> None:
    """So that the two above can fail: the words are in the database, where they belong."""
    with closing(sqlite3.connect(f"file:{gateway.folder}/turnkeep.db?mode=ro", uri=True)) as database:
        assert WORDS in json.dumps(database.execute("SELECT payload FROM items").fetchall())
        assert database.execute("SELECT count(*) FROM api_keys WHERE name = ?", (WORDS,)).fetchone()[0] == 2


def context(text: str, secret: str) -> str:
    at = text.index(secret)
    return text[max(0, at - 200) : at + 100]
