"""What reuse is worth on four workloads: hit rate and its ceiling, TTFT and throughput, against reuse off.

    python -m bench.reuse --json [--quick] [--model FOLDER] [--threads N] [--only system,rag,turns,mixed]
        [--keep FILE]

A real `turnkeep engine` process for each workload, asked over its own wire by four clients at once: once with sessions
and a shared salt, once (in a process of its own) with no session and a salt that nobody else has, so that nothing can
be reused. Greedy, answers of exact lengths. docs/bench.md says what each figure is. Last line: one JSON object.
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
import urllib.request
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import uvloop

from bench.processes import python, started
from bench.quant_texts import texts
from bench.sessions import PATIENCE, find_model
from bench.talk import Answer, Client
from engines.contract import EMPTY_DIGEST, Base, IdsPrompt, chain_digest
from engines.remote.http import Upstream
from engines.remote.turnkeep import TurnkeepEngine
from gateway.sessions.tokens import ModelTokens

POOL_BYTES = 3 << 30  # nothing is evicted
SYSTEM, DOCUMENT, QUESTION = 500, 1500, 200  # tokens, as the source articles have them
BLOCK = 32


@dataclass(frozen=True, slots=True)
class Sizes:
    """How often each is asked. `clients` at once."""

    clients: int = 4
    system: int = 16  # sessions of one question, one system prompt for all
    rag: int = 20  # questions, each to one of the documents
    documents: int = 10
    talks: int = 2
    turns: int = 16
    answer_share: float = 0.25  # of what the client sends: system prompt, document and question, or a turn's question


QUICK = Sizes(clients=2, system=3, rag=3, documents=2, talks=2, turns=3, answer_share=0.02)


@dataclass(frozen=True, slots=True)
class Chain:
    """Questions of one session, one after the other; the first one's text holds the document, if there is one."""

    name: str
    system: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as it went."""

    chain: str
    prompt: array[int]
    answer: Answer


class Texts:
    """Pieces of English of about so many tokens, each taken once."""

    def __init__(self, tokens: ModelTokens) -> None:
        self._tokens = tokens
        self._ids = {name: list(tokens.vocabulary.encode_text(text)) for name, text in texts().items()}
        self._at = dict.fromkeys(self._ids, 0)

    def piece(self, name: str, size: int) -> str:
        at = self._at[name]
        self._at[name] += size
        assert self._at[name] <= len(self._ids[name]), f"the text {name!r} is too short"
        return self._tokens.decode(self._ids[name][at : at + size]).strip()


def workloads(tokens: ModelTokens, sizes: Sizes) -> dict[str, list[Chain]]:
    """By name, in the order in which the clients take them up."""
    pool, chance = Texts(tokens), Random(7)
    system = pool.piece("reference", SYSTEM)
    documents = [pool.piece("reference", DOCUMENT) for _ in range(sizes.documents)]

    def question() -> str:
        return pool.piece("docstrings", QUESTION)

    def about(document: str) -> str:
        return f"{document}\n\n{question()}"

    asked = [documents[n % len(documents)] for n in range(sizes.rag)]
    chance.shuffle(asked)
    found = {
        "system": [Chain(f"system-{n}", system, (question(),)) for n in range(sizes.system)],
        "rag": [Chain(f"rag-{n}", system, (about(document),)) for n, document in enumerate(asked)],
        "turns": [
            Chain(f"turns-{n}", system, tuple(question() for _ in range(sizes.turns))) for n in range(sizes.talks)
        ],
    }
    some = [
        *[Chain(f"mixed-{n}", system, (question(),)) for n in range(sizes.system // 3)],
        *[Chain(f"mixed-d{n}", system, (about(documents[n % 3]),)) for n in range(sizes.rag // 3)],
        *[
            Chain(f"mixed-t{n}", system, tuple(question() for _ in range(sizes.turns // 2)))
            for n in range(sizes.talks // 2)
        ],
    ]
    chance.shuffle(some)
    return found | {"mixed": some}


async def converse(client: Client, tokens: ModelTokens, chain: Chain, share: float, *, reuse: bool) -> list[Asked]:
    """All questions of one session, in turn."""
    path, base, tail = array("I"), None, None
    found: list[Asked] = []
    for number, text in enumerate(chain.texts):
        user = {"role": "user", "content": text}
        if tail is None:
            delta = tokens.render([{"role": "system", "content": chain.system}, user])
        else:
            extended = tokens.extend([user], after=tail)
            assert extended is not None, f"{tokens.name}: its template does not let a path be extended exactly"
            delta = extended
        path.frombytes(delta)
        whole = path.tobytes()

        async def give(whole: bytes = whole) -> bytes:
            return whole

        name = f"{chain.name}-{number}"
        count = max(2, int(len(delta) // 4 * share))
        one = Client(client.engine, client.model, count, client.cpu_s)
        if reuse:
            prompt, salt = IdsPrompt(delta, len(path), give, chain.name, base), "bench"
        else:
            prompt, salt = IdsPrompt(whole, len(path), give), f"nobody-else-{name}"
        answer = await one.ask(prompt, name=name, salt=salt)
        assert reuse or not answer.cached_tokens, f"{answer.cached_tokens} tokens were reused in spite of a new salt"
        found.append(Asked(chain.name, array("I", path), answer))
        output = array("I", answer.ids).tobytes()
        digest = chain_digest(chain_digest(base.digest if base else EMPTY_DIGEST, delta), output)
        path.frombytes(output)
        base = Base(len(path), digest)
        tail = tokens.tail(answer.ids, path_tokens=len(path), digest=digest)
    return found


async def crowd(
    client: Client, tokens: ModelTokens, chains: Sequence[Chain], sizes: Sizes, *, reuse: bool
) -> list[Asked]:
    """Every chain, `clients` at once -> requests in the order in which they were sent."""
    left = list(reversed(chains))
    found: list[Asked] = []

    async def work() -> None:
        while left:
            found.extend(await converse(client, tokens, left.pop(), sizes.answer_share, reuse=reuse))

    await asyncio.gather(*(work() for _ in range(sizes.clients)))
    return sorted(found, key=lambda asked: asked.answer.asked_s)


def ceiling(asked: Sequence[Asked]) -> int:
    """Tokens that could be found cached: what each prompt has in common with the prompt or the whole path of a request
    that was answered before it was sent, or (a prompt only) sent before it; one token is always computed."""
    total = 0
    for n, one in enumerate(asked):
        best = 0
        mine = np.frombuffer(one.prompt, np.uint32)
        for other in asked[:n]:
            path = other.prompt
            if other.answer.arrivals_s[-1] <= one.answer.asked_s:
                path = path + array("I", other.answer.ids[:-1])
            theirs = np.frombuffer(path, np.uint32)
            least = min(len(mine), len(theirs))
            same = mine[:least] == theirs[:least]
            best = max(best, least if bool(same.all()) else int(same.argmin()))
        total += min(best, len(mine) - 1)
    return total


def waste(url: str) -> float | None:
    """Share of the slots of the blocks that kept sessions hold in which there is no token."""
    with urllib.request.urlopen(f"{url}/turnkeep/v1/sessions", timeout=60) as answer:
        kept = json.loads(answer.read())["sessions"]
    slots = sum(one["blocks"] * BLOCK for one in kept)
    written = sum(min(one["tokens"] - 1, one["blocks"] * BLOCK) for one in kept)  # the last one has no K/V
    return round(1 - written / slots, 4) if slots else None


async def run(model: Path, name: str, sizes: Sizes, threads: int | None, *, reuse: bool) -> dict[str, Any]:
    """One workload at a new engine."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        options = ["--model", str(model), "--port", "0", "--pool-bytes", str(POOL_BYTES), "--device", "cpu"]
        options += ["--dtype", "float32", "--exit-with-parent", "--block-size", str(BLOCK)]
        options += ["--threads", str(threads)] if threads else []
        command = python("gateway.cli", "engine", *options)
        running = stack.enter_context(started(command, folder=Path(folder), ready='"event":"ready"'))
        ready = json.loads(next(line for line in running.said.splitlines() if '"event":"ready"' in line))
        tokens = ModelTokens.load(model, name=ready["model"])
        engine = TurnkeepEngine(Upstream(ready["url"], timeouts=PATIENCE))
        client = Client(engine, ready["model"], 2, running.cpu_s)
        try:
            warm = Chain("warm", "You are warm.", ("hello",))
            await converse(client, tokens, warm, 1.0, reuse=False)
            cpu, began = running.cpu_s(), time.perf_counter()
            asked = await crowd(client, tokens, workloads(tokens, sizes)[name], sizes, reuse=reuse)
            took, cpu = time.perf_counter() - began, running.cpu_s() - cpu
            wasted = await asyncio.to_thread(waste, ready["url"]) if reuse else None
        finally:
            await engine.aclose()
    ttfts = [one.answer.ttft_s for one in asked]
    prompts = sum(one.answer.prompt_tokens for one in asked)
    return {
        "requests": len(asked),
        "prompt_tokens": prompts,
        "output_tokens": sum(len(one.answer.ids) for one in asked),
        "hit": round(sum(one.answer.cached_tokens for one in asked) / prompts, 4),
        "ceiling": round(ceiling(asked) / prompts, 4) if reuse else 0.0,
        "ttft_mean_ms": round(statistics.mean(ttfts) * 1000, 1),
        "ttft_p50_ms": round(statistics.median(ttfts) * 1000, 1),
        "tokens_s": round(sum(len(one.answer.ids) for one in asked) / took, 2),
        "seconds": round(took, 1),
        "cpu_s": round(cpu, 1),
        "waste": wasted,
    }


