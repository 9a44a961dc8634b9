"""What KV events cost: a step of the engine, its front, and a gateway that follows; CPU, microseconds a batch.

    python -m bench.kv_events [--json]

A batch is what a prefill step of 512 tokens stores: 16 blocks of 32. The best of many runs of each part, for other work
of the machine only adds; the feed as a whole over real sockets, utime + stime of the process that reads, publisher
elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import resource
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import aclosing

import uvloop

from engines.kv_events import EventBatch, decode_batch, encode_batch
from engines.kv_log import Block, KvLog
from engines.kv_stream import KvStream
from engines.local.kv.events import KvPublisher
from engines.remote.kv_feed import FeedAddress, feed

BLOCKS, BLOCK_SIZE, VOCAB = 16, 32, 150_000
RUNS = 500
BATCHES = 3000  # over the sockets
GAP_S = 0.001


def blocks(rng: random.Random) -> list[Block]:
    made: list[Block] = []
    for _ in range(BLOCKS):
        ids = array("I", [rng.randrange(VOCAB) for _ in range(BLOCK_SIZE)]).tobytes()
        made.append(Block(rng.randbytes(32), made[-1].name if made else None, ids))
    return made


def best_us(run: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return round(min(times) * 1e6, 1)


def parts(rng: random.Random) -> Mapping[str, float]:
    stored, log, stream = blocks(rng), KvLog(BLOCK_SIZE), KvStream(time.time)

    def step() -> bytes:
        for block in stored:
            log.stored(block)
        return encode_batch(EventBatch(0, 0.0, 0, log.drain()))

    def quiet() -> object:
        return log.drain()

    payload = step()
    events = decode_batch(0, payload).events
    array_form = encode_batch(EventBatch(0, 0.0, 0, events), form="array")
    return {
        "step_us": best_us(step),
        "step_without_blocks_us": best_us(quiet),
        "front_us": best_us(lambda: stream.publish(decode_batch(0, payload).events)),
        "decode_map_us": best_us(lambda: decode_batch(0, payload)),
        "decode_array_us": best_us(lambda: decode_batch(0, array_form)),
        "payload_bytes": len(payload),
    }


def publish(where: multiprocessing.Queue[tuple[str, str]], go: multiprocessing.Event) -> None:  # type: ignore[valid-type]
    """Publishes BATCHES batches, GAP_S apart, once it is told to."""

    async def run() -> None:
        stream, rng = KvStream(time.time), random.Random(2)
        async with KvPublisher(stream, "tcp://127.0.0.1:0") as publisher:
            where.put((publisher.endpoint, publisher.replay))
            await asyncio.to_thread(go.wait)  # type: ignore[attr-defined]
            for _ in range(BATCHES):
                log = KvLog(BLOCK_SIZE)
                for block in blocks(rng):
                    log.stored(block)
                stream.publish(log.drain())
                await asyncio.sleep(GAP_S)
            await asyncio.sleep(3600)

    asyncio.run(run())


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def follow(events: str, replay: str, go: Callable[[], None]) -> Mapping[str, float]:
    began = began_s = 0.0
    async with aclosing(feed(FeedAddress(events, replay))) as items:
        async for item in items:
            if not isinstance(item, EventBatch):
                continue
            if item.seq == 0:
                began, began_s = cpu_s(), time.monotonic()
                go()
            if item.seq == BATCHES:
                break
    wall_s = time.monotonic() - began_s
    return {"feed_us": round((cpu_s() - began) / BATCHES * 1e6, 1), "batches_per_s": round(BATCHES / wall_s)}


def main() -> None:
    context = multiprocessing.get_context("spawn")
    where, go = context.Queue(), context.Event()
    publisher = context.Process(target=publish, args=(where, go), daemon=True)
    publisher.start()
    try:
        found = dict(uvloop.run(follow(*where.get(timeout=60), go.set))) | dict(parts(random.Random(1)))
    finally:
        publisher.terminate()
        publisher.join()
    if "--json" in sys.argv:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:24} {value:>10}")


if __name__ == "__main__":
    main()
