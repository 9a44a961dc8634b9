"""What fewer bits do to the answers: KL divergence, top-1 agreement and recall over sealed pages, and their bytes.

    python -m bench.quant --json [--quick] [--model FOLDER] [--threads N] [--policies int8,k8v4,int4] [--windows N]
        [--turns N] [--no-plain] [--keep FILE] [--pieces N]

One `turnkeep engine --kv-precision POLICY` for each policy and one that keeps all, asked over HTTP. docs/bench.md says
what each figure is. With `--keep` what was measured stays in FILE, and a run goes on from there; `--pieces` bounds how
much one run adds. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.processes import python, started
from bench.quant_recall import Recalled, chats, recall
from bench.quant_scores import OverHttp, Scorer
from bench.quant_texts import windows
from bench.quant_windows import Seen, Shape, figures, look, rounded
from bench.sessions import find_model
from engines.local.kv.precision import POLICIES

POOL_BYTES = 1 << 29  # one window and its copies; nothing is evicted
QUICK = Shape(past=1024, each=128, turns=1, windows=3)
CHATS, QUICK_CHATS = 13, 2  # of five questions each
SIDE_PAST, SIDE_SCORED, SIDE_WINDOWS = 1024, 128, 3  # of what is measured in this process
QUICK_SIDE, QUICK_SIDE_WINDOWS = 512, 1


@dataclass(frozen=True, slots=True)
class Bars:
    """MEASURED on the demonstration model, nats a token; at most, but for `top1`, `recall_same` and `restore`."""

    kl: float
    kl_worst: float
    kl_p99: float
    top1: float
    bytes_ratio: float
    session_bytes_ratio: float
    kl_over_plain: float
    drift: float
    recall_same: float
    recall_lost: float
    key_bias_kl: float
    demotion: float = 1.15
    restore: float = 40.0


LEAST_SESSION, LEAST_QUESTIONS = 4096, 60  # tokens, questions: bars of bytes and recall are meant for
AT_LEAST = ("top1", "recall_same", "restore")
BARS = {
    "int8": Bars(3e-5, 6e-5, 3e-4, 0.992, 0.532, 0.55, 0.5, 3.0, 0.98, 0.02, 5e-5),
    "k8v4": Bars(5e-4, 1e-3, 3e-3, 0.987, 0.407, 0.43, 0.6, 2.0, 0.93, 0.04, 5e-5),
    "int4": Bars(3e-3, 6e-3, 2e-2, 0.975, 0.298, 0.325, 0.7, 2.0, 0.83, 0.06, 0.012),
}


def missed(told: Mapping[str, Any], bars: Bars) -> list[str]:
    """Names of the figures that miss their bar; what was not measured, or over less than the bar is meant for, misses
    none."""
    found = []
    few = {"session_bytes_ratio"} if told.get("session_tokens", LEAST_SESSION) < LEAST_SESSION else set()
    few |= {"recall_same", "recall_lost"} if told.get("recall_questions", LEAST_QUESTIONS) < LEAST_QUESTIONS else set()
    for name, bar in asdict(bars).items():
        if name in few:
            continue
        value = told.get(name)
        if value is not None and (value < bar if name in AT_LEAST else value > bar):
            found.append(name)
    return found


def policy_figures(policy: str, kept: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured of one policy, as far as it was."""
    told: dict[str, Any] = {}
    if seen := [Seen.of_json(one[policy]) for one in kept["windows"].values() if policy in one]:
        told |= figures(seen)
    asked, full = Recalled(), Recalled()
    for one in kept["recall"].values():
        if policy in one:
            asked, full = asked.plus(Recalled(**one[policy])), full.plus(Recalled(**one["full"]))
    if asked.asked:
        told |= {
            "recall_questions": asked.asked,
            "recall_right": asked.right,
            "recall_right_full": full.right,
            "recall_same": round(asked.same / asked.asked, 4),
            "recall_same_choice": round(asked.same_choice / asked.asked, 4),
            "recall_lost": round((full.right - asked.right) / asked.asked, 4),
        }
    if (bias := kept["side"].get("key_bias")) is not None:
        told["key_bias_kl"] = rounded(bias[policy])
    if (restored := kept["side"].get("restore")) is not None:
        told["restore"] = round(restored[policy], 1)
    if policy == "int4" and (demoted := kept["side"].get("demotion")) is not None:
        told["demotion"] = round(demoted["demoted"] / demoted["direct"], 3)
    told["missed"] = missed(told, BARS[policy])
    return told


