"""What the gateway tells a replica whose K/V may have fewer bits: the system prompt, the last turns, the least bits."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from engines.contract import Capabilities, Delta, GenerateRequest, IdsPrompt, Sampling
from engines.echo import EchoEngine
from gateway.sessions.continuation import Begun
from gateway.sessions.handover import Handover
from gateway.sessions.prompt import NO_MARKS, BuiltPrompt, Marks
from gateway.sessions.shared_prompts import SharedPrompts
from tests.gateway.live import live_gateway

pytestmark = pytest.mark.anyio
SYSTEM = "You are a careful assistant that keeps to the facts."


class Told(EchoEngine):
    """Keeps what it was asked, and says on how few bits its answers rest."""

    def __init__(self, *, bits: bool) -> None:
        super().__init__()
        self.bits = bits
        self.asked: list[GenerateRequest] = []

    async def capabilities(self) -> Capabilities:
        return replace(await super().capabilities(), takes_bits=self.bits)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self.asked.append(request)
        async for delta in super().generate(request):
            usage = delta.usage
            yield delta._replace(usage=replace(usage, prefix_bits=8)) if usage is not None and self.bits else delta

    @property
    def prompts(self) -> list[IdsPrompt]:
        return [asked.prompt for asked in self.asked if isinstance(asked.prompt, IdsPrompt)]


async def test_a_replica_hears_how_long_the_system_prompt_is_and_where_the_last_three_turns_begin(
    tmp_path: Path,
) -> None:
    engine = Told(bits=True)
    async with live_gateway(tmp_path, {"told": engine}) as live:
        session = await live.session(system=SYSTEM, policy={"mode": "manual"})
        ends = []
        for turn in range(5):
            answer = (await live.turn(session, f"question {turn}")).json()
            ends.append(answer["usage"]["prompt_tokens"] + answer["usage"]["output_tokens"])
        context = (await live.client.get(f"/v1/sessions/{session}/context")).json()
        bare = await live.session()
        await live.turn(bare, "hello")
        tokens = next(iter(live.app.state.gateway.models._tokens.values()))
        before = tokens.render([{"role": "system", "content": SYSTEM}, {"role": "user", "content": "q"}])
    first = engine.prompts[:5]
    assert {prompt.system_tokens for prompt in first} == {first[0].system_tokens}
    assert 10 < first[0].system_tokens < len(before) // 4
    assert [prompt.recent_from for prompt in first] == [0, 0, 0, ends[0], ends[1]]
    assert (answer["usage"]["prefix_bits"], context["prefix_bits"]) == (8, 8)
    assert engine.prompts[5].system_tokens == 0  # nothing of a prompt without one is


async def test_a_path_that_is_rendered_anew_has_its_last_turns_found(tmp_path: Path) -> None:
    engine = Told(bits=True)
    async with live_gateway(tmp_path, {"told": engine}) as live:
        session = await live.session(system=SYSTEM, policy={"mode": "manual"})
        ends = []
        for turn in range(5):
            answer = (await live.turn(session, f"question {turn} " + "word " * 300)).json()
            ends.append(answer["usage"]["prompt_tokens"] + answer["usage"]["output_tokens"])
        version = (await live.client.get(f"/v1/sessions/{session}")).headers["etag"]
        changed = {"system": SYSTEM + " Be brief."}
        await live.client.patch(f"/v1/sessions/{session}", json=changed, headers={"if-match": version})
        answer = (await live.turn(session, "and now")).json()
        assert answer["prefix_report"]["cause"] == "system_changed"
        await live.turn(session, "and then")
    anew, then = engine.prompts[5:7]
    more = anew.system_tokens - engine.prompts[0].system_tokens
    assert 0 < more < 20
    assert abs(anew.recent_from - more - ends[2]) <= 4  # two turns and the new one
    assert then.recent_from == anew.recent_from  # an earlier one than needed: where the others began is not known
    assert then.system_tokens == anew.system_tokens


async def test_the_least_bits_are_the_turns_or_the_sessions(tmp_path: Path) -> None:
    engine = Told(bits=True)
    async with live_gateway(tmp_path, {"told": engine}) as live:
        session = await live.session(policy={"cache": {"min_bits": 8}})
        await live.turn(session, "one")
        await live.turn(session, "two", cache={"min_bits": 16})
        await live.turn(session, "three", cache={"min_bits": 0})
        refused = await live.turn(session, "four", cache={"min_bits": 17})
        unknown = await live.turn(session, "five", cache={"bits": 8})
        await live.chat([{"role": "user", "content": "six"}], {"x-session-id": session, "x-turnkeep-history": "append"})
    assert [asked.min_bits for asked in engine.asked] == [8, 16, 0, 8]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache.min_bits")
    assert unknown.json()["error"]["param"] == "cache.bits"


async def test_a_system_prompt_that_three_sessions_begin_with_is_shared(tmp_path: Path) -> None:
    engine = Told(bits=True)
    async with live_gateway(tmp_path, {"told": engine}) as live:
        first = await live.session(system=SYSTEM)
        for session in (first, first, await live.session(system=SYSTEM), await live.session(system=SYSTEM), first):
            await live.turn(session, "one")
        await live.turn(await live.session(system="Another one."), "two")
        await live.turn(await live.session(), "three")
        assert (await live.client.delete(f"/v1/sessions/{first}")).status_code == 200
        kept = live.app.state.gateway.room.prompts._seen.values()
        assert first not in {session for sessions in kept for session in sessions}
    assert [asked.shared for asked in engine.asked] == [False, False, False, True, True, False, False]


def test_no_more_system_prompts_are_remembered_than_are_kept() -> None:
    prompts = SharedPrompts(kept=2)
    assert [prompts.shared("t", "p", session) for session in "aabc"] == [False, False, False, True]
    assert not prompts.shared("u", "p", "a")  # another tenant's
    assert not prompts.shared("t", "q", "a")
    assert not prompts.shared("t", "p", "d")  # it was forgotten


async def test_nothing_is_rendered_twice_for_a_replica_whose_cache_is_full(tmp_path: Path) -> None:
    engine = Told(bits=False)
    async with live_gateway(tmp_path, {"told": engine}) as live:
        session = await live.session(system=SYSTEM)
        answer = (await live.turn(session, "one")).json()
        context = (await live.client.get(f"/v1/sessions/{session}/context")).json()
    assert engine.prompts[0].system_tokens == 0
    assert "prefix_bits" not in answer["usage"]
    assert context["prefix_bits"] is None


def test_what_is_to_be_kept_goes_over_to_another_gateway_and_an_older_one_says_nothing_of_it() -> None:
    ids = IdsPrompt(b"\1\0\0\0", 9, whole, "s", system_tokens=3, recent_from=5)
    marks = Marks(3, (5, 7))
    built = BuiltPrompt(ids, "f", 8, b"\1\0\0\0", b"d" * 32, 9, {}, marks)
    plain = dict.fromkeys(("tools", "tool_choice", "moves", "handed", "view", "answered", "changed_from"))
    told = Handover(
        **plain,  # type: ignore[arg-type]
        model="m",
        begun=Begun(b"", ""),
        call_ids={},
        num_events=0,
        stored_events=False,
        prompt=ids,
        built=built,
        sampling=Sampling(4),
        window=100,
        system=None,
        model_fingerprint="f",
        replica="r",
        epoch=None,
        tokenizer=None,
        move_head=True,
        param="input",
        min_bits=8,
    )
    state = told.to_bytes()
    read = Handover.from_bytes(state)
    assert read is not None
    assert (read.min_bits, read.built.marks) == (8, marks)
    assert (read.prompt.system_tokens, read.prompt.recent_from) == (3, 5)
    older = {name: value for name, value in orjson.loads(state).items() if name not in ("marks", "min_bits")}
    read = Handover.from_bytes(orjson.dumps(older))
    assert read is not None
    assert (read.min_bits, read.built.marks, read.prompt.recent_from) == (0, NO_MARKS, 0)


def test_marks_keep_the_starts_of_three_turns_and_an_earlier_one_where_not_all_are_known() -> None:
    marks = NO_MARKS
    for start, known in ((40, (0, 40)), (60, (0, 40, 60)), (90, (40, 60, 90))):
        marks = marks.grown(start)
        assert marks.turn_starts == known
    found = Marks(12, (700,)).grown(900)  # rendered anew: where the last turns begin, not where each does
    assert (found.recent_from, found.grown(950).recent_from, found.grown(950).grown(990).recent_from) == (700, 700, 900)
    assert Marks.of_json(marks.as_json()) == marks
    assert Marks.of_json(None) == NO_MARKS


async def whole() -> bytes:
    return b""
