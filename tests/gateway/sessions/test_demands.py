"""Replicas that differ: a turn goes to those that can do what it asks, and whose window it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.contract import Capabilities, Sampling
from engines.echo import EchoEngine
from gateway.fleet.replica import Replica
from gateway.sessions.command import Ask, Input, Shape
from gateway.sessions.demands import has_room, suiting
from gateway.sessions.history import History
from gateway.sessions.items import message
from gateway.sessions.models import Models
from tests.gateway.live import Live, live_gateway

pytestmark = pytest.mark.anyio
SMALL, LARGE = 512, 4096
ASKED = Ask("m", (Input(message("user", "hello")),))
CAPS = Capabilities("vllm", ("m",), window=100, takes_chat=True, sampling=frozenset({"top_k"}), max_logprobs=2)


def able(caps: Capabilities, ask: Ask = ASKED, *, tokens: int = 0) -> bool:
    models = Models(folders={}, cache_dir=Path("unused"))
    suits = suiting(ask, History(), models, prompt_tokens=tokens, default_max_tokens=32)
    return suits(Replica(EchoEngine(), "", caps))


def test_who_lacks_what_is_asked_does_not_suit() -> None:
    pictured = replace(ASKED, input=(Input(message("user", [{"type": "input_image", "image_url": "data:,x"}])),))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert able(CAPS)
    assert not able(CAPS, pictured)
    assert able(replace(CAPS, takes_images=True), pictured)
    assert not able(CAPS, replace(ASKED, tools=(tool,)))
    assert able(CAPS, replace(ASKED, tools=(tool,), tool_choice="none"))
    assert able(replace(CAPS, parses_tools=True), replace(ASKED, tools=(tool,)))
    assert not able(CAPS, replace(ASKED, response_format={"type": "json_object"}))
    assert able(
        replace(CAPS, grammars=frozenset({"json_object"})), replace(ASKED, response_format={"type": "json_object"})
    )
    assert able(CAPS, replace(ASKED, shape=Shape(top_k=3, logprobs=2)))
    assert not able(CAPS, replace(ASKED, shape=Shape(min_p=0.1)))
    assert not able(CAPS, replace(ASKED, shape=Shape(logprobs=3)))
    assert not able(replace(CAPS, takes_chat=False))


def test_a_window_suits_that_leaves_room_for_an_answer() -> None:
    assert able(CAPS, tokens=94)  # a sixteenth of the window is left
    assert not able(CAPS, tokens=95)
    assert able(replace(CAPS, window=None), tokens=10**6)
    assert able(CAPS, replace(ASKED, shape=Shape(max_tokens=1)), tokens=99)
    assert not has_room(100, 100, 1, 32)


def pair(**more: Any) -> dict[str, EchoEngine]:
    windows = {"large": LARGE, "small": SMALL}
    return {name: EchoEngine(name=name, window=window, answer=brief, **more) for name, window in windows.items()}


def brief(text: str, sampling: Sampling) -> str:
    return text[:40]


async def at_small(live: Live) -> str:
    """A session whose first turn the small replica answered."""
    for number in range(40):
        session = await live.session(model="echo")
        turn = (await live.turn(session, f"hello {number}")).json()
        if turn["placement"]["replica"] == "small":
            return session
    raise AssertionError("nothing went to the small replica")


async def context(live: Live, session: str) -> Mapping[str, Any]:
    told: Mapping[str, Any] = (await live.client.get(f"/v1/sessions/{session}/context")).json()
    return told


async def test_a_prompt_goes_where_it_fits_and_a_session_moves_where_it_outgrows_its_replica(tmp_path: Path) -> None:
    fleet = pair()
    async with live_gateway(tmp_path, fleet) as live:
        first = [(await live.turn(await live.session(model="echo"), "x" * 600)).json() for _ in range(4)]
        session = await at_small(live)
        assert (await context(live, session))["window"] == LARGE
        ways = [(await live.turn(session, "y" * 200)).json() for _ in range(4)]
        models = (await live.client.get("/v1/models")).json()["data"]
    assert [turn["placement"]["replica"] for turn in first] == 4 * ["large"]
    assert [turn["placement"]["replica"] for turn in ways] == ["small", "large", "large", "large"]
    assert [turn["placement"]["reason"] for turn in ways[:3]] == ["pinned", "pin_unfit", "pinned"]
    assert all("compaction" not in turn["metadata"] for turn in ways)  # nothing was taken out of it
    assert all(turn["usage"]["prompt_tokens"] > SMALL for turn in ways[2:])
    assert models[0]["max_model_len"] == LARGE


async def failing(tmp_path: Path, policy: Mapping[str, Any], fails: Callable[[Live, EchoEngine], None]) -> Any:
    """The next turn of a session that is longer than the small window, whose large replica fails."""
    fleet = pair()
    async with live_gateway(tmp_path, fleet) as live:
        session = await live.session(model="echo", policy=policy)
        for number in range(8):
            turn = (await live.turn(session, f"{number} " + "z" * 90)).json()
        assert turn["usage"]["prompt_tokens"] > SMALL
        fails(live, fleet["large"])
        return await live.turn(session, "on")


def gone(live: Live, large: EchoEngine) -> None:
    live.app.state.gateway.fleet.leave("large")


def fails_first(live: Live, large: EchoEngine) -> None:
    large._fail_first = 1


@pytest.mark.parametrize("fails", [gone, fails_first])
async def test_where_only_a_smaller_window_is_left_the_session_is_compacted_to_fit_it(
    tmp_path: Path, fails: Callable[[Live, EchoEngine], None]
) -> None:
    turn = (await failing(tmp_path, {"strategy": "extract"}, fails)).json()
    assert turn["status"] == "completed", turn
    assert turn["placement"]["replica"] == "small"
    assert turn["usage"]["prompt_tokens"] < SMALL
    assert turn["output"][0]["content"][0]["text"] == "on"


async def test_or_the_turn_is_refused_with_both_numbers(tmp_path: Path) -> None:
    refused = await failing(tmp_path, {"on_overflow": "error"}, fails_first)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"maximum context length is {SMALL} tokens" in error["message"]
    assert error["details"]["prompt_tokens"] > SMALL
