"""Warm-up files are read or refused with the line; their prompts run as background work of the class "system"."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from engines.contract import EngineOverloaded, RequestRefused, Usage
from engines.local.warm_up import MOST_PROMPTS, WarmUp, WarmUpRefused, read_warm_ups, warm_up
from engines.local.wire import SYSTEM, Event, WireRequest, decode_generate, delta_event, encode_generate


def test_a_file_holds_a_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "You are a cook."}\n\n{"text": "You are a clerk.", "cache_salt": "t1"}\n')
    assert read_warm_ups([file]) == [WarmUp("You are a cook."), WarmUp("You are a clerk.", "t1")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1"),
        ('{"text": "a"}\n["b"]', "line 2"),
        ('{"text": "a", "salt": "t"}', "line 1"),
        ('{"text": "a", "cache_salt": 3}', "cache_salt"),
        ('{"text": "a"}\n' * (MOST_PROMPTS + 1), "at most"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(WarmUpRefused, match=message):
        read_warm_ups([file])


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WarmUpRefused, match="none"):
        read_warm_ups([tmp_path / "none"])


class Recorder:
    """Answers one token, but is overloaded at every second request."""

    def __init__(self) -> None:
        self.asked: list[WireRequest] = []

    async def generate(self, request: WireRequest) -> AsyncGenerator[list[Event], None]:
        self.asked.append(request)
        if len(self.asked) % 2 == 0:
            raise EngineOverloaded("full")
        yield []
        yield [delta_event([1], "a", finish="length", usage=Usage(request.prompt_tokens, 1))]


def test_prompts_run_one_after_the_other_and_one_that_is_refused_stops_no_other() -> None:
    async def encode(text: str) -> list[int]:
        return [ord(char) for char in text]

    engine, said = Recorder(), list[str]()
    prompts = [WarmUp("ab"), WarmUp("cd", "t"), WarmUp("ef", "t")]
    done = asyncio.run(warm_up(engine, prompts, encode, model="m", report=said.append))
    assert (done, said) == (2, ["warm-up prompt 2: full"])
    assert [request.salt for request in engine.asked] == ["", "t", "t"]
    assert all(request.retention == SYSTEM and request.priority > 0 for request in engine.asked)
    assert array("I", engine.asked[0].delta).tolist() == [97, 98]


def test_retention_goes_over_the_wire_and_only_as_system() -> None:
    asked = asyncio.run(_one_request())
    assert decode_generate(encode_generate(asked), 1000) == asked
    wrong = encode_generate(asked).replace(b'"retention":"system"', b'"retention":"always"')
    with pytest.raises(RequestRefused, match="retention"):
        decode_generate(wrong, 1000)


async def _one_request() -> WireRequest:
    async def encode(text: str) -> list[int]:
        return [5, 6, 7]

    engine = Recorder()
    await warm_up(engine, [WarmUp("x")], encode, model="m", report=print)
    return engine.asked[0]
