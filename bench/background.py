"""What a turn feels of background work on the engine: TTFT and ITL beside a long prefill and decode, and without.

    python -m bench.background --json [--model FOLDER] [--threads N] [--turns 6] [--rounds 2] [--chunk 32] [--quick]

A real `turnkeep engine` process, asked over its own wire. Blocks of turns, alternately alone and with a background job
(priority 10: a prompt of 3,000 tokens, 300 generated) that is in the engine all the time, a new one as soon as one has
ended; the same think times in both. docs/bench.md says what each figure is. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from bench.processes import python, started
from bench.sessions import PATIENCE, POOL_BYTES, find_model
from bench.talk import Answer, Client, Talk
from engines.contract import GenerateRequest, IdsPrompt, Sampling
from engines.remote.http import Upstream
from engines.remote.turnkeep import TurnkeepEngine
from gateway.sessions.tokens import ModelTokens

ANY_IDS = range(32, 250)  # of a job's prompt; every vocabulary has them
THINK_S = (0.5, 2.5)  # between an answer and the next turn, drawn evenly


@dataclass(frozen=True, slots=True)
class Shape:
    system_tokens: int = 300
    user_tokens: int = 80
    reply_tokens: int = 64
    turns: int = 6  # of a block
    rounds: int = 2  # each a block alone and one beside background work
    job_prompt_tokens: int = 3000
    job_tokens: int = 300


QUICK = Shape(system_tokens=160, user_tokens=72, reply_tokens=8, turns=2, rounds=1, job_prompt_tokens=200, job_tokens=8)


@dataclass(slots=True)
class Jobs:
    """Background work, one job after the other until the context ends."""

    engine: TurnkeepEngine
    model: str
    shape: Shape
    seconds: list[float] = field(default_factory=list)  # of each job that ended by itself
    first_delta_s: list[float] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task  # a job that failed fails the run

    async def _run(self) -> None:
        while True:
            await self._job(next(self._numbers))

    async def _job(self, number: int) -> None:
        ids = array("I", Random(number).choices(ANY_IDS, k=self.shape.job_prompt_tokens)).tobytes()

        async def whole() -> bytes:
            return ids

        prompt = IdsPrompt(ids, self.shape.job_prompt_tokens, whole)
        sampling = Sampling(max_tokens=self.shape.job_tokens, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(f"job-{number}", self.model, prompt, sampling, cache_salt=f"job{number}", priority=10)
        start, first = time.perf_counter(), None
        async with aclosing(self.engine.generate(request)) as deltas:
            async for _ in deltas:
                first = first or time.perf_counter() - start
        self.first_delta_s.append(first or 0.0)
        self.seconds.append(time.perf_counter() - start)


async def block(client: Client, talk: Talk, think: Random, turns: int) -> list[Answer]:
    answers = []
    for _ in range(turns):
        await asyncio.sleep(think.uniform(*THINK_S))
        talk.next_prompt()
        answers.append(await talk.ask(client))
    return answers


def figures(alone: Sequence[Answer], beside: Sequence[Answer], jobs: Jobs) -> dict[str, Any]:
    found: dict[str, Any] = {}
    seen = {"alone": alone, "beside": beside}
    for name, read in (("ttft", lambda answer: [answer.ttft_s]), ("itl", _itl)):
        values = {way: [value for answer in answers for value in read(answer)] for way, answers in seen.items()}
        for label, at in (("p50", 0.5), ("p95", 0.95)):
            one, other = quantile(values["alone"], at), quantile(values["beside"], at)
            found[f"{name}_{label}_ratio"] = round(other / one, 3)
            found[f"{name}_{label}_alone_ms"] = round(one * 1000, 1)
            found[f"{name}_{label}_beside_ms"] = round(other * 1000, 1)
    found["turns"] = {way: len(answers) for way, answers in seen.items()}
    found["jobs_finished"] = len(jobs.seconds)
    found["job_s"] = round(statistics.median(jobs.seconds), 1) if jobs.seconds else None
    return found


def _itl(answer: Answer) -> list[float]:
    return [after - before for before, after in itertools.pairwise(answer.arrivals_s)]


def quantile(values: Sequence[float], at: float) -> float:
    """The smallest value that a share `at` of all does not exceed."""
    return sorted(values)[min(int(at * len(values)), len(values) - 1)]


async def measure(model: Path, shape: Shape, *, threads: int | None, chunk: int) -> dict[str, Any]:
    load_at_start = os.getloadavg()[0]
    options = ["--model", str(model), "--port", "0", "--pool-bytes", str(POOL_BYTES), "--device", "cpu"]
    options += ["--dtype", "float32", "--exit-with-parent", "--background-chunk", str(chunk)]
    options += ["--threads", str(threads)] if threads else []
    command = python("gateway.cli", "engine", *options)
    with tempfile.TemporaryDirectory() as folder, started(
        command, folder=Path(folder), ready='"event":"ready"'
    ) as running:  # fmt: skip
        ready = json.loads(next(line for line in running.said.splitlines() if '"event":"ready"' in line))
        tokens = ModelTokens.load(model, name=ready["model"])
        engine = TurnkeepEngine(Upstream(ready["url"], timeouts=PATIENCE))
        client = Client(engine, ready["model"], shape.reply_tokens, running.cpu_s)
        jobs = Jobs(engine, ready["model"], shape)
        alone: list[Answer] = []
        beside: list[Answer] = []
        try:
            for number in range(shape.rounds):
                for way in ("alone", "beside") if number % 2 else ("beside", "alone"):
                    name = f"{way}-{number}"
                    talk = Talk(tokens, name, name, Random(number), shape.system_tokens, shape.user_tokens)
                    talk.next_prompt()
                    await talk.ask(client)  # the first turn prefills the system prompt: not counted
                    if way == "alone":
                        alone += await block(client, talk, Random(number), shape.turns)
                    else:
                        async with jobs.running():
                            beside += await block(client, talk, Random(number), shape.turns)
                    print(f"round {number + 1}, {way}: done", file=sys.stderr, flush=True)
        finally:
            await engine.aclose()
    return {
        **figures(alone, beside, jobs),
        "background_chunk": chunk,
        "machine": {
            "cores": os.cpu_count(),
            "threads": threads,
            "load_average_at_start": round(load_at_start, 2),
            "load_average_at_end": round(os.getloadavg()[0], 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object on standard output")
    parser.add_argument("--model", help="a model folder; default: $TURNKEEP_MODEL_DIR, else the demonstration model")
    parser.add_argument("--threads", type=int, help="CPU threads of the model; default: torch's choice")
    parser.add_argument("--turns", type=int, help="of a block; default 6")
    parser.add_argument("--rounds", type=int, help="each a block alone and one beside background work; default 2")
    parser.add_argument("--chunk", type=int, default=32, help="the engine's background_chunk; default 32")
    parser.add_argument("--quick", action="store_true", help="two short turns: shows that it runs")
    args = parser.parse_args()
    shape = QUICK if args.quick else Shape()
    changed = {name: value for name in ("turns", "rounds") if (value := getattr(args, name)) is not None}
    asked = measure(find_model(args.model), replace(shape, **changed), threads=args.threads, chunk=args.chunk)
    result = uvloop.run(asked)
    if not args.json:
        print("What a turn feels of background work")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
