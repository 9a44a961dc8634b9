"""A key that only reads sees what its tenant has and changes nothing, not even by leaving a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from engines.echo import EchoEngine
from tests.gateway.api.refusal import nothing_saved, refused
from tests.gateway.served import Served, served
from tests.security.test_route_matrix import SCOPES_OF

READ = frozenset({"read"})
READABLE = sorted(path for (method, path), scopes in SCOPES_OF.items() if method == "GET" and "read" in scopes)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    slow = EchoEngine(tokens_per_s=20)
    with served(tmp_path_factory.mktemp("read"), {"echo": slow}, auth=True) as running:
        yield running


@pytest.fixture(scope="module")
def things(gateway: Served) -> dict[str, str]:
    """One of each kind that a path can name, of the tenant ann."""
    ann = gateway.key(tenant="ann")
    gateway.session(ann, id="anns")
    gateway.turn("anns", "hello", ann)
    compaction = gateway.client.post("/v1/sessions/anns/compact", json={"dry_run": True}, headers=ann)
    assert compaction.status_code == 200, compaction.text
    asked = {"model": "echo", "input": "hello"}
    response = gateway.client.post("/v1/responses", json=asked, headers=ann).json()["id"]
    erasure = gateway.client.post("/v1/erasures", json={"user": "somebody"}, headers=ann).json()["id"]
    items = {"items": [{"role": "user", "content": "hello"}]}
    conversation = gateway.client.post("/v1/conversations", json=items, headers=ann).json()["id"]
    item = gateway.client.get(f"/v1/conversations/{conversation}/items", headers=ann).json()["data"][0]["id"]
    return {
        "{session_id}": "anns",
        "{turn}": "1",
        "{response_id}": response,
        "{erasure_id}": erasure,
        "{conversation_id}": conversation,
        "{item_id}": item,
    }


def named(path: str, things: dict[str, str]) -> str:
    for name, value in things.items():
        path = path.replace(name, value)
    assert "{" not in path, f"make one for {path}"
    return path


@pytest.mark.parametrize(
    "path", [path for path in READABLE if "{compaction}" not in path and "compactions/" not in path]
)
def test_it_reads_what_its_tenant_has_and_of_another_s_nothing(
    gateway: Served, things: dict[str, str], path: str
) -> None:
    where = named(path, things)
    mine, theirs = gateway.key(tenant="ann", scopes=READ), gateway.key(tenant="bob", scopes=READ)
    with nothing_saved(gateway):
        assert gateway.client.get(where, headers=mine).status_code == 200
        answer = gateway.client.get(where, headers=theirs)
        if "{" in path:
            refused(answer, 404)
        else:
            assert not any(value in answer.text for value in things.values() if len(value) > 1)


def test_a_reader_that_leaves_a_stream_does_not_end_its_turn_and_one_that_stays_does_not_keep_it(
    gateway: Served,
) -> None:
    full, reader = gateway.key(tenant="carl"), gateway.key(tenant="carl", scopes=READ)
    gateway.session(full, id="followed")
    body = {"input": "word " * 200, "max_output_tokens": 200, "stream": True, "on_disconnect": "cancel"}

    def running() -> bool:
        return str(gateway.client.get("/v1/sessions/followed", headers=reader).json()["status"]) == "running"

    with (
        httpx.Client(base_url=gateway.url, trust_env=False, timeout=30) as owner,
        owner.stream("POST", "/v1/sessions/followed/turns", json=body, headers=full) as asked,
    ):
        following = asked.iter_lines()  # held: a stream is left when nobody holds it
        next(following)
        with gateway.client.stream("GET", "/v1/sessions/followed/stream", headers=reader) as watched:
            next(watched.iter_lines())
        assert running(), "the owner is there yet"
        with gateway.client.stream("GET", "/v1/sessions/followed/stream", headers=reader) as watched:
            seen = watched.iter_lines()
            next(seen)
            asked.close()
            told = "".join(seen)
    assert "client_disconnected" in told or "cancel" in told
    deadline = time.monotonic() + 20
    while running():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    turn = gateway.client.get("/v1/sessions/followed/turns/1", headers=reader).json()
    assert turn["status"] == "incomplete"
