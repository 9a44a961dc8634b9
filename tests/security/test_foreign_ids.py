"""Another tenant's session or turn is answered as one that never was: same status, code and words, on every route."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.api.refusal import nothing_saved, refused
from tests.gateway.served import Served, served
from tests.security.test_route_matrix import CLOSED

OF_SESSIONS = [call for call in CLOSED if "{session_id}" in call[1]]
OF_TURNS = [call for call in OF_SESSIONS if "{turn}" in call[1]]
BODIES = {"/turns": {"input": "x"}, "/edit": {"input": "x"}, "/count": {"input": "x"}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("foreign"), auth=True) as running:
        yield running


@pytest.fixture(scope="module")
def ann(gateway: Served) -> dict[str, str]:
    return gateway.key(tenant="ann")


@pytest.fixture(scope="module")
def bob(gateway: Served) -> dict[str, str]:
    return gateway.key(tenant="bob")


@pytest.fixture(scope="module")
def turn(gateway: Served, ann: dict[str, str], bob: dict[str, str]) -> str:
    gateway.session(ann, id="anns", system="anns secret")
    gateway.session(bob, id="bobs")
    gateway.turn("bobs", "hello", bob)
    return str(gateway.turn("anns", "hello", ann)["id"])


def asked(gateway: Served, method: str, template: str, session: str, turn: str, key: dict[str, str]) -> tuple[str, str]:
    path = template.replace("{session_id}", session).replace("{turn}", turn)
    ending = next((body for end, body in BODIES.items() if method == "POST" and path.endswith(end)), {})
    error = refused(gateway.client.request(method, path, json=ending, headers={**key, "if-match": "*"}), 404)
    return error["code"], error["message"].replace(session, "ID").replace(turn, "ID")


@pytest.mark.parametrize(("method", "path"), OF_SESSIONS)
def test_a_foreign_session_is_as_an_unknown_one(
    gateway: Served, bob: dict[str, str], turn: str, method: str, path: str
) -> None:
    with nothing_saved(gateway):
        foreign = asked(gateway, method, path, "anns", turn, bob)
        assert foreign == asked(gateway, method, path, "none", "turn_none", bob)
        assert foreign[0] == "session_not_found"


@pytest.mark.parametrize(("method", "path"), OF_TURNS)
def test_a_foreign_turn_is_as_an_unknown_one(
    gateway: Served, bob: dict[str, str], turn: str, method: str, path: str
) -> None:
    with nothing_saved(gateway):
        foreign = asked(gateway, method, path, "bobs", turn, bob)
        assert foreign == asked(gateway, method, path, "bobs", "turn_none", bob)
        assert foreign[0] == "turn_not_found"


def test_a_foreign_turn_is_no_parent_and_no_branch(gateway: Served, bob: dict[str, str], turn: str) -> None:
    with nothing_saved(gateway):
        body = {"input": "x", "parent_turn_id": turn}
        refused(gateway.client.post("/v1/sessions/bobs/turns", json=body, headers=bob), 404, "turn_not_found")
        refused(
            gateway.client.get("/v1/sessions/bobs/turns", params={"branch": turn}, headers=bob), 404, "turn_not_found"
        )


def test_one_name_under_two_keys_is_two_sessions(gateway: Served, ann: dict[str, str], bob: dict[str, str]) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "mine"}]}
    for key in (ann, bob):
        answer = gateway.client.post("/v1/chat/completions", json=body, headers={**key, "x-session-id": "shared-name"})
        assert answer.status_code == 200
        assert answer.json()["turnkeep"]["seq"] == 1


def test_lists_hold_only_the_tenants_own(gateway: Served, bob: dict[str, str], turn: str) -> None:
    told = gateway.client.get("/v1/sessions", headers=bob).text
    assert "anns" not in told


def test_the_same_idempotency_key_of_two_tenants_is_two_sessions(
    gateway: Served, ann: dict[str, str], bob: dict[str, str]
) -> None:
    made = [gateway.client.post("/v1/sessions", json={}, headers={**key, "idempotency-key": "k"}) for key in (ann, bob)]
    assert [answer.status_code for answer in made] == [201, 201]
    assert made[0].json()["id"] != made[1].json()["id"]


def test_resending_a_foreign_history_finds_nothing(gateway: Served, ann: dict[str, str], bob: dict[str, str]) -> None:
    first = [{"role": "user", "content": "a history of anns"}]
    more = [*first, {"role": "assistant", "content": "a history of anns"}, {"role": "user", "content": "more"}]
    theirs = gateway.client.post("/v1/chat/completions", json={"model": "echo", "messages": first}, headers=ann).json()
    mine = gateway.client.post("/v1/chat/completions", json={"model": "echo", "messages": more}, headers=bob).json()
    assert mine["turnkeep"]["session_id"] != theirs["turnkeep"]["session_id"]
    assert mine["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
