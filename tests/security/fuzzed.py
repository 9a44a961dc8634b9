"""A gateway under fuzz: what requests can name there, how one is sent as bytes, and what every answer must be."""

from __future__ import annotations

import errno
import re
import socket
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.security.odd_requests import Odd
from tests.security.test_route_matrix import OPEN

WITHIN_S = 30.0  # an answer, or the end of the connection
ENDLESS = ("/admin/v1/live", "/compactions/stream")  # left after their first bytes
ANSWERED = {  # every header that an answer may have; one that a request smuggled in would be none of these
    "allow", "cross-origin-opener-policy", "cross-origin-resource-policy", "x-frame-options", "cache-control",
    "connection", "content-disposition", "content-length", "content-security-policy",
    "content-type",
    "date", "etag", "link", "location", "referrer-policy", "retry-after", "server", "transfer-encoding",
    "www-authenticate",
    "x-accel-buffering", "x-content-type-options", "x-request-id", "x-turnkeep-session", "x-turnkeep-turn",
    "x-turnkeep-unsaved",
    "x-ratelimit-limit-requests", "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests", "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests", "x-ratelimit-reset-tokens",
}  # fmt: skip
ENGINE = "http://engine.test"  # stands for where the engine that is added listens
POISON = re.compile(r"\x00|[^\\]\\u(0000|d[89ab]..(?!\\ud[c-f]))", re.IGNORECASE)  # what no later reader could take
HELLO = {"role": "user", "content": "hello"}


@dataclass
class Subject:
    """A gateway under fuzz. `client` has an admin key, with which what the fuzz took away is made again."""

    address: tuple[str, int]
    client: httpx.Client
    database: Path
    engine: str  # URL of one that can be added
    keys: Mapping[str, Mapping[str, str]]
    places: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    rss_mib: Callable[[], float] = lambda: 0.0

    def made(self, path: str, **fields: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=fields)
        assert answer.is_success, (path, answer.text)
        told: dict[str, Any] = answer.json()
        return told

    def settle(self) -> None:
        """One of each kind that a path can name."""
        self.places |= {"{tenant}": "fuzzed", "{compaction}": "cmp_none", "{turn}": "1", "{name}": "spare"}
        self.places[ENGINE] = self.engine
        if (
            self.client.get("/admin/v1/tenants/fuzzed").status_code == 404
        ):  # limits of its own: none of ours are changed
            self.made("/admin/v1/tenants", id="fuzzed")
        self.places["{key}"] = self.made("/admin/v1/keys", tenant="fuzzed")["id"]
        self.session()
        self.response()
        self.conversation()
        self.replica()
        self.key()
        self.places["{erasure_id}"] = self.made("/v1/erasures", user="nobody")["id"]

    def session(self) -> None:
        self.places["{session_id}"] = session = self.made("/v1/sessions")["id"]
        self.made(f"/v1/sessions/{session}/turns", input="hello", max_output_tokens=8)

    def response(self) -> None:
        self.places["{response_id}"] = self.made("/v1/responses", model="echo", input="hi", max_output_tokens=8)["id"]

    def conversation(self) -> None:
        items = [{"type": "message", **HELLO}]
        self.places["{conversation_id}"] = conversation = self.made("/v1/conversations", items=items)["id"]
        listed = self.client.get(f"/v1/conversations/{conversation}/items").json()["data"]
        self.places["{item_id}"] = listed[0]["id"]

    def key(self) -> None:
        self.places["{key_id}"] = self.made("/admin/v1/keys")["id"]

    def replica(self) -> None:
        """The one that may be drained and taken away, and no other: each is asked for its health all the while."""
        for replica in self.client.get("/admin/v1/replicas").json()["data"]:
            if replica["name"] not in ("echo", "spare"):
                self.client.delete(f"/admin/v1/replicas/{replica['name']}", params={"force": "true"})
        if self.client.get("/admin/v1/replicas/spare").status_code == 404:
            spare = self.engine.replace("127.0.0.1", "localhost")  # one URL, one replica
            self.made("/admin/v1/replicas", url=spare, name="spare", kind="turnkeep")

    def renew(self, template: str) -> None:
        """What a request to this route may have taken away, or added too much of."""
        for kind in ("session", "response", "conversation", "key", "replica"):
            if f"/{kind}s" in template:
                getattr(self, kind)()

    def named(self, template: str) -> str:
        for name, value in self.places.items():
            template = template.replace(name, value)
        return template

    def said(self, odd: Odd) -> httpx.Response | None:
        """The answer; None where the connection ended without one. Raises TimeoutError past `WITHIN_S`."""
        until = time.monotonic() + WITHIN_S
        with socket.create_connection(self.address, timeout=WITHIN_S) as connection:
            try:
                for piece in odd.pieces:
                    connection.sendall(piece)
                if not odd.whole:
                    connection.shutdown(socket.SHUT_WR)
            except OSError as error:  # refused before it was all sent: the answer may be there yet
                if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                    raise
            return _heard(connection, until, body=odd.method != "HEAD", first=odd.operation.template.endswith(ENDLESS))

    def send(self, odd: Odd) -> None:
        """Send it, hold the answer to what every answer must be, and set right what it took away."""
        try:
            answer = self.said(odd)
        except TimeoutError as error:
            raise AssertionError(f"no answer within {WITHIN_S} s: {odd}") from error
        count = self.statuses.setdefault(str(odd.operation), Counter())
        if answer is None:
            assert not odd.whole, f"no answer at all: {odd}"
            count["none"] += 1
            return
        count[str(answer.status_code)] += 1
        held(answer, odd)
        if answer.is_success and (odd.operation.method == "DELETE" or odd.operation.template in TAKING):
            self.renew(odd.operation.template)


