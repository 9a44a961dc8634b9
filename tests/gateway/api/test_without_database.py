"""The database is away, and by the settings chats go on without it: what is answered, as whom, and how it is marked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.live import Shifted
from tests.gateway.served import Served, served, until

ASKED = {"model": "echo", "messages": [{"role": "user", "content": "who is there?"}], "max_tokens": 16}
HISTORY = [
    {"role": "user", "content": "who is there?"},
    {"role": "assistant", "content": "who is there?"},
    {"role": "user", "content": "nobody"},
]
CLOCK = Shifted()
ADMIN = frozenset({"admin"})


@contextmanager
def away(house: Served) -> Iterator[None]:
    """The database's file is moved away, and back."""
    path = house.folder / "turnkeep.db"
    path.rename(house.folder / "elsewhere.db")
    try:
        yield
    finally:
        (house.folder / "elsewhere.db").rename(path)
        until(lambda: house.client.get("/readyz").json()["checks"]["store"] == "ok")
        until(lambda: not house.gateway.store.away)


@contextmanager
def stepped(by_s: float) -> Iterator[None]:
    before, CLOCK.by_s = CLOCK.by_s, by_s
    try:
        yield
    finally:
        CLOCK.by_s = before


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("unsaved"), auth=True, without_database="unsaved", clock=CLOCK) as found:
        yield found


@pytest.fixture(scope="module")
def me(house: Served) -> dict[str, str]:
    return house.key()


def chat(house: Served, key: dict[str, str], headers: dict[str, str] | None = None, **more: Any) -> Any:
    return house.client.post("/v1/chat/completions", json={**ASKED, **more}, headers={**key, **(headers or {})})


def refused(answer: Any, code: str = "database_unavailable") -> None:
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, code), answer.text
    assert int(answer.headers["retry-after"]) >= 1


def test_a_chat_is_answered_marked_and_not_kept(house: Served, me: dict[str, str]) -> None:
    kept = chat(house, me)
    assert kept.status_code == 200, kept.text
    assert "x-turnkeep-unsaved" not in kept.headers
    assert "unsaved" not in kept.json()["turnkeep"]
    before = house.rows()
    with away(house):
        answer = chat(house, me)
        assert answer.status_code == 200, answer.text
        told = answer.json()["turnkeep"]
        assert (told["saved"], told["unsaved"], told["session_id"]) == (False, "database_unavailable", None)
        assert answer.headers["x-turnkeep-unsaved"] == "database_unavailable"
        assert "x-turnkeep-session" not in answer.headers
        assert answer.json()["choices"] == kept.json()["choices"]
    assert house.rows() == before
    again = chat(house, me)
    assert "x-turnkeep-unsaved" not in again.headers
    assert again.json()["turnkeep"]["session_id"] is not None


def test_a_stream_is_marked_in_its_headers_and_at_its_end(house: Served, me: dict[str, str]) -> None:
    chat(house, me)
    with away(house):
        answer = chat(house, me, stream=True)
        assert answer.headers["x-turnkeep-unsaved"] == "database_unavailable"
        assert answer.headers["x-turnkeep-turn"] in answer.text
        assert '"unsaved":"database_unavailable"' in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")


def test_a_keyed_chat_that_brings_its_history_is_answered_from_it(house: Served, me: dict[str, str]) -> None:
    key = {"x-session-id": "keyed"}
    assert chat(house, me, key).json()["turnkeep"]["session_id"] == "keyed"
    with away(house):
        answer = chat(house, me, key, messages=HISTORY)
        assert answer.json()["turnkeep"]["unsaved"] == "database_unavailable", answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "nobody"
        refused(chat(house, me, key))  # its history is in the database: it would be answered without
        refused(chat(house, me, {"idempotency-key": "once"}))  # perhaps it was answered already
    path = house.client.get("/v1/sessions/keyed/turns", headers=me).json()["data"]
    assert len(path) == 1