@contextmanager
def engines(model: Path, policies: Sequence[str], threads: int | None) -> Iterator[dict[str, OverHttp]]:
    """An engine for each policy, by its name."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found = {}
        for policy in policies:
            options = ["--model", str(model), "--port", "0", "--pool-bytes", str(POOL_BYTES), "--device", "cpu"]
            options += ["--dtype", "float32", "--exit-with-parent", "--kv-precision", policy]
            options += ["--threads", str(threads)] if threads else []
            command = python("gateway.cli", "engine", *options)
            running = stack.enter_context(started(command, folder=Path(folder), ready='"event":"ready"'))
            ready = json.loads(next(line for line in running.said.splitlines() if '"event":"ready"' in line))
            found[policy] = OverHttp(ready["url"], ready["model"], vocab)
        yield found


@dataclass(slots=True)
class Run:
    """What is measured, piece by piece. `kept`: windows, recall and side by name; `most` pieces more."""

    model: Path
    shape: Shape
    policies: Sequence[str]
    threads: int | None
    chats: int
    side_past: int
    side_windows: int
    plain: bool
    kept: dict[str, Any]
    keep: Path | None
    most: int
    turns: int  # of the windows of this run

    def measure(self) -> None:
        over_http = [f"windows {number}" for number in range(self.shape.windows)]
        over_http += [f"recall {number}" for number in range(self.chats)]
        todo = [piece for piece in over_http if not self._has(piece)][: self.most]
        if todo:
            with engines(self.model, ["full", *self.policies], self.threads) as found:
                self._over_http(todo, found.pop("full"), found)
        for piece in ("key_bias", "demotion", "restore", "broken"):
            if len(todo) < self.most and piece not in self.kept["side"]:
                todo.append(piece)
                self._note("side", piece, self._aside(piece))

    @property
    def whole(self) -> bool:
        return not any(
            (
                len(self.kept["windows"]) < self.shape.windows,
                len(self.kept["recall"]) < self.chats,
                len(self.kept["side"]) < 4,
            )
        )

    def _has(self, piece: str) -> bool:
        kind, _, number = piece.partition(" ")
        return number in self.kept[kind]

    def _over_http(self, todo: Sequence[str], full: Scorer, sealing: Mapping[str, Scorer]) -> None:
        tokenizer = self.model / "tokenizer.json"
        cut, talks = windows(tokenizer, self.shape.tokens, self.shape.windows), chats(tokenizer, self.chats)
        plain: dict[str, Scorer] = {}
        if self.plain and any(piece.startswith("windows") for piece in todo):
            from bench.quant_plain import plain_scorer  # loads torch, which nothing else here needs

            model = self._loaded()
            plain = {policy: plain_scorer(model, policy, pool_bytes=POOL_BYTES // 2) for policy in self.policies}
        for piece in todo:
            kind, _, number = piece.partition(" ")
            if kind == "windows":
                shape = replace(self.shape, turns=self.turns)
                seen = look(int(number), cut[int(number)], shape, full, sealing, plain)
                self._note(kind, number, {policy: one.as_json() for policy, one in seen.items()})
            else:
                got = recall(int(number), talks[int(number)], full, sealing)
                self._note(kind, number, {policy: asdict(one) for policy, one in got.items()})

    def _aside(self, piece: str) -> Any:
        from bench import quant_stress

        model, past = self._loaded(), self.side_past
        cut = windows(self.model / "tokenizer.json", past + SIDE_SCORED + 1, self.side_windows)
        match piece:
            case "key_bias":
                return quant_stress.key_bias(model, cut, past, POOL_BYTES // 2)
            case "demotion":
                return quant_stress.demotion(model, cut, past, POOL_BYTES // 2)
            case "restore":
                return quant_stress.restore(model, cut[0], past, POOL_BYTES // 2)
        return quant_stress.broken(model, cut[0], past, POOL_BYTES // 2)

    def _loaded(self) -> Any:
        import torch

        from engines.local.model import load_model

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return load_model(self.model)

    def _note(self, kind: str, name: str, found: Any) -> None:
        self.kept[kind][name] = found
        took = time.monotonic() - self.kept["began"]
        print(f"{took:.0f} s: {kind} {name}: {json.dumps(found)[:400]}", file=sys.stderr, flush=True)
        if self.keep is not None:
            told = {name: value for name, value in self.kept.items() if name != "began"}
            self.keep.write_text(json.dumps(told, indent=1) + "\n")


def result(run: Run) -> dict[str, Any]:
    side = run.kept["side"]
    broken = side.get("broken")
    lax = BARS["int4"]
    return {
        **{policy: policy_figures(policy, run.kept) for policy in run.policies},
        "broken": broken,
        "broken_fail": broken and all(one["kl"] > lax.kl_worst and one["top1"] < lax.top1 for one in broken.values()),
        "past_tokens": run.shape.past,
        "windows": len(run.kept["windows"]),
        "scored_tokens": sum(len(one[run.policies[0]]["turns"]) for one in run.kept["windows"].values())
        * run.shape.each,
        "texts": len({one[run.policies[0]]["text"] for one in run.kept["windows"].values()}),
        "whole": run.whole,
        "machine": {
            "cores": os.cpu_count(),
            "threads": run.threads,
            "load_average_at_end": round(os.getloadavg()[0], 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object on standard output")
    parser.add_argument("--model", help="a model folder; default: $TURNKEEP_MODEL_DIR, else the demonstration model")
    parser.add_argument("--threads", type=int, help="CPU threads of the model; default: torch's choice")
    parser.add_argument("--policies", default=",".join(BARS), help=f"of {', '.join(BARS)}; default all")
    parser.add_argument("--windows", type=int, help="of text; default 8, quick 3")
    parser.add_argument("--turns", type=int, help="scored in each window of this run; default 10, quick 1")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain schemes out, as --quick does")
    parser.add_argument("--keep", type=Path, help="file of what was measured; a run goes on from what it holds")
    parser.add_argument("--pieces", type=int, default=1000, help="measure at most so many more (windows, chats, ...)")
    parser.add_argument("--quick", action="store_true", help="three windows of 1,024 tokens, ten questions")
    args = parser.parse_args()
    policies = args.policies.split(",")
    if unknown := [name for name in policies if name not in BARS]:
        parser.error(f"no policy {', '.join(unknown)}: there are {', '.join(BARS)} (and {', '.join(POLICIES)})")
    shape = QUICK if args.quick else Shape()
    shape = replace(shape, windows=args.windows or shape.windows)
    asked = {"shape": asdict(shape), "policies": policies, "quick": args.quick}  # some windows may have fewer turns
    kept: dict[str, Any] = {**asked, "windows": {}, "recall": {}, "side": {}}
    if args.keep is not None and args.keep.exists():
        kept = json.loads(args.keep.read_text())
        if {name: kept[name] for name in asked} != asked:
            parser.error(f"{args.keep} holds another measurement: { ({name: kept[name] for name in asked}) }")
    run = Run(
        model=find_model(args.model),
        shape=shape,
        policies=policies,
        threads=args.threads,
        chats=QUICK_CHATS if args.quick else CHATS,
        side_past=QUICK_SIDE if args.quick else SIDE_PAST,
        side_windows=QUICK_SIDE_WINDOWS if args.quick else SIDE_WINDOWS,
        plain=not (args.quick or args.no_plain),
        kept=kept | {"began": time.monotonic()},
        keep=args.keep,
        most=args.pieces,
        turns=min(args.turns or shape.turns, shape.turns),
    )
    run.measure()
    if not args.json:
        print("What 8 and 4 bits do to the answers, over the engine's own pages")
    print(json.dumps(result(run)))


if __name__ == "__main__":
    main()
