"""What the engine adapters cost: CPU of this process per request and per streamed chunk, by adapter.

    python -m bench.adapters [--json]

The upstream is another process that writes canned answers, so the figures are the adapter's alone: utime + stime.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
import sys
from collections.abc import Callable, Mapping

import uvloop

from engines.contract import ChatPrompt, Engine, GenerateRequest, IdsPrompt, Sampling
from engines.remote.http import Upstream
from engines.remote.llamacpp import LlamaCppEngine
from engines.remote.openai import OpenAiEngine
from engines.remote.sglang import SglangEngine
from engines.remote.turnkeep import TurnkeepEngine
from engines.remote.vllm import VllmEngine

PROMPT = 2000  # tokens, and about 11 KB of messages
CHUNKS = 200
AT_ONCE = 16
USAGE = {"prompt_tokens": 9, "completion_tokens": 9, "output_tokens": 9, "cached_tokens": 0}


def chunk(choice: dict[str, object], **more: object) -> dict[str, object]:
    frame = {"id": "cmpl-1", "object": "text_completion", "created": 1795987212, "model": "m"}
    return frame | {"choices": [{"index": 0} | choice]} | more


def so_far(number: int, finish: object = None) -> dict[str, object]:
    """SGLang's events hold the whole answer so far."""
    meta = {"id": "x", "finish_reason": finish, "prompt_tokens": 9, "completion_tokens": number, "cached_tokens": 0}
    return {"text": " hello" * number, "output_ids": [123] * number, "meta_info": meta}


def step(number: int, **more: object) -> dict[str, object]:
    frame = {"index": 0, "content": " hello", "tokens": [123], "stop": False, "id_slot": -1}
    return frame | {"tokens_predicted": number, "tokens_evaluated": 9} | more


Made = Callable[[int], dict[str, object]]  # number of an event, from 1
EVENTS: Mapping[str, tuple[dict[str, object] | Made, dict[str, object] | Made]] = {
    "turnkeep": (
        {"ids": [123], "text": " hello"},
        {"ids": [2], "text": "", "finish": "stop", "stop": None, "usage": USAGE},
    ),
    "vllm": (
        chunk({"text": " hello", "logprobs": None, "finish_reason": None, "token_ids": [123]}),
        chunk({"text": "", "finish_reason": "stop"}, usage=USAGE),
    ),
    "sglang": (so_far, lambda number: so_far(number - 1, {"type": "length", "length": number - 1})),
    "llamacpp": (
        step,
        lambda number: step(number - 1, content="", tokens=[], stop=True, stop_type="limit", timings={"cache_n": 0}),
    ),
    "openai": (
        chunk({"delta": {"content": " hello"}, "finish_reason": None}),
        chunk({"delta": {}, "finish_reason": "stop"}, usage=USAGE),
    ),
}


def serve(kind: str, chunks: int, gap_s: float, ready: multiprocessing.Queue[int]) -> None:
    """Answers every request with `chunks` events, `gap_s` apart."""
    one, last = EVENTS[kind]
    made = [one(number) if callable(one) else one for number in range(1, chunks + 1)]
    made.append(last(chunks + 1) if callable(last) else last)
    events = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in made]

    def framed(data: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(data), data)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                for event in events[:-1]:
                    writer.write(framed(event))
                    if gap_s:
                        await asyncio.sleep(gap_s)
                writer.write(framed(events[-1]) + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        ready.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


def request(kind: str) -> GenerateRequest:
    ids = b"\x01\x02\x00\x00" * PROMPT

    async def whole() -> bytes:
        return ids

    prompt = (
        ChatPrompt([{"role": "user", "content": "x" * 550}] * 20) if kind == "openai" else IdsPrompt(ids, PROMPT, whole)
    )
    return GenerateRequest("r", "m", prompt, Sampling(1000))


async def measure(kind: str, port: int, requests: int) -> float:
    """CPU seconds of this process for `requests` answers, AT_ONCE at a time, connections warm."""
    make: Mapping[str, type] = {
        "turnkeep": TurnkeepEngine,
        "vllm": VllmEngine,
        "sglang": SglangEngine,
        "llamacpp": LlamaCppEngine,
        "openai": OpenAiEngine,
    }
    engine: Engine = make[kind](Upstream(f"http://127.0.0.1:{port}"))

    async def some(number: int) -> None:
        for _ in range(number):
            async for _ in engine.generate(request(kind)):
                pass

    await asyncio.gather(*[some(1) for _ in range(AT_ONCE)])
    before = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.gather(*[some(requests // AT_ONCE) for _ in range(AT_ONCE)])
    after = resource.getrusage(resource.RUSAGE_SELF)
    await engine.aclose()
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(kind: str, chunks: int, gap_s: float, requests: int) -> float:
    ready: multiprocessing.Queue[int] = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(kind, chunks, gap_s, ready), daemon=True)
    server.start()
    try:
        return uvloop.run(measure(kind, ready.get(timeout=20), requests))
    finally:
        server.terminate()
        server.join()


def main() -> None:
    figures: dict[str, dict[str, float]] = {}
    for kind in EVENTS:
        short = run(kind, 1, 0.0, 1600) / 1600
        long = run(kind, CHUNKS, 0.002, 64) / 64
        figures[kind] = {
            "cpu_ms_per_request": round(short * 1e3, 3),
            "cpu_us_per_chunk": round((long - short) / CHUNKS * 1e6, 1),
        }
        if "--json" not in sys.argv:
            print(kind, figures[kind])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
