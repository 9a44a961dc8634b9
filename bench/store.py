"""What it costs to keep a turn: two durable writes each, 16 sessions at once.

    python -m bench.store --json [--turns 4000] [--at-once 16] [--url postgresql://...] [--profile FILE]

Last line: one JSON object. cpu_ms_per_turn is user and system time of this process (writer thread included, a database
server not) over turns; p99_ms is of one write, from the call to after its commit.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import resource
import tempfile
import time
from pathlib import Path

import uvloop

from compression.conversation import Item
from gateway.store.records import BeginTurn, Begun, FinishTurn, NewSession, TurnTokens
from gateway.store.schema import migrate
from gateway.store.sessions import Store, open_store

QUESTION = "What does the keeper write into the log when the lamp is lit? " * 8  # about 500 bytes, 80 words
IDS = b"\x10\x27\x00\x00" * 100  # 100 token ids


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def begin(session_id: str, number: int, head: str | None) -> BeginTurn:
    return BeginTurn(
        tenant_id="bench",
        session_id=session_id,
        turn_id=f"turn_{session_id}_{number}",
        owner="bench/1",
        lease_s=5.0,
        input=(Item("message", {"type": "message", "role": "user", "content": QUESTION}),),
        model="small",
        expected_head=head,
        idempotency_key=f"key-{number}",
        request_hash=bytes(32),
        create=NewSession(id=session_id, tenant_id="bench", model="small") if head is None else None,
    )


def finish(begin: BeginTurn, fence: int, number: int) -> FinishTurn:
    return FinishTurn(
        tenant_id="bench",
        session_id=begin.session_id,
        turn_id=begin.turn_id,
        fence=fence,
        status="completed",
        output=(Item("message", {"type": "message", "role": "assistant", "content": QUESTION}),),
        finish_reason="stop",
        tokens=TurnTokens("fingerprint", (number - 1) * 200, IDS, IDS, number * 200, bytes(32)),
        meaning=bytes(32),
        usage={"prompt_tokens": number * 200 - 100, "output_tokens": 100, "cached_tokens": (number - 1) * 200},
        placement={"replica": "embedded", "reason": "pinned", "expected_cached_tokens": (number - 1) * 200},
        prefix_report={"kept_tokens": (number - 1) * 200},
    )


async def converse(store: Store, session_id: str, turns: int, took: list[float]) -> None:
    head = None
    for number in range(1, turns + 1):
        command = begin(session_id, number, head)
        start = time.perf_counter()
        begun = await store.begin_turn(command)
        took.append(time.perf_counter() - start)
        assert isinstance(begun, Begun), begun
        start = time.perf_counter()
        await store.finish_turn(finish(command, begun.fence, number))
        took.append(time.perf_counter() - start)
        head = command.turn_id


async def measure(url: str, turns: int, at_once: int, profile: Path | None) -> dict[str, object]:
    await migrate(url)
    stamp = f"{time.time():.0f}"
    async with open_store(url) as store:
        warm: list[float] = []
        await asyncio.gather(*(converse(store, f"{stamp}-w{n}", 5, warm) for n in range(at_once)))
        took: list[float] = []
        profiler = cProfile.Profile(time.process_time) if profile else None
        if profiler:
            profiler.enable()
        cpu, wall = cpu_s(), time.perf_counter()
        await asyncio.gather(*(converse(store, f"{stamp}-s{n}", turns // at_once, took) for n in range(at_once)))
        cpu, wall = cpu_s() - cpu, time.perf_counter() - wall
        if profiler:
            profiler.disable()
            profiler.dump_stats(str(profile))
    took.sort()
    done = len(took) / 2
    return {
        "database": url.split(":")[0],
        "at_once": at_once,
        "turns": int(done),
        "cpu_ms_per_turn": round(cpu / done * 1000, 3),
        "p50_ms": round(took[len(took) // 2] * 1000, 2),
        "p99_ms": round(took[int(len(took) * 0.99)] * 1000, 2),
        "turns_per_s": round(done / wall),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--turns", type=int, default=4000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--url", help="default: a SQLite file in a temporary folder, synchronous FULL")
    parser.add_argument("--profile", type=Path, help="write what cProfile saw of the event loop's thread here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = args.url or f"sqlite:///{folder}/bench.db"
        result = uvloop.run(measure(url, args.turns, args.at_once, args.profile))
    if not args.json:
        print("CPU and latency of two durable writes a turn")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
