"""kill -9 at every commit of a turn and of a compaction, and another life of the same gateway after it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.failpoints import Failpoints
from gateway.store.records import TurnRecord
from gateway.store.sessions import open_store
from tests.gateway.store.values import SESSION, TENANT

ROOT = Path(__file__).parents[3]
POINTS = [
    f"{when}_{what}_commit:{hit}" for what in ("begin", "finish") for when in ("before", "after") for hit in (1, 2)
]


def run(url: str, epoch: int, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gateway.store.victim", url, str(epoch)],
        cwd=ROOT,
        env={**os.environ, "TURNKEEP_FAILPOINT": failpoint},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )


async def stored(url: str) -> tuple[TurnRecord, ...]:
    async with open_store(url) as store:
        return await store.list_turns(TENANT, SESSION)


def texts(turns: tuple[TurnRecord, ...]) -> list[tuple[int, str, list[str]]]:
    return [(turn.turn.seq, turn.turn.status, [item.text for item in turn.turn.items]) for turn in turns]


@pytest.mark.parametrize("failpoint", POINTS)
def test_killed_at_a_commit_and_tried_again_there_is_one_question_and_one_answer(url: str, failpoint: str) -> None:
    killed = run(url, 1, failpoint)
    assert killed.returncode == -signal.SIGKILL
    after_kill = texts(asyncio.run(stored(url)))
    for line in killed.stdout.split("\n")[:-1]:  # what was acknowledged is there
        what, number = line.split()
        question_and_answer = after_kill[int(number) - 1]
        assert question_and_answer[2][0] == f"ask {number}"
        assert what == "begun" or question_and_answer[1:] == ("completed", [f"ask {number}", f"answer {number}"])
    again = run(url, 2)
    assert again.returncode == 0
    turns = asyncio.run(stored(url))
    assert texts(turns) == [
        (1, "completed", ["ask 1", "answer 1"]),
        (2, "completed", ["ask 2", "answer 2"]),
    ]
    assert [turn.turn.parent_id for turn in turns] == [None, turns[0].turn.id]


@pytest.mark.parametrize(
    ("failpoint", "left"),
    [
        ("before_begin_compaction_commit", []),
        ("after_begin_compaction_commit", [("c-1", "running")]),
        ("before_commit_compaction_commit", [("c-1", "running")]),
        ("after_commit_compaction_commit", [("c-1", "committed")]),
    ],
)
def test_killed_at_a_commit_of_a_compaction_the_history_is_whole_and_the_next_life_compacts(
    url: str, failpoint: str, left: list[tuple[str, str]]
) -> None:
    assert run(url, 1, failpoint).returncode == -signal.SIGKILL
    turns = asyncio.run(stored(url))
    assert [turn.turn.status for turn in turns] == ["completed", "completed"]
    done = ("c-1", "committed") in left
    assert asyncio.run(compacted(url)) == (left, "c-1" if done else None)
    assert run(url, 2).returncode == 0
    failed = [("c-1", "failed")] if left else []
    after = (left, "c-1") if done else ([*failed, ("c-2", "committed")], "c-2")
    assert asyncio.run(compacted(url)) == after
    assert asyncio.run(stored(url)) == turns


async def compacted(url: str) -> tuple[list[tuple[str, str]], str | None]:
    """(id, status) of each compaction in the order they began, and the one that stands on the head."""
    async with open_store(url) as store:
        rows = await store.list_compactions(TENANT, SESSION)
        head = await store.last_turn(TENANT, SESSION)
        assert head is not None
        standing = (await store.view_of(TENANT, SESSION, head.turn.id)).compaction
        return [(row.id, row.status) for row in reversed(rows)], standing and standing.id


def test_a_failpoint_is_a_name_and_the_number_of_a_hit() -> None:
    with pytest.raises(ValueError, match="number of the hit"):
        Failpoints.from_environ({"TURNKEEP_FAILPOINT": "x:0"})
    Failpoints.from_environ({}).hit("x")
    Failpoints.from_environ({"TURNKEEP_FAILPOINT": "x:2"}).hit("x")  # the first of two
    Failpoints.from_environ({"TURNKEEP_FAILPOINT": "x"}).hit("y")