async def second(model: Path, threads: int | None, rounds: int) -> dict[str, float]:
    """Time and CPU to the first token of a second request that shares system prompt and document with the first, and
    of one that shares the system prompt alone, over the first one's; medians of `rounds`, three at most."""
    sizes = Sizes(system=9, rag=6, documents=3, talks=0)
    ratios: dict[str, list[float]] = {"document": [], "document_cpu": [], "system": [], "system_cpu": []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        options = ["--model", str(model), "--port", "0", "--pool-bytes", str(POOL_BYTES), "--device", "cpu"]
        options += ["--dtype", "float32", "--exit-with-parent", *(["--threads", str(threads)] if threads else [])]
        command = python("gateway.cli", "engine", *options)
        running = stack.enter_context(started(command, folder=Path(folder), ready='"event":"ready"'))
        ready = json.loads(next(line for line in running.said.splitlines() if '"event":"ready"' in line))
        tokens = ModelTokens.load(model, name=ready["model"])
        engine = TurnkeepEngine(Upstream(ready["url"], timeouts=PATIENCE))
        client = Client(engine, ready["model"], 2, running.cpu_s)
        try:
            made = workloads(tokens, sizes)
            for number in range(rounds):
                for kind, first, then in (
                    ("document", made["rag"][0].texts[0], made["rag"][0].texts[0]),
                    ("system", made["system"][2 * number].texts[0], made["system"][2 * number + 1].texts[0]),
                ):
                    if kind == "document":  # the same document, another question
                        document = then.rpartition("\n\n")[0]
                        then = f"{document}\n\n{made['system'][6 + number].texts[0]}"
                    answers = []
                    for text in (first, then):
                        delta = tokens.render(
                            [{"role": "system", "content": made["system"][0].system}, {"role": "user", "content": text}]
                        )

                        async def give(delta: bytes = delta) -> bytes:
                            return delta

                        prompt = IdsPrompt(delta, len(delta) // 4, give, f"{kind}-{number}-{len(answers)}")
                        salt = f"{kind}-{number}"
                        answers.append(await client.ask(prompt, name=f"{salt}-{len(answers)}", salt=salt))
                    ratios[kind].append(answers[1].ttft_s / answers[0].ttft_s)
                    ratios[f"{kind}_cpu"].append(answers[1].cpu_s / answers[0].cpu_s)
        finally:
            await engine.aclose()
    return {name: round(statistics.median(found), 3) for name, found in ratios.items()}


@dataclass(frozen=True, slots=True)
class Bars:
    """Of what reuse gains: TTFT at most so much of that without, throughput at least so many times that without."""

    ttft_ratio: float
    throughput_ratio: float


BARS = {
    "system": Bars(0.65, 1.28),
    "rag": Bars(0.72, 1.22),
    "turns": Bars(0.48, 1.45),
    "mixed": Bars(0.59, 1.33),
}
HIT, WASTE, SECOND = 0.91, 0.04, 0.30  # turns, where the ceiling allows; all; prefill of a second request


def figures(on: Mapping[str, Any], off: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "requests": on["requests"],
        "prompt_tokens": on["prompt_tokens"],
        "output_tokens": on["output_tokens"],
        "hit": on["hit"],
        "ceiling": on["ceiling"],
        "ttft_mean_on_ms": on["ttft_mean_ms"],
        "ttft_mean_off_ms": off["ttft_mean_ms"],
        "ttft_ratio": round(on["ttft_mean_ms"] / off["ttft_mean_ms"], 3),
        "ttft_p50_ratio": round(on["ttft_p50_ms"] / off["ttft_p50_ms"], 3),
        "throughput_on_tokens_s": on["tokens_s"],
        "throughput_off_tokens_s": off["tokens_s"],
        "throughput_ratio": round(on["tokens_s"] / off["tokens_s"], 3),
        "cpu_ratio": round(off["cpu_s"] / on["cpu_s"], 3),
        "waste": on["waste"],
    }


def missed(name: str, told: Mapping[str, Any]) -> list[str]:
    bars, found = BARS[name], []
    if told["ttft_ratio"] > bars.ttft_ratio:
        found.append("ttft_ratio")
    if told["throughput_ratio"] < bars.throughput_ratio:
        found.append("throughput_ratio")
    if name == "turns" and told["hit"] < min(HIT, told["ceiling"] - 0.01):
        found.append("hit")
    if told["waste"] is not None and told["waste"] > WASTE:
        found.append("waste")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object on standard output")
    parser.add_argument("--model", help="a model folder; default: $TURNKEEP_MODEL_DIR, else the demonstration model")
    parser.add_argument("--threads", type=int, help="CPU threads of the model; default: torch's choice")
    parser.add_argument("--only", default=",".join(BARS), help=f"of {', '.join(BARS)}; default all")
    parser.add_argument("--keep", type=Path, help="file of what was measured; a run goes on from what it holds")
    parser.add_argument("--quick", action="store_true", help="a few requests with short answers: shows that it runs")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in BARS]:
        parser.error(f"no workload {', '.join(unknown)}: there are {', '.join(BARS)}")
    sizes = QUICK if args.quick else Sizes()
    kept: dict[str, Any] = {"sizes": asdict(sizes)}
    if args.keep is not None and args.keep.exists():
        kept = json.loads(args.keep.read_text())
        if kept["sizes"] != asdict(sizes):
            parser.error(f"{args.keep} holds another measurement: {kept['sizes']}")
    model = find_model(args.model)

    def measured(piece: str, work: Any) -> Any:
        if piece not in kept:
            kept[piece] = uvloop.run(work())
            print(f"{piece}: {json.dumps(kept[piece])}", file=sys.stderr, flush=True)
            if args.keep is not None:
                args.keep.write_text(json.dumps(kept, indent=1) + "\n")
        return kept[piece]

    told: dict[str, Any] = {}
    for name in names:
        on, off = (
            measured(
                f"{name} {way}", lambda name=name, way=way: run(model, name, sizes, args.threads, reuse=way == "on")
            )
            for way in ("on", "off")
        )
        told[name] = figures(on, off)
        told[name]["missed"] = missed(name, told[name])
    after = measured("second", lambda: second(model, args.threads, 1 if args.quick else 3))
    told["second_request"] = after | {"missed": ["document"] if after["document"] > SECOND else []}
    told["sizes"] = kept["sizes"] | {"system_tokens": SYSTEM, "document_tokens": DOCUMENT, "question_tokens": QUESTION}
    told["machine"] = {
        "cores": os.cpu_count(),
        "threads": args.threads,
        "load_average_at_end": round(os.getloadavg()[0], 2),
    }
    if not args.json:
        print("What reuse is worth on four workloads")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
