"""What a user feels of compaction: TTFT and ITL while it runs in the background, and without.

    python -m bench.stall --json [--model FOLDER] [--data FOLDER] [--threads N] [--rounds 3] [--quick]

A real `turnkeep serve` in front of a real `turnkeep engine` with a small window. Several sessions at once say what
people said in the chitchat set, at those people's think times, in blocks: with compaction (mode auto) and without (mode
manual), the same words and pauses in both. Then one session alone: the first turn after a switch beside the second,
and turns that are compacted in the foreground. docs/bench.md says what each figure is. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import uvloop

from bench.background import quantile
from bench.load import Client, connected
from bench.processes import python, started
from bench.sessions import POOL_BYTES, find_model
from bench.stall_talk import Chat, Script, Seen, ask, chats, exported
from gateway.sessions.tokens import ModelTokens

DATA = Path(__file__).parents[2] / "shared" / "data"
WAITED = "a turn waited"  # in a run's problems: it was hurried, because a turn would not fit without it
SETTLE_S = 300.0


@dataclass(frozen=True, slots=True)
class Shape:
    window: int = 2048
    user_tokens: int = 96  # at least, of each message
    reply_tokens: int = 24  # at most
    sessions: int = 2
    turns: int = 10  # of each session in a block, after the opening one
    rounds: int = 3  # a block of each kind
    think_scale: float = 1.0
    think_s: tuple[float, float] = (3.0, 40.0)  # a tenth of people's pauses are shorter, a third longer
    filled_auto: float = 0.45  # of the window, before a block: it oscillates between 0.40 and 0.70 ...
    filled_manual: float = 0.25  # ... and this grows through the same range
    switches: int = 5
    foregrounds: int = 3


QUICK = Shape(
    window=1536,
    user_tokens=64,
    reply_tokens=8,
    sessions=1,
    turns=6,
    rounds=1,
    think_scale=0.25,
    think_s=(0.5, 2.0),
    filled_auto=0.6,
    switches=1,
    foregrounds=1,
)


@dataclass(slots=True)
class Found:
    """Turns by kind, and every row of a compaction."""

    auto: list[Seen] = field(default_factory=list)
    manual: list[Seen] = field(default_factory=list)
    firsts: list[tuple[Seen, Seen]] = field(default_factory=list)  # after a switch: the first turn and the second
    foregrounds: list[tuple[Seen, Seen]] = field(default_factory=list)  # compacted before it, and the next one
    rows: list[dict[str, Any]] = field(default_factory=list)  # of sessions that talked in blocks


class Bench:
    def __init__(
        self, client: Client, http: aiohttp.ClientSession, tokens: ModelTokens, said: list[Chat], shape: Shape
    ) -> None:
        self.client, self.http, self.tokens, self.said, self.shape = client, http, tokens, said, shape
        self.found = Found()

    async def run(self) -> Found:
        shape = self.shape
        for number in range(shape.rounds):
            for mode in ("auto", "manual") if number % 2 == 0 else ("manual", "auto"):
                await self.block(number, mode)
                _say(f"round {number + 1}, {mode}: {len(self.found.rows)} compactions so far")
        for number in range(shape.switches):
            first, second = await self.switch(number)
            _say(f"switch {number + 1}: {_ms(first.ttft_s)} ms, then {_ms(second.ttft_s)}")
        for number in range(shape.foregrounds):
            turn, later = await self.foreground(number)
            _say(f"foreground {number + 1}: {_ms(turn.ttft_s)} ms, then {_ms(later.ttft_s)}")
        return self.found

    async def block(self, number: int, mode: str) -> None:
        """Sessions at once; the same seed for both modes: the same words and the same pauses."""

        async def converse(name: str, seed: int) -> list[Seen]:
            script = self.script(seed)
            filled = self.shape.filled_auto if mode == "auto" else self.shape.filled_manual
            await self.filled(name, script, {"mode": mode}, filled)
            script = self.script(seed + 1)
            await ask(self.client, self.http, name, script.next_message())  # its prompt is prefilled whole: not counted
            turns = []
            for _ in range(self.shape.turns):
                await asyncio.sleep(script.next_think_s())
                turns.append(await ask(self.client, self.http, name, script.next_message()))
            return turns

        names = [f"{mode}-{number}-{n}" for n in range(self.shape.sessions)]
        talks = await asyncio.gather(*(converse(name, 1000 * number + 10 * n) for n, name in enumerate(names)))
        for turns in talks:
            (self.found.auto if mode == "auto" else self.found.manual).extend(turns)
        for name in names:
            self.found.rows += await self.settled(name)
            await self.delete(name)

    async def switch(self, number: int) -> tuple[Seen, Seen]:
        """One session alone: turns until it is compacted, then the first one after it and the second."""
        name, script = f"switch-{number}", self.script(7000 + number)
        await self.filled(name, script, {"mode": "auto"}, 0.55)
        for _ in range(10):
            await ask(self.client, self.http, name, script.next_message())
            rows = await self.settled(name)
            if rows and rows[0]["status"] == "committed":
                first = await ask(self.client, self.http, name, script.next_message())
                self.found.firsts.append((first, await ask(self.client, self.http, name, script.next_message())))
                break
        else:
            raise RuntimeError(f"{name} was not compacted: {rows}")
        await self.delete(name)
        return self.found.firsts[-1]

    async def foreground(self, number: int) -> tuple[Seen, Seen]:
        """One session alone that is compacted only at the hard limit."""
        name, script = f"foreground-{number}", self.script(8000 + number)
        await self.filled(name, script, {"mode": "manual"}, 0.8)
        for _ in range(10):
            turn = await ask(self.client, self.http, name, script.next_message())
            if turn.foreground:
                later = await ask(self.client, self.http, name, script.next_message())
                self.found.foregrounds.append((turn, later))
                break
        else:
            raise RuntimeError(f"{name} never met the hard limit")
        await self.delete(name)
        return self.found.foregrounds[-1]

    def script(self, seed: int) -> Script:
        shape = self.shape
        return Script(self.said, Random(seed), self.tokens.count, shape.user_tokens, shape.think_scale, shape.think_s)

    async def filled(self, name: str, script: Script, policy: dict[str, Any], share: float) -> None:
        """A session that has used `share` of the window."""
        policy = {**policy, "max_output_tokens": self.shape.reply_tokens}
        a_turn = self.shape.user_tokens + self.shape.reply_tokens + 2 * self.tokens.message_overhead
        turns = max(1, int(share * self.shape.window / a_turn))
        body = exported(name, self.tokens.name, policy, script, turns)
        headers = {"Content-Type": "application/x-ndjson"}
        async with self.http.post(f"{self.client.url}/v1/sessions/import", data=body, headers=headers) as response:
            if response.status != 201:
                raise RuntimeError(f"the import was answered {response.status}: {(await response.read())[:400]!r}")

    async def settled(self, name: str) -> list[dict[str, Any]]:
        """Its compactions, newest first, once none runs; one that is about to begin gets a moment."""
        url = f"{self.client.url}/v1/sessions/{name}/compactions?limit=100"
        for _ in range(int(SETTLE_S / 0.25)):
            await asyncio.sleep(0.25)
            async with self.http.get(url) as response:
                rows: list[dict[str, Any]] = (await response.json())["data"]
            if all(row["status"] != "running" for row in rows):
                return rows
        raise RuntimeError(f"a compaction of {name} does not end: {rows[0]}")

    async def delete(self, name: str) -> None:
        async with self.http.delete(f"{self.client.url}/v1/sessions/{name}") as response:
            await response.read()


def figures(found: Found) -> dict[str, Any]:
    """The figures of docs/bench.md."""
    spans = [(row["created_at"], row["completed_at"]) for row in found.rows if row["trigger"] == "background"]
    without = [turn for turn in found.manual if not turn.foreground]
    plain = [turn for turn in found.auto if turn.cause != "compacted" and not turn.foreground]
    during = [turn for turn in plain if _meets(turn.sent_at, turn.arrivals[0], spans)]
    told: dict[str, Any] = {}
    ttft = {"during": [t.ttft_s for t in during], "without": [t.ttft_s for t in without]}
    itl = {
        "during": [b - a for turn in found.auto for a, b in turn.gaps if _meets(a, b, spans)],
        "without": [b - a for turn in without for a, b in turn.gaps],
    }
    for name, values in (("ttft", ttft), ("itl", itl)):
        for label, at in (("p50", 0.5), ("p95", 0.95)):
            one, other = (quantile(values[way], at) if values[way] else None for way in ("during", "without"))
            told[f"{name}_{label}_ratio"] = _over(one, other)
            told[f"{name}_{label}_during_ms"], told[f"{name}_{label}_without_ms"] = _ms(one), _ms(other)
    told |= {
        "first_turn_after_switch_ratio": _middle(first.ttft_s / second.ttft_s for first, second in found.firsts),
        "first_turns": [_pair(one) for one in found.firsts],
        "finished_before_hard_limit": _finished(found.rows),
        "foreground_ttft_ratio": _middle(turn.ttft_s / later.ttft_s for turn, later in found.foregrounds),
        "foregrounds": [_pair(one) for one in found.foregrounds],
        "turns": {"during": len(during), "without": len(without), "auto": len(found.auto)},
        "compactions": _compactions(found.rows),
        "tokens_computed_p50": {
            "during": _middle(t.prompt_tokens - t.cached_tokens for t in during),
            "without": _middle(t.prompt_tokens - t.cached_tokens for t in without),
        },
    }
    return told


def _finished(rows: Sequence[dict[str, Any]]) -> float | None:
    """Of the runs that sessions with compaction needed: the share that no turn had to wait for."""
    needed = [row for row in rows if row["session_id"].startswith("auto") and row["status"] != "skipped"]
    in_time = [
        row
        for row in needed
        if row["trigger"] == "background"
        and row["status"] == "committed"
        and not any(WAITED in problem for problem in row["report"]["problems"])
    ]
    return round(len(in_time) / len(needed), 4) if needed else None


def _compactions(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    background = [row for row in rows if row["trigger"] == "background"]
    made = [row for row in background if row["status"] == "committed"]
    return {
        "background": dict(Counter(row["status"] for row in background)),
        "foreground": sum(row["trigger"] == "foreground" for row in rows),
        "duration_p50_s": _middle(row["completed_at"] - row["created_at"] for row in made),
        "tokens_before_p50": _middle(row["report"]["tokens_before"] for row in made),
        "tokens_after_p50": _middle(row["report"]["tokens_after"] for row in made),
        "sources": dict(sum((Counter(row["report"]["sources"]) for row in made), Counter())),
    }


def _meets(start: float, stop: float, spans: Iterable[tuple[float, float]]) -> bool:
    return any(start <= end and begin <= stop for begin, end in spans)


def _pair(pair: tuple[Seen, Seen]) -> dict[str, Any]:
    one, other = pair
    computed = [turn.prompt_tokens - turn.cached_tokens for turn in pair]
    return {"ms": [_ms(one.ttft_s), _ms(other.ttft_s)], "computed": computed, "prompt": one.prompt_tokens}


def _middle(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(statistics.median(found), 3) if found else None


def _over(one: float | None, other: float | None) -> float | None:
    return round(one / other, 3) if one is not None and other else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def measure(model: Path, data: Path, shape: Shape, *, threads: int | None) -> dict[str, Any]:
    load_at_start = os.getloadavg()[0]
    options = ["--model", str(model), "--port", "0", "--pool-bytes", str(POOL_BYTES), "--device", "cpu"]
    options += ["--dtype", "float32", "--window", str(shape.window), "--exit-with-parent"]
    options += ["--threads", str(threads)] if threads else []
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder = Path(made)
        engine = stack.enter_context(
            started(python("gateway.cli", "engine", *options), folder=folder, ready='"event":"ready"')
        )
        ready = json.loads(next(line for line in engine.said.splitlines() if '"event":"ready"' in line))
        serve = python("gateway.cli", "serve", "--port", "0", "--upstream", ready["url"])
        environ = {"TURNKEEP_AUTH": "false", "TURNKEEP_DATA_DIR": str(folder / "kept"), "TURNKEEP_LOG_LEVEL": "warning"}
        gateway = stack.enter_context(started(serve, folder=folder, ready="turnkeep chat --url", environ=environ))
        url = next(word for word in gateway.said.split() if word.startswith("http://"))
        tokens = ModelTokens.load(model, name=ready["model"])
        async with connected() as http:
            client = Client(url, http, {})
            await warmed(client, http, tokens)
            bench = Bench(client, http, tokens, chats(data), shape)
            found = await bench.run()
        cpu_s = {"gateway": round(gateway.cpu_s(), 1), "engine": round(engine.cpu_s(), 1)}
    return {
        **figures(found),
        "parameters": {
            name: getattr(shape, name)
            for name in ("window", "user_tokens", "reply_tokens", "sessions", "think_scale", "think_s", "rounds")
        },
        "cpu_s": cpu_s,
        "machine": {
            "cores": os.cpu_count(),
            "threads": threads,
            "load_average_at_start": round(load_at_start, 2),
            "load_average_at_end": round(os.getloadavg()[0], 2),
        },
    }


async def warmed(client: Client, http: aiohttp.ClientSession, tokens: ModelTokens) -> None:
    """The gateway has the engine's tokenizer: from then on it goes by ids."""
    await client.post("/v1/sessions", {"id": "warm", "model": tokens.name})
    for _ in range(100):
        turn = await client.post("/v1/sessions/warm/turns", {"input": "Hello.", "max_output_tokens": 4})
        if turn["metadata"]["mode"] == "ids":
            break
        await asyncio.sleep(0.2)
    else:
        raise RuntimeError(f"the gateway does not go by ids: {turn['metadata']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object on standard output")
    parser.add_argument("--model", help="a model folder; default: $TURNKEEP_MODEL_DIR, else the demonstration model")
    parser.add_argument("--data", type=Path, help="default: $TURNKEEP_DATA, else ../shared/data")
    parser.add_argument("--threads", type=int, help="CPU threads of the model; default: torch's choice")
    parser.add_argument("--rounds", type=int, help="each a block with compaction and one without; default 3")
    parser.add_argument("--quick", action="store_true", help="a short block of each, one switch: shows that it runs")
    args = parser.parse_args()
    shape = QUICK if args.quick else Shape()
    shape = replace(shape, rounds=args.rounds) if args.rounds is not None else shape
    data = args.data or Path(os.environ.get("TURNKEEP_DATA") or DATA)
    result = uvloop.run(measure(find_model(args.model), data, shape, threads=args.threads))
    if not args.json:
        print("What a user feels of compaction")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
