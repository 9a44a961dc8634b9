"""What bench.quant says: its arithmetic, on the real model the bars, and that broken codecs fail them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from bench.quant import BARS, Bars, missed, policy_figures
from bench.quant_recall import Recalled, chats
from bench.quant_windows import Reference, Seen, Turn, expected_units, figures
from engines.local.interpreter import ROOT, child_environment
from engines.local.kv.precision import POLICIES, PathShape, Precision, targets

GOOD = Turn(1e-5, 1e-4, 1.0, 0.0)
SEEN = Seen("a", (GOOD,) * 8, 0.531, 0.546, 0.58, 4097)


def test_kl_is_that_of_the_definition_and_zero_for_the_same() -> None:
    p, q = np.log([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]), np.log([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    turn = Reference(p.astype(np.float32)).compare(q.astype(np.float32), [0, 1])
    first = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert turn.kl == pytest.approx(first / 2, rel=1e-5)
    assert turn.kl_p99 == pytest.approx(first * 0.99, rel=1e-5)
    assert turn.top1 == 0.5
    assert turn.nll_change == pytest.approx(math.log(2) / 2, rel=1e-5)
    assert Reference(p.astype(np.float32)).compare(p.astype(np.float32), [0, 1]).kl == pytest.approx(0, abs=1e-7)


def test_figures_are_of_all_turns_and_the_plain_scheme_is_paired_with_the_first() -> None:
    bad = replace(GOOD, kl=4e-5, top1=0.9)
    told = figures(
        [replace(SEEN, kl_plain=4e-5), replace(SEEN, text="b", turns=(GOOD, GOOD, *(bad,) * 6), kl_plain=4e-5)]
    )
    assert told["kl"] == pytest.approx((10 * 1e-5 + 6 * 4e-5) / 16, rel=1e-2)
    assert (told["kl_first_turn"], told["kl_worst_turn"], told["kl_over_plain"]) == (1e-5, 4e-5, 0.25)
    assert told["kl_worst"] == pytest.approx((2 * 1e-5 + 6 * 4e-5) / 8, rel=1e-2)
    assert told["drift"] == 2.5
    assert told["by_text"].keys() == {"a", "b"}
    assert figures([SEEN])["kl_plain"] is None
    assert figures([replace(SEEN, turns=(GOOD,))])["drift"] is None


def test_a_bar_that_is_missed_is_named_and_what_was_not_measured_misses_none() -> None:
    assert missed(figures([SEEN]), BARS["int8"]) == []
    worse = figures([replace(SEEN, turns=(replace(GOOD, kl=9e-5, top1=0.98),) * 8)])
    assert missed(worse, BARS["int8"]) == ["kl", "kl_worst", "top1"]
    assert missed({"recall_same": 0.5, "restore": 39.0, "demotion": 1.2}, BARS["int8"]) == [
        *("recall_same", "demotion", "restore")
    ]
    short = {"session_tokens": 1153, "session_bytes_ratio": 0.7, "recall_questions": 10, "recall_same": 0.9}
    assert missed(short, BARS["int8"]) == []
    assert set(asdict(BARS["int4"])) == set(Bars.__dataclass_fields__)


def test_what_was_kept_in_pieces_adds_up() -> None:
    asked = {"int8": asdict(Recalled(5, 4, 5, 5)), "full": asdict(Recalled(5, 5, 5, 5))}
    side = {"key_bias": {"int8": 4e-5}, "restore": {"int8": 80.0}}
    kept = {
        "windows": {"0": {"int8": SEEN.as_json()}},
        "recall": dict.fromkeys(map(str, range(12)), asked),
        "side": side,
    }
    told = policy_figures("int8", json.loads(json.dumps(kept)))
    assert (told["recall_questions"], told["recall_right"], told["recall_lost"]) == (60, 48, 0.2)
    assert (told["key_bias_kl"], told["restore"], told["missed"]) == (4e-5, 80.0, ["recall_lost"])
    assert policy_figures("int8", {"windows": {}, "recall": {}, "side": {}}) == {"missed": []}


def test_as_many_units_are_expected_as_the_policy_seals() -> None:
    for tokens in (1, 64, 128, 191, 192, 193, 1025, 2049, 4097):
        units = targets(PathShape(tokens), POLICIES["int8"], window=8192, pressure=0.0)
        assert expected_units(tokens) == units.count(Precision.INT8)


def test_a_chats_facts_lie_where_pages_are_sealed(model_dir: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = model_dir / "tokenizer.json"
    decode = Tokenizer.from_file(str(tokenizer)).decode
    for chat in chats(tokenizer, 3):
        sealed = decode(chat.ids[64 : len(chat.ids) - 128])
        assert all(word in sealed for word in ("My dog is called", "I live in", "My favourite colour", "I work as a"))
        for ids, choices, right in chat.questions:
            assert len(ids) < 64
            assert decode([choices[right]]).strip() in sealed


def run(*options: str) -> dict[str, object]:
    command = [sys.executable, "-m", "bench.quant", "--quick", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), cwd=ROOT, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.prove
def test_bench_quant_meets_its_bars_over_http_in_pieces_and_two_broken_codecs_fail(
    model_dir: Path, tmp_path: Path
) -> None:
    options = ("--model", str(model_dir), "--policies", "int8,int4", "--keep", str(tmp_path / "kept.json"))
    assert run(*options, "--pieces", "2")["whole"] is False
    result: dict[str, dict[str, list[str]]] = run(*options)  # type: ignore[assignment]
    assert result["whole"] is True
    assert result["broken_fail"] is True
    for policy in ("int8", "int4"):
        assert set(result[policy]["missed"]) <= {"kl_worst", "kl_p99"}, result  # three windows: the tails are their own
    page = (ROOT / "docs" / "bench.md").read_text()
    assert [name for name in (*result["int8"], *result["int4"], *result) if f"`{name}`" not in page] == []