def _heard(connection: socket.socket, until: float, *, body: bool, first: bool) -> httpx.Response | None:
    """Reads one response. `first`: the first bytes of its body are enough. 1xx are read over."""
    got = b""

    def more() -> bool:
        nonlocal got
        connection.settimeout(max(0.01, until - time.monotonic()))
        try:
            piece = connection.recv(1 << 16)
        except ConnectionResetError:
            return False
        got += piece
        return bool(piece)

    while True:
        while b"\r\n\r\n" not in got:
            if not more():
                assert not got, f"half an answer: {got[:300]!r}"
                return None
        head, _, got = got.partition(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        status = int(line.split()[1])
        if status >= 200:
            break
    headers = [(name.lower(), value) for name, _, value in (told.partition(": ") for told in lines)]
    given = dict(headers)
    if body and status not in (204, 304):
        if "content-length" in given:
            while len(got) < int(given["content-length"]):
                assert more(), f"a body that ends early: {head!r}"
            got = got[: int(given["content-length"])]
        elif first:
            while not got:
                assert more(), f"no body: {head!r}"
        else:
            while not got.endswith(b"0\r\n\r\n") and more():
                pass
    return httpx.Response(status, headers=headers, content=got)


def held(answer: httpx.Response, odd: Odd) -> None:
    """What every answer must be."""
    told = f"{answer.status_code} {answer.text[:400]} to {odd}"
    assert 200 <= answer.status_code < 500, told
    assert set(answer.headers) <= ANSWERED, f"{set(answer.headers) - ANSWERED}: {told}"
    assert answer.headers["x-request-id"].startswith("req_"), told
    assert "Traceback" not in answer.text, told
    if answer.status_code >= 400 and odd.method != "HEAD":
        assert answer.headers["content-type"] == "application/json", told
        error = answer.json()["error"]
        assert error["message"], told
        assert len(error["message"]) <= 600, told
    elif "event-stream" in answer.headers.get("content-type", ""):
        assert answer.text.count("internal_error") == 0, told
    assert odd.key != "none" or answer.status_code != 200 or odd.operation.template in OPEN, told


TAKING = (
    "/admin/v1/replicas",
    "/admin/v1/keys/{key_id}/rotate",
    "/admin/v1/keys/{key_id}/revoke",
    "/v1/sessions/{session_id}/archive",
)


def consistent(subject: Subject) -> None:
    """Nothing runs on, every row is whole and belongs to something, and every session can still be read."""
    until = time.monotonic() + WITHIN_S
    with closing(sqlite3.connect(f"file:{subject.database}?mode=ro", uri=True)) as database:

        def asked(statement: str) -> list[tuple[Any, ...]]:
            return database.execute(statement).fetchall()

        while asked("SELECT 1 FROM turns WHERE status IN ('pending', 'running')"):
            assert time.monotonic() < until, "turns still run"
            time.sleep(0.05)
        assert asked("PRAGMA integrity_check") == [("ok",)]
        assert asked("PRAGMA foreign_key_check") == []
        names = [name for (name,) in asked("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for name in names:
            for row in database.execute(f'SELECT * FROM "{name}"'):
                assert not any(POISON.search(value) for value in row if isinstance(value, str)), (name, row)
        sessions = asked("SELECT id FROM sessions WHERE tenant_id = 'default' ORDER BY id LIMIT 200")
    for (session,) in sessions:
        for part in ("", "/turns", "/context", "/export", "/branches", "/compactions"):
            answer = subject.client.get(f"/v1/sessions/{session}{part}")
            assert answer.status_code in (200, 404), (session, part, answer.text)
    listed = subject.client.get("/v1/sessions", params={"limit": 100})
    assert listed.status_code == 200, listed.text
    subject.settle()
