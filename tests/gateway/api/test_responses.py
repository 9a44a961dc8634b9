"""`/v1/responses`: a response is a turn, with OpenAI's shapes, streams and branches; what cannot be done is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from engines.echo import EchoEngine, lorem
from tests.gateway.api.refusal import nothing_saved, refused
from tests.gateway.served import Served, served
from tests.gateway.talks import summarising, words

FUNCTION = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("responses"), auth=True) as running:
        yield running


@pytest.fixture(scope="module")
def ann(gateway: Served) -> dict[str, str]:
    return gateway.key(tenant="ann")


@pytest.fixture(scope="module")
def bob(gateway: Served) -> dict[str, str]:
    return gateway.key(tenant="bob")


def made(gateway: Served, key: Mapping[str, str], input: Any = "hello", **more: Any) -> dict[str, Any]:
    body = {"model": "echo", "input": input, "max_output_tokens": 64, **more}
    answer = gateway.client.post("/v1/responses", json=body, headers=key)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def text(response: Mapping[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def streamed(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    lines = answer.text.split("\n")
    names = [line[7:] for line in lines if line.startswith("event: ")]
    events = [orjson.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events] == names
    for event in events:
        event.get("response", {}).pop("completed_at", None)  # by the clock of whoever tells it
    return events


def until(gateway: Served, key: Mapping[str, str], response_id: str, *statuses: str) -> dict[str, Any]:
    deadline = time.monotonic() + 10
    while True:
        told: dict[str, Any] = gateway.client.get(f"/v1/responses/{response_id}", headers=key).json()
        if told["status"] in statuses:
            return told
        assert time.monotonic() < deadline, told
        time.sleep(0.02)


def test_a_response_is_answered_kept_and_read_again(gateway: Served, ann: dict[str, str]) -> None:
    first = made(gateway, ann, "hello", metadata={"a": "b"}, instructions="Be brief.", temperature=0.5)
    assert first["object"] == "response"
    assert (first["status"], text(first)) == ("completed", "hello")
    assert first["output"][0]["id"].startswith("msg_")
    assert (first["metadata"], first["instructions"], first["temperature"]) == ({"a": "b"}, "Be brief.", 0.5)
    usage = first["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    again = gateway.client.get(f"/v1/responses/{first['id']}", headers=ann).json()
    for told in (first, again):
        for name in ("created_at", "completed_at", "turnkeep"):  # the clocks of two who tell it; more is known by now
            del told[name]
    assert again == first
    items = gateway.client.get(f"/v1/responses/{first['id']}/input_items", headers=ann).json()
    assert [(i["role"], i["content"]) for i in items["data"]] == [("user", [{"type": "input_text", "text": "hello"}])]
    assert items["first_id"] == items["last_id"] == items["data"][0]["id"]


def test_previous_response_goes_on_reuses_its_prefix_and_branches(gateway: Served, ann: dict[str, str]) -> None:
    first = made(gateway, ann, "one")
    before = first["usage"]["total_tokens"]
    second = made(gateway, ann, "two", previous_response_id=first["id"])
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= before - 1
    assert second["previous_response_id"] == first["id"]
    beside = made(gateway, ann, "three", previous_response_id=first["id"])
    third = made(gateway, ann, "four", previous_response_id=second["id"])
    session = third["turnkeep"]["session_id"]
    turns = gateway.client.get(f"/v1/sessions/{session}/turns", headers=ann).json()["data"]
    parents = [turn["parent_id"] for turn in turns]
    ids = [r["turnkeep"]["turn_id"] for r in (first, second, beside, third)]
    assert [turn["id"] for turn in turns] == ids
    assert parents == [None, ids[0], ids[0], ids[1]]


def test_instructions_hold_for_one_response(gateway: Served, ann: dict[str, str]) -> None:
    plain, told = (made(gateway, ann, "hi", **more) for more in ({}, {"instructions": "x" * 50}))
    assert told["usage"]["input_tokens"] > plain["usage"]["input_tokens"] + 50
    onward = [made(gateway, ann, "and", previous_response_id=r["id"])["usage"]["input_tokens"] for r in (plain, told)]
    assert onward[0] == onward[1]


def test_store_false_keeps_nothing_but_reads_what_it_goes_on_from(gateway: Served, ann: dict[str, str]) -> None:
    first = made(gateway, ann, "a longer message to remember")
    with nothing_saved(gateway):
        unsaved = made(gateway, ann, "x", store=False, previous_response_id=first["id"])
        assert unsaved["usage"]["input_tokens"] > first["usage"]["total_tokens"]
        assert unsaved["store"] is False
        refused(gateway.client.get(f"/v1/responses/{unsaved['id']}", headers=ann), 404, "response_not_found")
        body = {"model": "echo", "input": "y", "previous_response_id": unsaved["id"]}
        error = refused(gateway.client.post("/v1/responses", json=body, headers=ann), 404)
        assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


def test_a_stream_announces_fills_and_closes_and_resumes_at_any_number(gateway: Served, ann: dict[str, str]) -> None:
    body = {"model": "echo", "input": "hello there", "stream": True}
    events = streamed(gateway.client.post("/v1/responses", json=body, headers=ann))
    kinds = [event["type"].removeprefix("response.") for event in events]
    opening = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
    assert kinds[:5] == opening
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "hello there"
    whole = events[-1]["response"]
    assert {event["item_id"] for event in deltas} == {whole["output"][0]["id"]}
    at = f"/v1/responses/{whole['id']}"
    assert streamed(gateway.client.get(at, params={"stream": "true"}, headers=ann)) == events
    for seen in (0, 4, len(events) - 2):
        resumed = gateway.client.get(at, params={"stream": "true", "starting_after": seen}, headers=ann)
        assert streamed(resumed) == events[seen + 1 :]
    late = gateway.client.get(at, params={"stream": "true", "starting_after": 900}, headers=ann)
    assert [(event["type"], event["sequence_number"]) for event in streamed(late)] == [("response.completed", 901)]


def test_a_background_response_is_answered_at_once_and_cancelled(tmp_path: Path) -> None:
    engine = EchoEngine(answer=lorem, tokens_per_s=200)
    with served(tmp_path, {"echo": engine}) as gateway:
        running = made(gateway, {}, "go on", background=True, instructions="Long.", max_output_tokens=4000)
        assert (running["status"], running["output"], running["usage"]) == ("in_progress", [], None)
        asked = gateway.client.get(f"/v1/responses/{running['id']}").json()
        assert (asked["status"], asked["instructions"], asked["background"]) == ("in_progress", "Long.", True)
        body = {"model": "echo", "input": "x", "previous_response_id": running["id"]}
        assert refused(gateway.client.post("/v1/responses", json=body), 409)["code"] == "session_busy"
        refused(gateway.client.delete(f"/v1/responses/{running['id']}"), 409, "response_in_progress")
        time.sleep(0.1)
        stopped = gateway.client.post(f"/v1/responses/{running['id']}/cancel").json()
        assert stopped["status"] == "cancelled"
        assert stopped["output"][0]["status"] == "incomplete"
        assert gateway.client.post(f"/v1/responses/{running['id']}/cancel").json()["status"] == "cancelled"
        short = made(gateway, {}, "go on", background=True, max_output_tokens=8)
        ended = until(gateway, {}, short["id"], "incomplete", "completed")
        assert (ended["status"], ended["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert text(ended)


def test_a_stream_that_breaks_off_ends_in_its_failure_and_keeps_what_came(tmp_path: Path) -> None:
    with served(tmp_path, {"echo": EchoEngine(answer=lorem, die_after=2, die_times=99)}) as gateway:
        body = {"model": "echo", "input": "go on", "max_output_tokens": 64}
        last = streamed(gateway.client.post("/v1/responses", json={**body, "stream": True}))[-1]
        assert last["type"] == "response.failed"
        response = last["response"]
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert text(response)
        again = gateway.client.get(f"/v1/responses/{response['id']}").json()
        assert (again["status"], again["output"]) == ("failed", response["output"])


def test_what_runs_at_one_gateway_is_followed_and_stopped_at_another(tmp_path: Path) -> None:
    def gateway(name: str) -> AbstractContextManager[Served]:
        return served(tmp_path, {"echo": EchoEngine(answer=lorem, tokens_per_s=200)}, gateway_name=name)

    with gateway("a") as here, gateway("b") as there:
        running = made(here, {}, "go on", background=True, max_output_tokens=60)
        at = f"/v1/responses/{running['id']}"
        followed = streamed(there.client.get(at, params={"stream": "true"}))
        assert followed == streamed(here.client.get(at, params={"stream": "true"}))
        assert followed[-1]["type"] == "response.incomplete"
        long = made(here, {}, "go on", background=True, max_output_tokens=4000, instructions="Long.")
        at = f"/v1/responses/{long['id']}"
        told = there.client.get(at).json()
        assert (told["status"], told["instructions"]) == ("in_progress", "Long.")
        assert there.client.post(f"{at}/cancel").json()["status"] == "cancelled"


def test_branches_that_are_asked_for_at_once_are_answered_in_turn(tmp_path: Path) -> None:
    with (
        served(tmp_path, {"echo": EchoEngine(answer=lorem, tokens_per_s=400)}) as gateway,
        ThreadPoolExecutor(3) as pool,
    ):
        first = made(gateway, {}, "one", max_output_tokens=8)
        asked = [
            pool.submit(made, gateway, {}, word, previous_response_id=first["id"], max_output_tokens=40)
            for word in ("two", "three", "four")
        ]
        branches = [each.result() for each in asked]
        turns = gateway.client.get(f"/v1/sessions/{first['turnkeep']['session_id']}/turns").json()["data"]
        assert {turn["parent_id"] for turn in turns[1:]} == {first["turnkeep"]["turn_id"]}
        assert {turn["id"] for turn in turns[1:]} == {branch["turnkeep"]["turn_id"] for branch in branches}


def test_context_management_has_old_turns_summarised_past_its_threshold(tmp_path: Path) -> None:
    with served(tmp_path, {"echo": summarising("Parcel codes were named.")}, compaction={"mode": "manual"}) as gateway:
        at: dict[str, Any] = {}
        for n in range(6):
            threshold = [{"type": "compaction", "compact_threshold": 3900 if n == 5 else 8000}]
            response = made(gateway, {}, words(n), context_management=threshold, instructions="Be brief.", **at)
            at = {"previous_response_id": response["id"]}
        listed = f"/v1/sessions/{response['turnkeep']['session_id']}/compactions"
        deadline = time.monotonic() + 10
        while [made["status"] for made in gateway.client.get(listed).json()["data"]] != ["committed"]:
            assert time.monotonic() < deadline, gateway.client.get(listed).text
            time.sleep(0.02)
        after = made(gateway, {}, "and now?", instructions="Be brief.", **at)
        assert after["usage"]["input_tokens"] < response["usage"]["input_tokens"]
        assert after["turnkeep"]["prefix_report"]["cause"] == "compacted"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [FUNCTION, {"type": "custom", "name": "x"}]}, "tools[1].type"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"include": ["nothing.known"]}, "include[0]"),
        ({"store": False, "background": True}, "background"),
        ({"store": False, "truncation": "auto"}, "truncation"),
        ({"store": False, "context_management": [{"type": "compaction"}]}, "context_management"),
        ({"previous_response_id": "resp_x", "conversation": "conv_x"}, "previous_response_id"),
        ({"input": None}, "input"),
        ({"input": [{"type": "message", "role": "assistant", "content": "x"}]}, "input"),
        ({"input": [{"type": "computer_call_output", "call_id": "x"}]}, "input[0].type"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAAB"}, {"content": "x"}]},
            "input[0].encrypted_content",
        ),
        ({"input": [{"type": "compaction", "encrypted_content": "tk1.AAAA"}]}, "input[0].encrypted_content"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    gateway: Served, ann: dict[str, str], more: dict[str, Any], param: str
) -> None:
    with nothing_saved(gateway):
        answer = gateway.client.post("/v1/responses", json={"model": "echo", "input": "x", **more}, headers=ann)
        assert refused(answer, 400)["param"] == param


def test_another_tenants_response_is_as_one_that_never_was(
    gateway: Served, ann: dict[str, str], bob: dict[str, str]
) -> None:
    mine = made(gateway, ann, "secret")["id"]
    forged = f"{mine[:-1]}{'0' if mine[-1] != '0' else '1'}"
    item = gateway.client.get(f"/v1/responses/{mine}/input_items", headers=ann).json()["first_id"]
    with nothing_saved(gateway):
        for key, id in ((bob, mine), (ann, forged), (ann, "resp_x"), (ann, f"resp_{'0' * 48}")):
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                answer = gateway.client.request(method, f"/v1/responses/{id}{path}", headers=key)
                assert refused(answer, 404)["code"] == "response_not_found"
            for path in ("", "/input_tokens", "/compact"):
                body = {"model": "echo", "input": "x", "previous_response_id": id}
                answer = gateway.client.post(f"/v1/responses{path}", json=body, headers=key)
                assert refused(answer, 404)["code"] == "previous_response_not_found"
        body = {"model": "echo", "input": [{"type": "item_reference", "id": item}]}
        error = refused(gateway.client.post("/v1/responses", json=body, headers=bob), 404, "item_not_found")
        assert error["param"] == "input[0].id"


def test_an_item_reference_is_the_item_it_names(gateway: Served, ann: dict[str, str]) -> None:
    first = made(gateway, ann, "to be named")
    item = gateway.client.get(f"/v1/responses/{first['id']}/input_items", headers=ann).json()["first_id"]
    assert text(made(gateway, ann, [{"type": "item_reference", "id": item}])) == "to be named"


def test_deleted_responses_are_gone_and_their_words_with_the_last_that_rests_on_them(
    gateway: Served, ann: dict[str, str]
) -> None:
    before = gateway.rows()
    chain = [made(gateway, ann, "one")]
    for word in ("two", "three"):
        chain.append(made(gateway, ann, word, previous_response_id=chain[-1]["id"]))

    def delete(n: int) -> Any:
        answer = gateway.client.delete(f"/v1/responses/{chain[n]['id']}", headers=ann)
        assert answer.status_code == 200, answer.text
        refused(gateway.client.get(f"/v1/responses/{chain[n]['id']}", headers=ann), 404)
        return answer.json()["erased"]

    assert delete(1) == {}
    assert text(made(gateway, ann, "x", previous_response_id=chain[2]["id"], store=False)) == "x"
    assert delete(2)["turns"] == 2
    session = chain[0]["turnkeep"]["session_id"]
    assert gateway.client.get(f"/v1/sessions/{session}", headers=ann).json()["head_turn_id"] is not None
    assert delete(0)["sessions"] == 1
    after = gateway.rows()
    assert {
        name: after[name] - before[name] for name in before if name not in ("erasures", "api_keys")
    } == dict.fromkeys((name for name in before if name not in ("erasures", "api_keys")), 0)


def test_a_repeated_request_under_a_key_is_one_response(gateway: Served, ann: dict[str, str]) -> None:
    headers = {**ann, "idempotency-key": "once"}
    first, again = made(gateway, headers, "same"), made(gateway, headers, "same")
    assert first["id"] == again["id"]
    body = {"model": "echo", "input": "other", "max_output_tokens": 64}
    refused(gateway.client.post("/v1/responses", json=body, headers=headers), 422, "idempotency_key_reused")


def test_input_tokens_are_those_of_the_response(gateway: Served, ann: dict[str, str]) -> None:
    first = made(gateway, ann, "one", instructions="Be brief.")
    body = {"model": "echo", "input": "two", "previous_response_id": first["id"], "instructions": "Be brief."}
    with nothing_saved(gateway):
        told = gateway.client.post("/v1/responses/input_tokens", json=body, headers=ann).json()
    assert told["object"] == "response.input_tokens"
    assert told["input_tokens"] == made(gateway, ann, **body)["usage"]["input_tokens"]


def test_a_compacted_window_is_the_next_input_of_its_tenant_alone(
    gateway: Served, ann: dict[str, str], bob: dict[str, str]
) -> None:
    input = [
        {"role": "user", "content": "My parcel code is PC-0815-X."},
        {"role": "assistant", "content": "I have noted PC-0815-X. " + "It was a long walk along the canal. " * 20},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada."},
    ]
    with nothing_saved(gateway):
        told = gateway.client.post("/v1/responses/compact", json={"model": "echo", "input": input}, headers=ann).json()
        assert told["object"] == "response.compaction"
        assert [item["type"] for item in told["output"]] == ["message", "message", "compaction"]
        assert "PC-0815-X" not in told["output"][-1]["encrypted_content"]
        body = {"model": "echo", "input": [*told["output"], {"role": "user", "content": "Go on."}], "store": False}
        answer = gateway.client.post("/v1/responses", json=body, headers=ann)
        assert text(answer.json()) == "Go on."
        error = refused(gateway.client.post("/v1/responses", json=body, headers=bob), 400)
        assert error["param"] == "input[2].encrypted_content"
        body["input"] = told["output"][2:]  # type: ignore[assignment]
        refused(gateway.client.post("/v1/responses", json=body, headers=ann), 400)
    kept = made(gateway, ann, [*told["output"], {"role": "user", "content": "Go on."}])
    items = gateway.client.get(f"/v1/responses/{kept['id']}/input_items", headers=ann).json()["data"]
    summary = next(item for item in items if item["content"][0]["text"].startswith("[Earlier turns"))
    assert "PC-0815-X" in summary["content"][0]["text"]


def test_truncation_says_what_a_full_window_brings_about(tmp_path: Path) -> None:
    with served(tmp_path, {"echo": EchoEngine(window=2048)}, compaction={"strategy": "off"}) as gateway:
        at: dict[str, Any] = {}
        for n in range(8):
            at = {"previous_response_id": made(gateway, {}, f"{n} " + "word " * 20, **at)["id"]}
        long = "word " * 170
        body = {"model": "echo", "input": long, "max_output_tokens": 64, **at}
        with nothing_saved(gateway):
            error = refused(gateway.client.post("/v1/responses", json={**body, "truncation": "disabled"}), 400)
            assert error["code"] == "context_length_exceeded"
        cut = made(gateway, {}, long, truncation="auto", **at)
        assert cut["usage"]["input_tokens"] < 2048
