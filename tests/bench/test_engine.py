"""bench.engine: its workload, its arithmetic, and a peer behind lines of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import engine, engine_peers
from bench.engine_peers import Room, lines_peer
from bench.talk import Answer, given
from engines.contract import IdsPrompt

ECHO = """
import json, sys
print(json.dumps({"ready": "1"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    for token in asked["ids"][: asked["count"]]:
        print(json.dumps({"id": asked["id"], "new": [token]}), flush=True)
    print(json.dumps({"id": asked["id"], "done": True}), flush=True)
"""


def work() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(engine.WORKLOAD.read_text())
    return read


def test_the_workload_is_what_the_figures_are_held_against() -> None:
    asked = work()
    assert [len(asked[name]["sessions"]) for name in ("eight", "twenty")] == [8, 20]
    assert all(len(one["think_s"]) == 4 for name in ("eight", "twenty") for one in asked[name]["sessions"])
    assert asked["ten"]["turns"] == 10
    assert asked["decode"]["contexts"] == [128, 2048]
    twenty = asked["twenty"]
    own = 5 * (twenty["user_tokens"] + twenty["reply_tokens"])
    assert 4 <= (twenty["room_tokens"] - twenty["system_tokens"]) / own <= 5


def test_what_could_be_reused_at_best_is_counted() -> None:
    one = {"system_tokens": 100, "user_tokens": 20, "reply_tokens": 10, "shared_system": True}
    asked = one | {"sessions": [{"think_s": [1]}, {"think_s": [1]}]}
    # prompts 120 and 150, twice; reusable: nothing and 130, then 100 and 130
    assert engine._ideal(asked) == round((130 + 100 + 130) / 540, 4)
    assert engine._ideal(asked, alone=True) == round((0 + 100 + 100 + 100) / 540, 4)


def test_figures_of_many_sessions() -> None:
    first = Answer(10.0, (11.0, 12.0), 0.0, (1, 2), 100, 0)
    later = Answer(20.0, (20.5, 21.0), 0.0, (3, 4), 140, 70)
    assert engine._crowd_figures([[first, later]]) == {
        "tokens_s": round(4 / 11, 1),
        "ttft_p50_ms": 1000,
        "ttft_p95_ms": 1000,
        "ttft_later_turns_p50_ms": 500,
        "hit": round(70 / 240, 4),
    }
    untold = Answer(20.0, (20.5, 21.0), 0.0, (3, 4), 140, None)
    assert engine._crowd_figures([[first, untold]])["hit"] is None


def test_quick_asks_the_same_of_fewer() -> None:
    few = engine.quick(work())
    assert len(few["twenty"]["sessions"]) < 20
    assert few["twenty"]["system_tokens"] == work()["twenty"]["system_tokens"]


def test_requests_to_a_peer_run_at_once_and_are_stamped_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    monkeypatch.setattr(engine_peers, "PEER", script)
    peer = lines_peer("echo", sys.executable, "kind", tmp_path, 1)

    async def asked() -> list[Answer]:
        async with peer.start(Room(64)) as made:
            client = made(3)
            prompts = [b"".join(i.to_bytes(4, "little") for i in range(n, n + 5)) for n in range(4)]
            return await asyncio.gather(
                *(client.ask(IdsPrompt(ids, 5, given(ids)), name="x", salt="") for ids in prompts)
            )

    answers = asyncio.run(asked())
    assert [answer.ids for answer in answers] == [(n, n + 1, n + 2) for n in range(4)]
    assert all(answer.asked_s <= answer.arrivals_s[0] <= answer.arrivals_s[-1] for answer in answers)
    assert json.loads(peer.command[-1])["threads"] == 1


def test_a_peer_that_gives_too_few_tokens_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    monkeypatch.setattr(engine_peers, "PEER", script)

    async def asked() -> None:
        async with lines_peer("echo", sys.executable, "kind", tmp_path, 1).start(Room()) as made:
            await made(3).ask(IdsPrompt(b"\1\0\0\0", 1, given(b"\1\0\0\0")), name="x", salt="")

    with pytest.raises(RuntimeError, match="1 tokens"):
        asyncio.run(asked())
