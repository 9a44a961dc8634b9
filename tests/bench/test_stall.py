"""`python -m bench.stall` runs to its last line: a real gateway, a real engine, a small model with random weights."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from random import Random

import pytest

from bench.stall import Found, figures
from bench.stall_talk import Chat, Script, Seen, chats
from engines.local.interpreter import ROOT, child_environment

LINES = (
    "I went to the market on Friday.",
    "My code is PC-17, keep it.",
    "And what did you do then?",
    "We met Ann there.",
)


def written(folder: Path) -> Path:
    """A folder of data with chats of people who think for three and for nine seconds."""
    start, messages, at = datetime(2018, 5, 2, 19, 38), [], 0
    for number in range(40):
        role = ("user", "assistant")[number % 2]
        at += 4 if role == "assistant" else (3, 9)[number // 2 % 2]
        stamp = (start + timedelta(seconds=at)).isoformat() + "Z"
        messages.append({"role": role, "content": LINES[number % len(LINES)], "ts": stamp})
    (folder / "chitchat").mkdir()
    with gzip.open(folder / "chitchat" / "chitchat_1000.jsonl.gz", "wt") as lines:
        lines.write(json.dumps({"id": "1", "messages": messages}) + "\n")
    return folder


def test_think_times_are_those_between_an_answer_and_what_is_said_then(tmp_path: Path) -> None:
    (chat,) = chats(written(tmp_path))
    assert set(chat.thought_s) == {3.0, 9.0}
    assert len(chat.said) == 20


def test_a_script_scales_and_clips_the_pauses_and_repeats_under_its_seed() -> None:
    told = [Chat(("one two three", "four"), (1.0, 40.0, 400.0))]
    scripts = [Script(told, Random(7), lambda text: len(text.split()), 6, 0.25, (1.0, 12.0)) for _ in range(2)]
    assert [scripts[0].next_think_s() for _ in range(3)] == [1.0, 10.0, 12.0]
    assert scripts[1].next_message() == "one two three four one two three"


def seen(sent: float, *arrivals: float, cause: str = "", foreground: bool = False) -> Seen:
    return Seen(sent, arrivals, 100, 80, cause, foreground)


def test_turns_and_gaps_are_told_apart_by_whether_a_compaction_ran_then() -> None:
    report = {"problems": [], "tokens_before": 9, "tokens_after": 5, "sources": {"model": 1}}
    row = {"session_id": "auto-0-0", "trigger": "background", "status": "committed", "report": report}
    hurried = {**row, "report": {**report, "problems": ["a turn waited: no model was asked"]}}
    found = Found(
        auto=[
            seen(0, 1, 2),
            seen(9, 11, 12, 19, 21),
            seen(30, 31),
            seen(15, 19, cause="compacted"),
        ],
        manual=[seen(0, 1, 2), seen(0, 1, 3), seen(0, 50, 51, foreground=True)],
        firsts=[(seen(0, 3), seen(0, 2))],
        foregrounds=[(seen(0, 9), seen(0, 3))],
        rows=[
            {**row, "created_at": 10.0, "completed_at": 20.0},
            {**hurried, "created_at": 40.0, "completed_at": 41.0},
            {**row, "session_id": "manual-0-0", "trigger": "foreground", "created_at": 31.0, "completed_at": 32.0},
        ],
    )
    told = figures(found)
    assert told["turns"] == {"during": 1, "without": 2, "auto": 4}
    assert (told["ttft_p50_ratio"], told["ttft_p50_during_ms"]) == (2.0, 2000.0)
    assert told["itl_p95_during_ms"] == 7000.0
    assert told["finished_before_hard_limit"] == 0.5
    assert (told["first_turn_after_switch_ratio"], told["foreground_ttft_ratio"]) == (1.5, 3.0)


@pytest.mark.prove
def test_bench_stall_measures_what_its_page_says(small_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.stall", "--quick", "--json", "--threads", "1"]
    command += ["--model", str(small_model), "--data", str(written(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["compactions"]["background"].get("committed", 0) >= 1
    assert result["first_turn_after_switch_ratio"] > 0
    assert result["foreground_ttft_ratio"] > 0
    assert result["turns"]["without"] >= 1
    page = (ROOT / "docs" / "bench.md").read_text()
    names = [*result, *result["compactions"], *result["parameters"], *result["machine"]]
    assert [name for name in names if f"`{name}`" not in page] == []
