"""The official `openai` client against `turnkeep serve` and the real small model: turns streamed by either API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.e2e.test_serve_command import Started, serving

TURNS = [6, pytest.param(30, marks=pytest.mark.prove)]
ANSWER_TOKENS = 8
SYSTEM = "You are a patient teacher. Answer in a few plain words."
pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Started]:
    with serving(tmp_path_factory.mktemp("real"), "--model", str(model_dir)) as started:
        yield started


@pytest.fixture(scope="module")
def client(served: Started) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key=served.key, timeout=300, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def question(i: int) -> str:
    return f"Question {i}: what is {i} plus {i + 1}?"


def reuse(before: int, cached: int) -> bool:
    """All of the path before is read from the cache, but at most its last token."""
    return cached >= before - 1


@pytest.mark.parametrize("turns", TURNS)
def test_streamed_turns_through_chat_completions(client: OpenAI, model: str, turns: int) -> None:
    headers = {"X-Session-Id": f"of-{turns}-turns"}
    path_tokens = 0
    for i in range(turns):
        messages: list[Any] = [{"role": "user", "content": question(i)}]
        if i == 0:
            messages.insert(0, {"role": "system", "content": SYSTEM})
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            extra_headers=headers,
        )
        chunks = list(stream)
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
        assert reuse(path_tokens, usage.prompt_tokens_details.cached_tokens or 0), f"turn {i}"
        assert usage.prompt_tokens > path_tokens
        path_tokens = usage.total_tokens


@pytest.mark.parametrize("turns", TURNS)
def test_streamed_turns_through_the_session_api(served: Started, model: str, turns: int) -> None:
    headers = {"authorization": f"Bearer {served.key}"}
    with httpx.Client(base_url=served.url, headers=headers, timeout=300, trust_env=False) as http:
        session = http.post("/v1/sessions", json={"model": model, "system": SYSTEM}).json()["id"]
        path_tokens = 0
        for i in range(turns):
            body = {"input": question(i), "stream": True, "max_output_tokens": ANSWER_TOKENS, "temperature": 0}
            with http.stream("POST", f"/v1/sessions/{session}/turns", json=body) as response:
                kinds = [line[7:] for line in response.iter_lines() if line.startswith("event: ")]
            assert kinds[0] == "session.turn.started"
            assert kinds[-1] == "session.turn.completed"
            turn = http.get(f"/v1/sessions/{session}/turns/{i + 1}", params={"include": "token_ids"}).json()
            assert reuse(path_tokens, turn["usage"]["cached_tokens"]), f"turn {i}"
            assert turn["tokens"]["base_tokens"] == path_tokens
            path_tokens = turn["tokens"]["path_tokens"]
        context = http.get(f"/v1/sessions/{session}/context").json()
        assert context["prompt_tokens"] == path_tokens
        assert len(context["messages"]) == 1 + 2 * turns


def test_a_client_that_resends_its_whole_history_hits_the_same_cache(client: OpenAI, model: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "Name a colour."}]
    total = 0
    for _ in range(3):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=ANSWER_TOKENS, temperature=0)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert reuse(total, answer.usage.prompt_tokens_details.cached_tokens or 0)
        total = answer.usage.total_tokens
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": "And another one."},
        ]


def test_a_json_schema_holds_the_answer(client: OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "A colour and a count, as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}},
        max_tokens=40,
    )

    thing = json.loads(answer.choices[0].message.content or "")
    assert thing["colour"] in ("red", "blue")
    assert 0 <= thing["count"] <= 9


def test_a_seed_repeats_a_sampled_answer_and_logprobs_are_real(client: OpenAI, model: str) -> None:
    def ask() -> Any:
        return client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Tell me anything."}],
            seed=7,
            temperature=1,
            max_tokens=ANSWER_TOKENS,
            logprobs=True,
            top_logprobs=2,
            extra_body={"history": "off", "top_k": 50},
        ).choices[0]

    first, second = ask(), ask()
    assert first.message.content == second.message.content
    content = first.logprobs.content
    assert len(content) == ANSWER_TOKENS or first.finish_reason == "stop"
    assert all(entry.logprob <= 0 for entry in content)
    assert all(entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob for entry in content)


def test_what_the_model_cannot_do_is_refused_by_name(client: OpenAI, model: str) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    picture: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x"}], tools=[tool])
    with pytest.raises(openai.BadRequestError) as image:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": picture}])
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    assert (tools.value.code, tools.value.param) == ("unsupported_parameter", "tools")
    assert image.value.code == "unsupported_parameter"