def test_what_asks_for_nothing_to_be_kept_flows_on(house: Served, me: dict[str, str]) -> None:
    chat(house, me)
    with away(house):
        off = chat(house, me, history="off")
        assert off.status_code == 200, off.text
        response = {"model": "echo", "input": "who is there?", "store": False}
        assert house.client.post("/v1/responses", json=response, headers=me).json()["status"] == "completed"
        refused(house.client.post("/v1/responses", json={**response, "store": True}, headers=me))
        message = {"model": "echo", "max_tokens": 16, "messages": ASKED["messages"]}
        answer = house.client.post("/v1/messages", json=message, headers=me)
        assert (answer.status_code, answer.headers["x-turnkeep-unsaved"]) == (200, "database_unavailable")
        text = {"model": "echo", "prompt": "who", "max_tokens": 4}
        assert house.client.post("/v1/completions", json=text, headers=me).status_code == 200
        assert house.client.get("/v1/models", headers=me).status_code == 200


def test_sessions_are_refused_and_go_on_afterwards(house: Served, me: dict[str, str]) -> None:
    id = house.session(me)
    house.turn(id, "one", me)
    with away(house):
        for stream in (False, True):
            turn = {"input": "two", "stream": stream}
            refused(house.client.post(f"/v1/sessions/{id}/turns", json=turn, headers=me))
        refused(house.client.post("/v1/sessions", json={}, headers=me))
        refused(house.client.get(f"/v1/sessions/{id}", headers=me))
    assert house.turn(id, "two", me)["seq"] == 2


def test_keys_that_were_looked_up_lately_are_believed_for_chats_alone(house: Served) -> None:
    known, admin, new = house.key(), house.key(scopes=ADMIN), house.key()
    nobody = {"authorization": f"Bearer tk-{'x' * 43}"}
    gone = house.key(revoked=True)
    for headers, status in ((known, 200), (admin, 200), (nobody, 401), (gone, 401)):
        assert chat(house, headers).status_code == status
    with away(house), stepped(60):  # past the two seconds for which any key is remembered
        assert [chat(house, headers).status_code for headers in (known, admin, gone)] == [200, 200, 401]
        for headers in (new, nobody):
            refused(chat(house, headers))
        refused(house.client.get("/admin/v1/keys", headers=admin))
        with stepped(301):
            refused(chat(house, known))


def test_readiness_says_it_and_the_gateway_goes_on_being_sent_chats(house: Served, me: dict[str, str]) -> None:
    with away(house):
        refused(house.client.get("/v1/sessions", headers=me))
        answer = house.client.get("/readyz")
        assert answer.status_code == 200
        assert "answered unsaved" in answer.json()["checks"]["store"]
        assert "turnkeep_database_up 0.0" in house.client.get("/metrics").text
    assert house.client.get("/readyz").json() == {"ready": True, "checks": {"store": "ok", "replicas": "ok"}}
    assert "turnkeep_database_up 1.0" in house.client.get("/metrics").text


def test_what_was_used_meanwhile_is_booked_when_it_is_back(house: Served) -> None:
    admin = house.key(scopes=ADMIN)
    chat(house, admin)

    def booked() -> int:
        until(lambda: house.gateway.store.usage_waiting == 0)
        lines = house.client.get("/admin/v1/usage", params={"group_by": "key"}, headers=admin).json()["data"]
        mine = [line for line in lines if line["key"] == admin["authorization"].split()[1][:11]]
        return sum(int(line["turns"]) for line in mine)

    before = booked()
    with away(house):
        assert [chat(house, admin).status_code for _ in range(3)] == [200] * 3
        assert house.gateway.store.usage_waiting > 0
    assert booked() == before + 3
    assert 'turnkeep_unsaved_turns_total{reason="database_unavailable"}' in house.client.get("/metrics").text


def test_by_default_all_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as house:
        assert chat(house, {}).status_code == 200
        with away(house):
            refused(chat(house, {}))
            refused(chat(house, {}, stream=True))
            ready = house.client.get("/readyz")
            assert (ready.status_code, ready.json()["checks"]["store"] == "ok") == (503, False)
