"""`/v1/conversations`: sessions as OpenAI's conversations; their items are those of the path to the head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.echo import EchoEngine, lorem
from tests.gateway.api.refusal import nothing_saved, refused
from tests.gateway.served import Served, served

HELLO = {"type": "message", "role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("conversations"), auth=True) as running:
        yield running


@pytest.fixture(scope="module")
def ann(gateway: Served) -> dict[str, str]:
    return gateway.key(tenant="ann")


def call(gateway: Served, key: dict[str, str], method: str, path: str, body: Any = None, **params: Any) -> Any:
    answer = gateway.client.request(method, f"/v1/{path}", json=body, params=params, headers=key)
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


def test_a_conversation_is_made_changed_read_and_erased(gateway: Served, ann: dict[str, str]) -> None:
    made = call(gateway, ann, "POST", "conversations", {"items": [HELLO], "metadata": {"a": "b"}})
    at = f"conversations/{made['id']}"
    assert made["object"] == "conversation"
    assert made["id"].startswith("conv_")
    assert call(gateway, ann, "POST", at, {"metadata": {"c": "d"}})["metadata"] == {"c": "d"}
    assert call(gateway, ann, "GET", at) == {**made, "metadata": {"c": "d"}}
    answer = call(gateway, ann, "POST", "responses", {"model": "echo", "input": "more", "conversation": made["id"]})
    told = call(gateway, ann, "DELETE", at)
    assert (told["object"], told["deleted"], told["erased"]["turns"]) == ("conversation.deleted", True, 2)
    for path in (at, f"{at}/items", f"responses/{answer['id']}"):
        refused(gateway.client.get(f"/v1/{path}", headers=ann), 404)


def test_items_join_with_each_response_and_page_both_ways(gateway: Served, ann: dict[str, str]) -> None:
    made = call(gateway, ann, "POST", "conversations")
    at, model = f"conversations/{made['id']}", {"model": "echo", "conversation": {"id": made["id"]}}
    assert call(gateway, ann, "GET", f"{at}/items") == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
    }  # fmt: skip
    for word in ("one", "two"):
        answer = call(gateway, ann, "POST", "responses", {**model, "input": word})
        assert answer["conversation"] == {"id": made["id"]}
    added = call(gateway, ann, "POST", f"{at}/items", {"items": [{**HELLO, "content": "a"}, {**HELLO, "content": "b"}]})
    assert (texts(added["data"]), added["has_more"]) == (["a", "b"], False)
    whole = call(gateway, ann, "GET", f"{at}/items", order="asc")["data"]
    assert texts(whole) == ["one", "one", "two", "two", "a", "b"]
    assert [item["status"] for item in whole] == ["completed"] * 6
    for order in ("asc", "desc"):
        expected = [item["id"] for item in (whole if order == "asc" else whole[::-1])]
        found: list[str] = []
        page: dict[str, Any] = {"has_more": True}
        while page["has_more"]:
            more = {"after": found[-1]} if found else {}
            page = call(gateway, ann, "GET", f"{at}/items", limit=2, order=order, **more)
            assert [page["first_id"], page["last_id"]] == [page["data"][0]["id"], page["data"][-1]["id"]]
            found += [item["id"] for item in page["data"]]
        assert found == expected
    assert call(gateway, ann, "GET", f"{at}/items/{whole[3]['id']}") == whole[3]
    onward = call(gateway, ann, "POST", "responses", {**model, "input": "three"})
    turn = call(gateway, ann, "GET", f"sessions/{made['id']}/turns/{onward['turnkeep']['turn_id']}")
    assert turn["prefix_report"]["reused_tokens"] > 0


def test_a_session_is_a_conversation_with_its_own_system_prompt(gateway: Served, ann: dict[str, str]) -> None:
    name = gateway.session(ann, id="mine", system="You are terse." * 5)
    body = {"model": "echo", "input": "x", "conversation": name}
    told = call(gateway, ann, "POST", "responses", body)
    plain = call(gateway, ann, "POST", "responses", {"model": "echo", "input": "x"})
    assert told["usage"]["input_tokens"] > plain["usage"]["input_tokens"] + 50
    assert gateway.turn(name, "y", ann)["parent_id"] == told["turnkeep"]["turn_id"]


def test_a_branch_out_of_a_conversation_stays_beside_it(gateway: Served, ann: dict[str, str]) -> None:
    made = call(gateway, ann, "POST", "conversations", {"items": [HELLO]})
    first = call(gateway, ann, "POST", "responses", {"model": "echo", "input": "in", "conversation": made["id"]})
    beside = {"model": "echo", "input": "beside", "previous_response_id": first["id"]}
    assert call(gateway, ann, "POST", "responses", beside)["conversation"] is None
    assert texts(call(gateway, ann, "GET", f"conversations/{made['id']}/items")["data"]) == ["in", "in", "hello"]
    assert call(gateway, ann, "DELETE", f"responses/{first['id']}")["erased"] == {}
    assert texts(call(gateway, ann, "GET", f"conversations/{made['id']}/items")["data"]) == ["in", "in", "hello"]


def test_the_first_response_names_a_conversations_model(tmp_path: Path) -> None:
    engines = {name: EchoEngine(name=name, model=name) for name in ("echo", "other")}
    with served(tmp_path, engines) as gateway:
        made = call(gateway, {}, "POST", "conversations", {"items": [HELLO]})["id"]
        at = f"/v1/sessions/{made}"
        default = gateway.client.get(at).json()["model"]
        model = next(name for name in engines if name != default)
        body = {"input": "x", "conversation": made}
        refused(gateway.client.post("/v1/responses", json={**body, "model": "none"}), 404, "model_not_found")
        assert gateway.client.get(at).json()["model"] == default
        assert call(gateway, {}, "POST", "responses", {**body, "model": model})["model"] == model
        assert gateway.client.get(at).json()["model"] == model
        assert call(gateway, {}, "POST", "responses", {**body, "model": default})["model"] == default
        assert gateway.client.get(at).json()["model"] == model


def test_what_is_under_way_is_no_item_yet(tmp_path: Path) -> None:
    with served(tmp_path, {"echo": EchoEngine(answer=lorem, tokens_per_s=200)}) as gateway:
        made = call(gateway, {}, "POST", "conversations")
        body = {"model": "echo", "input": "go on", "conversation": made["id"], "background": True}
        running = call(gateway, {}, "POST", "responses", body)
        items = f"/v1/conversations/{made['id']}/items"
        assert gateway.client.get(items).json()["data"] == []
        refused(gateway.client.post(items, json={"items": [HELLO]}), 409, "session_busy")
        own = gateway.client.get(f"/v1/responses/{running['id']}/input_items").json()["first_id"]
        refused(gateway.client.get(f"{items}/{own}"), 404, "item_not_found")
        call(gateway, {}, "POST", f"responses/{running['id']}/cancel")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "", {"items": [HELLO] * 21}, 400, "invalid_value"),
        ("POST", "", {"items": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, 422, None),
        ("POST", "", {"items": [{"type": "reasoning", "encrypted_content": "x"}]}, 400, "invalid_value"),
        ("POST", "", {"metadata": {"a": 1}}, 400, "invalid_value"),
        ("POST", "/{id}/items", {"items": []}, 400, "invalid_value"),
        ("POST", "/{id}", {}, 400, "invalid_value"),
        ("GET", "/{id}/items?after=msg_none", None, 404, "item_not_found"),
        ("GET", "/{id}/items?limit=0", None, 400, None),
        ("GET", "/{id}/items?include[]=message.output_text.logprobs", None, 400, "unsupported_parameter"),
        ("GET", "/conv_none", None, 404, "conversation_not_found"),
        ("DELETE", "/{id}/items/{item}", None, 400, "items_are_immutable"),
        ("DELETE", "/{id}/items/msg_none", None, 404, "item_not_found"),
    ],
)
def test_refusals_name_the_place_and_leave_nothing(
    gateway: Served, ann: dict[str, str], method: str, path: str, body: Any, status: int, code: str | None
) -> None:
    made = call(gateway, ann, "POST", "conversations", {"items": [HELLO]})
    item = call(gateway, ann, "GET", f"conversations/{made['id']}/items")["first_id"]
    with nothing_saved(gateway):
        path = path.replace("{id}", made["id"]).replace("{item}", item)
        refused(gateway.client.request(method, f"/v1/conversations{path}", json=body, headers=ann), status, code)


def test_another_tenants_conversation_is_as_one_that_never_was(gateway: Served, ann: dict[str, str]) -> None:
    bob = gateway.key(tenant="bob")
    made = call(gateway, ann, "POST", "conversations", {"items": [HELLO]})["id"]
    item = call(gateway, ann, "GET", f"conversations/{made}/items")["first_id"]
    own = call(gateway, bob, "POST", "conversations")["id"]
    calls = [
        ("GET", "", None),
        ("POST", "", {"metadata": {}}),
        ("DELETE", "", None),
        ("POST", "/items", {"items": [HELLO]}),
        ("GET", "/items", None),
        ("GET", f"/items/{item}", None),
        ("DELETE", f"/items/{item}", None),
    ]
    with nothing_saved(gateway):
        for method, path, body in calls:
            answer = gateway.client.request(method, f"/v1/conversations/{made}{path}", json=body, headers=bob)
            assert refused(answer, 404)["code"] == "conversation_not_found"
        refused(gateway.client.get(f"/v1/conversations/{own}/items/{item}", headers=bob), 404, "item_not_found")
        body = {"model": "echo", "input": "x", "conversation": made}
        refused(gateway.client.post("/v1/responses", json=body, headers=bob), 404, "conversation_not_found")
