"""What TurnkeepEngine says of a KV shift and of bits: asked for only where it is taken, and told when it was done."""

from __future__ import annotations

import struct
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engines.contract import Base, Delta, GenerateRequest, IdsPrompt, Sampling, Shift
from engines.remote.http import Upstream
from engines.remote.turnkeep import TurnkeepEngine
from tests.contracts.live import LiveServer

pytestmark = pytest.mark.anyio
SHIFT = Shift(Base(9, b"d" * 32), 4, 2, 5, 3)
IDS = struct.pack("<9I", *range(9))
LAST = {"ids": [1], "text": "a", "finish": "stop", "stop": None}


class Replica:
    """Keeps the headers it was sent; `capabilities` is what it says it can do."""

    def __init__(self, **capabilities: Any) -> None:
        self.capabilities = {"models": ["m"]} | capabilities
        self.headers: list[dict[str, Any]] = []

    def app(self) -> Starlette:
        async def capabilities(request: Request) -> Response:
            return JSONResponse(self.capabilities)

        async def generate(request: Request) -> Response:
            body = await request.body()
            (length,) = struct.unpack_from("<I", body)
            self.headers.append(orjson.loads(body[4 : 4 + length]))
            usage: dict[str, Any] = {"prompt_tokens": 9, "output_tokens": 1, "cached_tokens": 2}
            if "shift" in self.headers[-1]:
                usage |= {"approximate": True, "shifted_tokens": 2}
            if "min_bits" in self.headers[-1]:
                usage["prefix_bits"] = 8
            events = b"data: " + orjson.dumps(LAST | {"usage": usage}) + b"\n\ndata: [DONE]\n\n"
            return Response(events, media_type="text/event-stream")

        return Starlette(
            routes=[
                Route("/turnkeep/v1/capabilities", capabilities),
                Route("/turnkeep/v1/generate", generate, methods=["POST"]),
            ]
        )


async def whole() -> bytes:
    return IDS


async def ask(engine: TurnkeepEngine) -> Delta:
    prompt = IdsPrompt(IDS, 9, whole, "s", None, SHIFT, system_tokens=3, recent_from=6)
    request = GenerateRequest("r", "m", prompt, Sampling(1), min_bits=8, shared=True)
    return [delta async for delta in engine.generate(request)][-1]


@pytest.mark.parametrize("takes_shift", [True, False, None])
async def test_a_shift_goes_only_to_a_replica_that_says_it_takes_one(takes_shift: bool | None) -> None:
    replica = Replica(**({} if takes_shift is None else {"takes_shift": takes_shift}))
    with LiveServer(replica.app()) as live:
        engine = TurnkeepEngine(Upstream(live.url))
        try:
            before = await ask(engine)  # nothing is known of it yet
            found = await engine.capabilities()
            after = await ask(engine)
        finally:
            await engine.aclose()
    assert found.takes_shift is bool(takes_shift)
    assert "shift" not in replica.headers[0]
    assert ("shift" in replica.headers[1]) is bool(takes_shift)
    assert before.usage is not None
    assert not before.usage.approximate
    assert after.usage is not None
    assert (after.usage.approximate, after.usage.shifted_tokens) == ((True, 2) if takes_shift else (False, 0))


@pytest.mark.parametrize("takes_bits", [True, False])
async def test_what_is_to_keep_its_bits_goes_only_to_a_replica_that_lowers_any(takes_bits: bool) -> None:
    replica = Replica(takes_bits=takes_bits)
    with LiveServer(replica.app()) as live:
        engine = TurnkeepEngine(Upstream(live.url))
        try:
            await ask(engine)
            await engine.capabilities()
            after = await ask(engine)
        finally:
            await engine.aclose()
    names = ("min_bits", "system_tokens", "recent_from")
    assert [name in replica.headers[0] for name in names] == [False] * 3
    sent = tuple(replica.headers[1].get(name) for name in names)
    assert sent == ((8, 3, 6) if takes_bits else (None, None, None))
    assert "retention" not in replica.headers[1]
    assert after.usage is not None
    assert after.usage.prefix_bits == (8 if takes_bits else None)


async def test_a_shared_system_prompt_is_told_to_a_replica_that_retains_it() -> None:
    replica = Replica(retains=True)
    with LiveServer(replica.app()) as live:
        engine = TurnkeepEngine(Upstream(live.url))
        try:
            await engine.capabilities()
            await ask(engine)
        finally:
            await engine.aclose()
    [header] = replica.headers
    assert (header["retention"], header["system_tokens"], "min_bits" in header) == ("system", 3, False)
