"""What a turn costs in the gateway: CPU per request and per chunk, at two sizes and at two lengths of history.

    python -m bench.gateway --json [--rounds 3] [--long] [--peers [--peers-folder DIR]]

A real `turnkeep serve` (auth on, a key, SQLite with synchronous FULL) in front of a real `turnkeep engine` (echo).
CPU is user and system time of the gateway's process tree over the requests, 16 at once, the median of rounds; with
--peers the rounds of all gateways are interleaved. docs/bench.md says what each figure is. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import uvloop

from bench.conversations import history, next_message, text
from bench.load import Client, at_once, connected
from bench.peers import KEY, PEERS, free_port, installed, version
from bench.processes import NotStarted, Running, python, started

SIZES = {"2k": (20, 11_000), "16k": (64, 83_000)}  # messages, bytes of JSON, in the middle of the measured turns
TURNS = 5  # measured turns of a conversation; the first request, with all but the last of them, is measured apart
CONVERSATIONS = {"2k": 32, "16k": 16}
ANSWER_TOKENS = 17  # 16 bytes and the end
CHUNKS = 240  # of a long answer
TOKENS_PER_S = 160.0  # of each long answer: 40 chunks a second, as a real engine sends them
HISTORIES = {"2k": 1_700, "100k": 99_000}  # tokens of history, a byte each
SESSIONS = 8  # of each length
LONG = 10_000


@dataclass(frozen=True, slots=True)
class Subject:
    """A gateway under measurement."""

    name: str
    running: Running
    client: Client
    model: str
    slow_model: str  # the model whose answers come at TOKENS_PER_S
    keyed: bool = False  # whether it knows session keys

    def key(self, value: str) -> dict[str, str]:
        return {"X-Session-Id": value}


Figures = dict[str, dict[str, list[float]]]  # subject -> figure -> one value a round


async def cpu_ms(subject: Subject, requests: int, work: Awaitable[float]) -> tuple[float, float]:
    """CPU ms of the subject per request while `work` runs, and requests a second."""
    before = subject.running.cpu_s()
    wall_s = await work
    return (subject.running.cpu_s() - before) * 1000 / requests, requests / wall_s


async def converse(subject: Subject, size: str, seed: str, *, keyed: bool) -> dict[str, float]:
    """Conversations that send their whole history with every turn: the first request, then TURNS measured ones."""
    messages, total = SIZES[size]
    begun = messages - TURNS - 1
    talks = []
    for number in range(CONVERSATIONS[size]):
        name = f"{seed}-{number}"
        talks.append((name, Random(name), history(name, begun, total * begun // messages)))

    async def turn(name: str, random: Random, told: list[dict[str, Any]]) -> None:
        body = {"model": subject.model, "messages": told, "max_tokens": ANSWER_TOKENS}
        headers = subject.key(name) if keyed else None
        answer = await subject.client.post("/v1/chat/completions", body, headers)
        told.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        told.append(next_message(random))

    async def turns(name: str, random: Random, told: list[dict[str, Any]]) -> None:
        for _ in range(TURNS):
            await turn(name, random, told)

    first, _ = await cpu_ms(subject, len(talks), at_once([lambda t=t: turn(*t) for t in talks]))
    later, rate = await cpu_ms(subject, len(talks) * TURNS, at_once([lambda t=t: turns(*t) for t in talks]))
    return {f"cpu_ms_{size}_first": first, f"cpu_ms_{size}": later, f"requests_per_s_{size}": rate}


async def only_new(subject: Subject, seed: str, *, keyed: bool) -> tuple[float, float]:
    """Only the new message is sent: to a session (`append`), or to no session at all (`off`)."""
    count = CONVERSATIONS["2k"]

    async def turns(name: str) -> None:
        random = Random(name + "new")
        headers = subject.key(name) if keyed else {"X-Turnkeep-History": "off"}
        for _ in range(TURNS):
            body = {"model": subject.model, "messages": [next_message(random)], "max_tokens": ANSWER_TOKENS}
            await subject.client.post("/v1/chat/completions", body, headers)

    return await cpu_ms(subject, count * TURNS, at_once([lambda n=n: turns(f"{seed}-{n}") for n in range(count)]))


async def per_chunk_us(subject: Subject, seed: str) -> float:
    """CPU us of a chunk: long answers less short ones, 16 streams at once, each chunk on its own on the wire."""

    async def run(tokens: int, copies: int) -> tuple[float, float]:
        chunks = 0

        async def one(number: int) -> None:
            nonlocal chunks
            name = f"{seed}-{tokens}-{number}"
            said = text(Random(name), 4 * CHUNKS + 8)
            body = {"model": subject.slow_model, "messages": [{"role": "user", "content": said}], "max_tokens": tokens}
            streamed = await subject.client.stream("/v1/chat/completions", body, subject.key(name))
            chunks += streamed.chunks

        cost, _ = await cpu_ms(subject, copies, at_once([lambda n=n: one(n) for n in range(copies)]))
        return cost, chunks / copies

    short, few = await run(8, 64)
    long, many = await run(4 * CHUNKS, 16)
    return (long - short) * 1000 / (many - few)


async def ttft_ms(subject: Subject, direct: Client, path: str, seed: str, count: int = 40) -> dict[str, float]:
    """One stream at a time, through the gateway and straight to its engine in turn: what the gateway adds."""
    through, straight = [], []
    for number in range(count):
        said = text(Random(f"{seed}-{number}"), 16)
        messages = {"model": subject.model, "max_tokens": 8, "messages": [{"role": "user", "content": said}]}
        streamed = await subject.client.stream("/v1/chat/completions", messages, subject.key(f"{seed}-{number}"))
        through.append(streamed.ttft_s * 1000)
        plain = {"model": "echo", "max_tokens": 8, "prompt": said} if path == "/v1/completions" else messages
        straight.append((await direct.stream(path, plain)).ttft_s * 1000)
    through.sort()
    straight.sort()
    at = int(count * 0.99)
    return {
        "ttft_added_ms_p50": through[count // 2] - straight[count // 2],
        "ttft_added_ms_p99": through[at] - straight[at],
    }


class Histories:
    """Sessions of two lengths, made once through the API; a turn of each costs gateway and engine front together."""

    def __init__(self, gateway: Subject, engine: Running) -> None:
        self._gateway, self._engine = gateway, engine
        self._sessions: dict[str, list[str]] = {}
        self._random = Random("histories")

    async def make(self, length: str) -> None:
        """The long ones grow by less than a hundredth a round; the short ones are made anew."""
        made = []
        for _ in range(SESSIONS):
            answer = await self._gateway.client.post("/v1/sessions", {"model": self._gateway.model})
            made.append(answer["id"])
            left = HISTORIES[length]
            while left > 0:
                size = min(left, 33_000)
                await self._turn(answer["id"], text(self._random, size), 1)
                left -= size
        self._sessions[length] = made

    async def _turn(self, session: str, said: str, tokens: int) -> dict[str, Any]:
        body = {"input": said, "max_output_tokens": tokens}
        return await self._gateway.client.post(f"/v1/sessions/{session}/turns", body)

    async def measure(self, length: str, turns: int = 16) -> float:
        async def talk(session: str) -> None:
            for _ in range(turns):
                await self._turn(session, text(self._random, 16), ANSWER_TOKENS)

        before = self._gateway.running.cpu_s() + self._engine.cpu_s()
        await at_once([lambda s=s: talk(s) for s in self._sessions[length]], SESSIONS)
        spent = self._gateway.running.cpu_s() + self._engine.cpu_s() - before
        return spent * 1000 / (turns * SESSIONS)


async def grown(subject: Subject, requests: int) -> tuple[float, float]:
    """Resident memory, MiB, after `requests` more turns, and how much of it came with them."""
    before, each = subject.running.rss_mib(), requests // 64

    async def talk(number: int) -> None:
        random = Random(number)
        for _ in range(each):
            body = {"model": subject.model, "messages": [next_message(random)], "max_tokens": ANSWER_TOKENS}
            await subject.client.post("/v1/chat/completions", body, subject.key(f"grow-{number}"))

    await at_once([lambda n=n: talk(n) for n in range(64)])
    after = subject.running.rss_mib()
    return after, after - before


async def warmed(subject: Subject) -> None:
    """Until it answers, then some requests more: connections, compiled statements, proven templates."""
    until = time.monotonic() + 120
    while True:
        try:
            for model in dict.fromkeys((subject.model, subject.slow_model)):
                body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
                await subject.client.post("/v1/chat/completions", body)
            break
        except (RuntimeError, aiohttp.ClientError):
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.5)
    await converse(subject, "2k", "warm", keyed=subject.keyed)
    await only_new(subject, "warm", keyed=True)


async def measure(gateway: Subject, engine: Running, engine_url: str, peers: list[Subject], straight: str, args: Any,
                  session: aiohttp.ClientSession) -> dict[str, Any]:  # fmt: skip
    figures: Figures = defaultdict(lambda: defaultdict(list))
    subjects = [gateway, *peers]
    directs = {s.name: (Client(straight, session, {}), "/v1/chat/completions") for s in peers}
    directs[gateway.name] = (Client(engine_url, session, {}), "/v1/completions")
    for subject in subjects:
        await warmed(subject)

    def note(subject: Subject, found: dict[str, float]) -> None:
        for name, value in found.items():
            figures[subject.name][name].append(value)

    for number in range(args.rounds):
        for subject in subjects:
            for size in SIZES:
                note(subject, await converse(subject, size, f"r{number}-{size}", keyed=subject.keyed))
            note(subject, {"cpu_us_per_chunk": await per_chunk_us(subject, f"r{number}-chunk")})
            direct, path = directs[subject.name]
            note(subject, await ttft_ms(subject, direct, path, f"r{number}-ttft"))
            print(f"round {number + 1}: {subject.name}", file=sys.stderr, flush=True)
        appended, _ = await only_new(gateway, f"r{number}-2k", keyed=True)
        unsaved, _ = await only_new(gateway, f"r{number}-off", keyed=False)
        matched = await converse(gateway, "2k", f"m{number}", keyed=False)
        note(gateway, {"cpu_ms_append": appended, "cpu_ms_off": unsaved, "cpu_ms_persist": appended - unsaved})
        note(gateway, {"cpu_ms_2k_match": matched["cpu_ms_2k"]})
    histories = Histories(gateway, engine)
    await histories.make("100k")
    for number in range(args.rounds):
        await histories.make("2k")
        short = await histories.measure("2k")
        long = await histories.measure("100k")
        note(gateway, {"turn_ms_2k": short, "turn_ms_100k": long, "turn_cost_100k_over_2k": long / short})
        print(f"histories: round {number + 1}", file=sys.stderr, flush=True)
    rss, growth = await grown(gateway, LONG if args.long else LONG // 10)
    result: dict[str, Any] = {
        name: {figure: round(statistics.median(values), 3) for figure, values in found.items()}
        for name, found in figures.items()
    }
    for subject in peers:
        result[subject.name]["rss_mb"] = round(subject.running.rss_mib(), 1)
    own = result.pop(gateway.name)
    own["turn_cost_100k_over_2k"] = round(own["turn_cost_100k_over_2k"], 3)
    requests = LONG if args.long else LONG // 10
    own |= {"rss_mb": round(rss, 1), "rss_growth_mb": round(growth, 1), "rss_growth_requests": requests}
    own["growth_16k_over_2k"] = round(own["cpu_ms_16k"] / own["cpu_ms_2k"], 3)
    return {**own, "history_mode": "replace", "rounds": args.rounds, "peers": result}


def serve(folder: Path, upstreams: list[str], stack: ExitStack) -> tuple[Running, str, str]:
    """A gateway; its URL and the key made for its first run."""
    arguments = [word for url in upstreams for word in ("--upstream", url)]
    command = python("gateway.cli", "serve", "--port", "0", *arguments)
    running = stack.enter_context(started(command, folder=folder, ready="turnkeep chat --url"))
    url, key = re.search(r"answers on (\S+)", running.said), re.search(r"TURNKEEP_API_KEY=(\S+)", running.said)
    assert url, running.said
    assert key, running.said
    return running, url[1], key[1]


def engine(folder: Path, stack: ExitStack) -> tuple[Running, str]:
    command = python("gateway.cli", "engine", "--model", "echo", "--port", "0")
    running = stack.enter_context(started(command, folder=folder, ready='"event":"ready"'))
    line = next(line for line in running.said.splitlines() if '"event":"ready"' in line)
    return running, json.loads(line)["url"]


def upstream(folder: Path, stack: ExitStack, kind: str) -> str:
    command = python("bench.upstreams", kind, "--tokens-per-s", str(TOKENS_PER_S))
    running = stack.enter_context(started(command, folder=folder, ready=r"ready http\S+\n"))
    found = re.search(r"ready (http\S+)", running.said)
    assert found
    return found[1]


def start_peers(
    folder: Path, environments: Path, straight: str, stack: ExitStack, session: aiohttp.ClientSession
) -> tuple[list[Subject], dict[str, str]]:
    """Those that run, and of every peer its version or why it does not."""
    subjects, told = [], {}
    for peer in PEERS:
        if (why := installed(environments, peer)) is not None:
            told[peer.name] = why
            continue
        port = free_port()
        command = peer.command(environments / peer.name / "bin", folder, straight, port)
        try:
            running = stack.enter_context(started(command, folder=folder, ready=peer.ready))
        except NotStarted as error:
            told[peer.name] = str(error)[:600]
            continue
        client = Client(f"http://127.0.0.1:{port}", session, {"Authorization": f"Bearer {KEY}"})
        subjects.append(Subject(peer.name, running, client, "echo", "echo"))
        told[peer.name] = version(environments, peer)
    return subjects, told


async def run(folder: Path, environments: Path, args: Any) -> dict[str, Any]:
    with ExitStack() as stack:
        echo, echo_url = engine(folder, stack)
        gateway, url, key = serve(folder, [echo_url, upstream(folder, stack, "echo")], stack)
        async with connected() as session:
            own = Client(url, session, {"Authorization": f"Bearer {key}"})
            subject = Subject("turnkeep", gateway, own, "echo", "echo-paced", keyed=True)
            straight, peers, told = "", [], {}
            if args.peers:
                straight = upstream(folder, stack, "openai")
                peers, told = start_peers(folder, environments, straight, stack, session)
            result = await measure(subject, echo, echo_url, peers, straight, args, session)
    return result | {"versions": told, "over_peers": over_peers(result), "peers": peers_told(result["peers"], told)}


def peers_told(found: dict[str, Any], told: dict[str, str]) -> dict[str, Any]:
    return {name: found.get(name) for name in told}


def over_peers(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Our figure over the peer's, lower is better."""
    names = ("cpu_ms_2k", "cpu_ms_16k", "cpu_us_per_chunk", "cpu_ms_2k_first")
    return {
        peer: {name: round(result[name] / found[name], 3) for name in names if found.get(name)}
        for peer, found in result["peers"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", action="store_true", help="memory after 10,000 requests, not 1,000")
    parser.add_argument("--peers", action="store_true", help="install LiteLLM, vllm-router and smg, measure them too")
    parser.add_argument("--peers-folder", type=Path, help="keep their environments here. Default: thrown away")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as made:
        folder = Path(made)
        environments = (args.peers_folder or folder / "peers").absolute()
        environments.mkdir(parents=True, exist_ok=True)
        result = uvloop.run(run(folder, environments, args))
    if not args.json:
        for name, value in result.items():
            print(f"{name:28} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
