"""What a session costs on the engine: TTFT with and without reuse, and eight sessions at once.

    python -m bench.sessions --json [--model FOLDER] [--threads N] [--rounds 1] [--batch-rounds 3] [--no-peer] [--quick]

A real `turnkeep engine` process, asked over its own wire; arrivals are stamped here. Ten turns (system prompt 300
tokens, user turns 80, replies of exactly 64, greedy, float32), each turn asked with reuse, without, and of the
`generate` of transformers, in turn and in changing order; then eight sessions, a turn each one after the other and the
same turns at once. docs/bench.md says what each figure is. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from bench.processes import Running, python, started
from bench.talk import Answer, Client, Talk, ask_without_reuse
from engines.local.model_process import WAIT_POLICY
from engines.local.weights import DEMO_NAME, resolve_model
from engines.remote.http import Timeouts, Upstream
from engines.remote.turnkeep import TurnkeepEngine
from gateway.sessions.tokens import ModelTokens

POOL_BYTES = 1 << 30  # 23,301 tokens of the demonstration model: nothing is evicted
PATIENCE = Timeouts(first_delta_s=1200.0, idle_s=600.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """What is asked."""

    system_tokens: int = 300
    user_tokens: int = 80
    reply_tokens: int = 64
    turns: int = 10
    rounds: int = 1
    sessions: int = 8
    batch_rounds: int = 3


QUICK = Shape(system_tokens=160, user_tokens=72, reply_tokens=8, turns=4, sessions=4, batch_rounds=1)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the ten, asked of everybody. Seconds; None where there is no peer."""

    number: int
    on: Answer
    off: Answer
    fresh_ttft_s: float | None = None
    kept_ttft_s: float | None = None
    kept_decode_s: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The same turns of the same sessions, one after the other and at once."""

    cold: bool  # first turns: the whole prompt is prefilled
    tokens: int  # generated, by each way
    sequential_s: float
    batched_s: float
    sequential_decode_tokens_s: float
    batched_decode_tokens_s: float
    sequential_cpu_s: float
    batched_cpu_s: float


@dataclass(slots=True)
class Notes:
    """What was seen to differ: (where, first token that differs)."""

    different: list[str]

    def compare(self, what: str, one: Sequence[int], other: Sequence[int]) -> None:
        if tuple(one) != tuple(other):
            at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
            self.different.append(f"{what}: token {at}")


async def converse(
    client: Client, tokens: ModelTokens, shape: Shape, peer: Any, round_: int, notes: Notes
) -> list[Turn]:
    talk = Talk(tokens, f"ten-{round_}", "bench", Random(round_), shape.system_tokens, shape.user_tokens)
    turns: list[Turn] = []
    for number in range(1, shape.turns + 1):
        prompt = talk.next_prompt()
        got: dict[str, Any] = {}

        async def on(got: dict[str, Any] = got) -> None:
            got["on"] = await talk.ask(client)

        async def off(got: dict[str, Any] = got, prompt: list[int] = prompt, number: int = number) -> None:
            got["off"] = await ask_without_reuse(client, prompt, name=f"off-{round_}-{number}")

        async def fresh(got: dict[str, Any] = got, prompt: list[int] = prompt) -> None:
            got["fresh"] = peer.fresh(prompt)

        async def kept(got: dict[str, Any] = got, prompt: list[int] = prompt) -> None:
            got["kept"] = peer.kept(prompt, shape.reply_tokens)

        ways = [on, off, fresh, kept] if peer else [on, off]
        first = number % len(ways)
        for way in ways[first:] + ways[:first]:
            await way()
        notes.compare(f"round {round_} turn {number}, reuse off", got["on"].ids, got["off"].ids)
        turn = Turn(number, got["on"], got["off"])
        if peer:
            notes.compare(f"round {round_} turn {number}, transformers", got["on"].ids, got["kept"].ids)
            turn = replace(
                turn,
                fresh_ttft_s=got["fresh"].ttft_s,
                kept_ttft_s=got["kept"].ttft_s,
                kept_decode_s=got["kept"].decode_s,
            )
        turns.append(turn)
        _say(
            f"turn {number}: {len(prompt)} tokens, {turn.on.cached_tokens} cached; TTFT ms"
            f" on {_ms(turn.on.ttft_s)}, off {_ms(turn.off.ttft_s)},"
            f" transformers new {_ms(turn.fresh_ttft_s)}, kept {_ms(turn.kept_ttft_s)}"
        )
    if peer:
        peer.forget()
    return turns


async def crowd(client: Client, tokens: ModelTokens, shape: Shape, notes: Notes) -> list[Batch]:
    """Two sets of the same sessions, which share nothing: one is asked in sequence, one at once."""

    def talks(salt: str) -> list[Talk]:
        return [
            Talk(tokens, f"{salt}-{n}", salt, Random(1000 + n), shape.system_tokens, shape.user_tokens)
            for n in range(shape.sessions)
        ]

    sequential, batched = talks("sequence"), talks("at-once")
    batches: list[Batch] = []
    for number in range(shape.batch_rounds + 1):
        for talk in (*sequential, *batched):
            talk.next_prompt()
        ways = ["sequential", "batched"] if number % 2 else ["batched", "sequential"]
        got: dict[str, tuple[float, float, list[Answer]]] = {}
        for way in ways:
            cpu, start = client.cpu_s(), time.perf_counter()
            if way == "sequential":
                answers = [await talk.ask(client) for talk in sequential]
            else:
                answers = list(await asyncio.gather(*(talk.ask(client) for talk in batched)))
            got[way] = (time.perf_counter() - start, client.cpu_s() - cpu, answers)
        for n, (one, other) in enumerate(zip(got["sequential"][2], got["batched"][2], strict=True)):
            notes.compare(f"session {n} turn {number + 1}, batched", one.ids, other.ids)
        batches.append(
            Batch(
                cold=number == 0,
                tokens=shape.sessions * shape.reply_tokens,
                sequential_s=got["sequential"][0],
                batched_s=got["batched"][0],
                sequential_decode_tokens_s=_alone(got["sequential"][2]),
                batched_decode_tokens_s=_together(got["batched"][2]),
                sequential_cpu_s=got["sequential"][1],
                batched_cpu_s=got["batched"][1],
            )
        )
        last = batches[-1]
        _say(
            f"{shape.sessions} sessions, turn {number + 1}: one after the other {last.sequential_s:.1f} s,"
            f" at once {last.batched_s:.1f} s; decode {last.sequential_decode_tokens_s:.1f} and"
            f" {last.batched_decode_tokens_s:.1f} tokens/s"
        )
    return batches


def _alone(answers: list[Answer]) -> float:
    """Decode tokens a second, each answer by itself."""
    return sum(len(answer.ids) - 1 for answer in answers) / sum(answer.decode_s for answer in answers)


def _together(answers: list[Answer]) -> float:
    """Decode tokens a second while all of them decode: from the last first token to the first last one."""
    start = max(answer.arrivals_s[0] for answer in answers)
    stop = min(answer.arrivals_s[-1] for answer in answers)
    came = sum(start < at <= stop for answer in answers for at in answer.arrivals_s)
    return came / (stop - start)


def figures(rounds: list[list[Turn]], batches: list[Batch]) -> dict[str, Any]:
    """The figures of docs/bench.md; null where they were not measured."""

    def middle(number: int, read: Callable[[Turn], float | None]) -> float | None:
        seen = [value for turns in rounds if (value := read(turns[number - 1])) is not None]
        return statistics.median(seen) if seen else None

    def over(number: int, read: Callable[[Turn], float | None]) -> float | None:
        """Reuse on is 1: the median of the ratios inside each round."""
        ratios = [value / turns[number - 1].on.ttft_s for turns in rounds if (value := read(turns[number - 1]))]
        return round(statistics.median(ratios), 2) if ratios else None

    numbers = range(1, len(rounds[0]) + 1)
    late = [turn for turns in rounds for turn in turns if turn.number >= 3]
    warm = [batch for batch in batches if not batch.cold]
    cold = next(batch for batch in batches if batch.cold)
    ten = 10 if len(numbers) >= 10 else None
    turns_ms = {
        str(n): {
            "prompt_tokens": rounds[0][n - 1].on.prompt_tokens,
            "cached_tokens": rounds[0][n - 1].on.cached_tokens,
            "on_ms": _ms(middle(n, lambda turn: turn.on.ttft_s)),
            "off_ms": _ms(middle(n, lambda turn: turn.off.ttft_s)),
            "on_cpu_ms": _ms(middle(n, lambda turn: turn.on.cpu_s)),
            "off_cpu_ms": _ms(middle(n, lambda turn: turn.off.cpu_s)),
            "transformers_new_cache_ms": _ms(middle(n, lambda turn: turn.fresh_ttft_s)),
            "transformers_kept_cache_ms": _ms(middle(n, lambda turn: turn.kept_ttft_s)),
        }
        for n in numbers
    }
    cpu = [turns[-1].off.cpu_s / turns[-1].on.cpu_s for turns in rounds if turns[-1].on.cpu_s]
    decoded = [turn for turns in rounds for turn in turns]
    kept_s = [turn.kept_decode_s for turn in decoded if turn.kept_decode_s]
    return {
        "cached_ratio_from_turn_3": round(
            sum(turn.on.cached_tokens for turn in late) / sum(turn.on.prompt_tokens for turn in late), 4
        )
        if late
        else None,
        "ttft_turn_10_off_over_on": over(ten, lambda turn: turn.off.ttft_s) if ten else None,
        "ttft_turn_10_transformers_new_cache_over_on": over(ten, lambda turn: turn.fresh_ttft_s) if ten else None,
        "ttft_turn_10_transformers_kept_cache_over_on": over(ten, lambda turn: turn.kept_ttft_s) if ten else None,
        "ttft_last_turn_off_over_on": over(len(numbers), lambda turn: turn.off.ttft_s),
        "ttft_last_turn_off_over_on_cpu": round(statistics.median(cpu), 2) if cpu else None,
        "batch_speedup": _median(warm, lambda batch: batch.sequential_s / batch.batched_s),
        "batch_speedup_decode": _median(
            warm, lambda batch: batch.batched_decode_tokens_s / batch.sequential_decode_tokens_s
        ),
        "batch_speedup_cpu": _median(warm, lambda batch: batch.sequential_cpu_s / batch.batched_cpu_s),
        "batch_speedup_first_turn": round(cold.sequential_s / cold.batched_s, 2),
        "sequential_tokens_s": _median(warm, lambda batch: batch.tokens / batch.sequential_s),
        "batched_tokens_s": _median(warm, lambda batch: batch.tokens / batch.batched_s),
        "decode_tokens_s_alone": round(
            sum(len(turn.on.ids) - 1 for turn in decoded) / sum(turn.on.decode_s for turn in decoded), 1
        ),
        "decode_tokens_s_transformers": round(sum(len(turn.on.ids) - 1 for turn in decoded) / sum(kept_s), 1)
        if kept_s
        else None,
        "decode_tokens_s_sessions_at_once": _median(warm, lambda batch: batch.batched_decode_tokens_s),
        "turns": turns_ms,
    }


def _median(batches: list[Batch], read: Callable[[Batch], float]) -> float | None:
    return round(statistics.median(read(batch) for batch in batches), 2) if batches else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def find_model(asked: str | None) -> Path:
    """`--model`, else `$TURNKEEP_MODEL_DIR`, else the demonstration model where `turnkeep models` keeps it."""
    return resolve_model(asked or os.environ.get("TURNKEEP_MODEL_DIR") or DEMO_NAME, progress=_say)


def start_engine(stack: ExitStack, folder: Path, model: Path, threads: int | None) -> Running:
    options = ["--model", str(model), "--port", "0", "--pool-bytes", str(POOL_BYTES), "--device", "cpu"]
    options += ["--dtype", "float32", "--exit-with-parent", *(["--threads", str(threads)] if threads else [])]
    command = python("gateway.cli", "engine", *options)
    return stack.enter_context(started(command, folder=folder, ready='"event":"ready"'))


async def measure(model: Path, shape: Shape, *, threads: int | None, peer: bool) -> dict[str, Any]:
    load_at_start = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        running = start_engine(stack, Path(folder), model, threads)
        line = next(line for line in running.said.splitlines() if '"event":"ready"' in line)
        ready = json.loads(line)
        tokens = ModelTokens.load(model, name=ready["model"])
        reference = None
        if peer:
            os.environ.setdefault("OMP_WAIT_POLICY", WAIT_POLICY)  # before torch comes in: the peer waits as the engine
            from bench.reference import Reference

            reference = Reference(model, threads)
        engine = TurnkeepEngine(Upstream(ready["url"], timeouts=PATIENCE))
        client = Client(engine, ready["model"], shape.reply_tokens, running.cpu_s)
        notes = Notes([])
        try:
            warm = Talk(tokens, "warm", "warm", Random(99), shape.system_tokens, shape.user_tokens)
            warm.next_prompt()
            await warm.ask(client)
            rounds = [await converse(client, tokens, shape, reference, n, notes) for n in range(shape.rounds)]
            batches = await crowd(client, tokens, shape, notes)
        finally:
            await engine.aclose()
        rss = running.rss_mib()
    return {
        **figures(rounds, batches),
        "different": notes.different,
        "rss_mb": round(rss),
        "machine": {
            "cores": os.cpu_count(),
            "threads": threads or (reference.threads if reference else None),
            "load_average_at_start": round(load_at_start, 2),
            "load_average_at_end": round(os.getloadavg()[0], 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object on standard output")
    parser.add_argument("--model", help="a model folder; default: $TURNKEEP_MODEL_DIR, else the demonstration model")
    parser.add_argument("--threads", type=int, help="CPU threads of the model; default: torch's choice")
    parser.add_argument("--rounds", type=int, help="of the ten turns; default 1")
    parser.add_argument("--batch-rounds", type=int, help="turns of the sessions after their first; default 3")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers' own generate out")
    parser.add_argument("--quick", action="store_true", help="four short turns, four sessions: shows that it runs")
    args = parser.parse_args()
    shape = QUICK if args.quick else Shape()
    changed = {name: value for name in ("rounds", "batch_rounds") if (value := getattr(args, name)) is not None}
    model = find_model(args.model)
    asked = measure(model, replace(shape, **changed), threads=args.threads, peer=not args.no_peer)
    result = uvloop.run(asked)
    if not args.json:
        print("A session on the engine, with reuse and without, beside transformers")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
