"""From a URL to an engine: asks the server what it is.

/turnkeep/v1/capabilities answers            turnkeep
/version answers, /v1/models is owned by vllm     vllm
/v1/models is owned by sglang                sglang
/v1/models is owned by llamacpp, /props answers   llamacpp
/v1/models or /models answers                openai
"""

from __future__ import annotations

from typing import Any, Literal

import orjson

from engines.contract import Engine, EngineBroken
from engines.remote.dialects import recognise
from engines.remote.http import RefuseAddress, Reply, Timeouts, Upstream
from engines.remote.kv_feed import FeedAddress
from engines.remote.llamacpp import LlamaCppEngine
from engines.remote.openai import OpenAiEngine
from engines.remote.replies import check
from engines.remote.sglang import SglangEngine
from engines.remote.turnkeep import TurnkeepEngine
from engines.remote.vllm import VllmEngine

Kind = Literal["turnkeep", "vllm", "sglang", "llamacpp", "openai"]


async def connect(
    url: str,
    *,
    api_key: str | None = None,
    name: str | None = None,
    kind: Kind | None = None,
    timeouts: Timeouts | None = None,
    refuse_address: RefuseAddress | None = None,
    kv: FeedAddress | None = None,
) -> Engine:
    """The engine at `url`, which may end in `/v1`. The caller closes it. `kv`: where it publishes KV events, if it can.

    Raises ValueError for a URL that is none, EngineError when nothing there answers as an engine does. With `kind`
    nothing is asked, so the server may be down.
    """
    root, versioned = _split_version(url)
    upstream = Upstream(root, name=name or "", api_key=api_key, timeouts=timeouts, refuse_address=refuse_address)
    if kind == "openai":
        return OpenAiEngine(upstream, prefix="/v1" if versioned or not upstream.path else "")
    if kind is not None:
        return _adapter(kind, upstream, kv)
    try:
        return await _probe(upstream, kv)
    except BaseException:
        await upstream.aclose()
        raise


def _adapter(
    kind: Literal["turnkeep", "vllm", "sglang", "llamacpp"], upstream: Upstream, kv: FeedAddress | None
) -> Engine:
    match kind:
        case "turnkeep":
            return TurnkeepEngine(upstream, kv=kv)
        case "vllm":
            return VllmEngine(upstream, kv=kv)
        case "sglang":
            return SglangEngine(upstream, kv=kv)
        case "llamacpp":
            return LlamaCppEngine(upstream)


async def _probe(upstream: Upstream, kv: FeedAddress | None) -> Engine:
    if _object(await upstream.get("/turnkeep/v1/capabilities")).get("kind") is not None:
        return TurnkeepEngine(upstream, kv=kv)
    for prefix in ("/v1", ""):
        reply = await upstream.get(f"{prefix}/models")
        if reply.status in (404, 405):
            continue
        check(reply, upstream.name)
        cards = _object(reply).get("data")
        if not isinstance(cards, list):
            break
        known = [card for card in cards if isinstance(card, dict)]
        if prefix and (native := await _native(upstream, known, kv)) is not None:
            return native
        return OpenAiEngine(upstream, prefix=prefix, dialect=recognise(known))
    raise EngineBroken(
        f"{upstream.name} answers neither as Turnkeep's engine, nor as vLLM, nor with OpenAI's list of models",
        replica=upstream.name,
    )


async def _native(upstream: Upstream, cards: list[dict[str, Any]], kv: FeedAddress | None) -> Engine | None:
    """The engine whose own protocol the server speaks beside OpenAI's, by who owns its models."""
    owners = {str(card.get("owned_by")) for card in cards}
    if "vllm" in owners and "version" in _object(await upstream.get("/version")):
        return VllmEngine(upstream, kv=kv)
    if "sglang" in owners:
        return SglangEngine(upstream, kv=kv)
    if "llamacpp" in owners and _object(await upstream.get("/props")):
        return LlamaCppEngine(upstream)
    return None


def _object(reply: Reply) -> dict[str, Any]:
    """The JSON object of a 200; empty for anything else."""
    if reply.status != 200:
        return {}
    try:
        found = orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _split_version(url: str) -> tuple[str, bool]:
    trimmed = url.rstrip("/")
    return trimmed.removesuffix("/v1"), trimmed.endswith("/v1")
