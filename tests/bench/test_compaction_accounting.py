"""The simulator gives the known figures of the methods it compares with, and ours is under its bars."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.compaction.simulate import (
    Compact,
    Part,
    Shape,
    accounting,
    article,
    drop_oldest,
    prefill,
    rolling,
    simulate,
)
from compression.budget import Policy
from engines.local.interpreter import ROOT, child_environment


@pytest.mark.parametrize(
    ("compact", "calls", "tokens"),
    [
        pytest.param(article, 76, 3288.75, id="the source article's"),
        pytest.param(drop_oldest, 0, 4256.25, id="drop oldest"),
        pytest.param(rolling, 7, 496.25, id="one rolling summary"),
    ],
)
def test_known_figures_come_out(compact: Compact, calls: int, tokens: float) -> None:
    row = simulate("", compact, Shape(), block=1)
    assert (row.summary_calls, row.prefill_tokens_per_turn) == (calls, tokens)


def test_a_prefix_that_grows_keeps_its_tail_and_one_that_is_cut_whole_blocks() -> None:
    held = [Part("a", 50), Part("b", 20)]
    assert prefill(held, [*held, Part("c", 7)], block=32) == 7
    assert prefill(held, [held[0], Part("c", 7)], block=32) == 57 - 32
    assert prefill(held, [held[0], Part("c", 7)], block=1) == 7
    assert prefill([], held, block=32) == 70


def test_ours_is_under_the_bars_and_its_prompt_never_over_the_window() -> None:
    result = accounting(Shape(), Policy())
    assert result["summary_calls"] <= 12
    assert result["prefill_tokens_per_turn"] <= 600
    ours = result["rows"][0]
    assert ours["largest_prompt"] + Shape().reserve <= Shape().window


def test_the_program_prints_its_parameters_and_the_figures_of_its_page() -> None:
    command = [sys.executable, "-m", "bench.compaction", "--accounting", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result == json.loads(json.dumps(accounting(Shape(), Policy())))
    page = (ROOT / "docs" / "bench.md").read_text()
    figures = [f"| {row['summary_calls']} | {row['prefill_tokens_per_turn']:,.0f} |" for row in result["rows"]]
    assert [figure for figure in figures if figure not in page] == []
    assert [name for name in result if f"`{name}`" not in page] == []
