"""From a URL to an engine: asks the server what it is.

/turnkeep/v1/capabilities answers            turnkeep
/version answers, /v1/models is owned by vllm     vllm
/v1/models or /models answers                openai
"""

from __future__ import annotations

from typing import Any, Literal

import orjson

from engines.contract import Engine, EngineBroken
from engines.remote.http import Reply, Timeouts, Upstream
from engines.remote.openai import OpenAiEngine, recognise
from engines.remote.replies import check
from engines.remote.turnkeep import TurnkeepEngine
from engines.remote.vllm import VllmEngine

Kind = Literal["turnkeep", "vllm", "openai"]


async def connect(
    url: str,
    *,
    api_key: str | None = None,
    name: str | None = None,
    kind: Kind | None = None,
    timeouts: Timeouts | None = None,
) -> Engine:
    """The engine at `url`, which may end in `/v1`. The caller closes it.

    Raises ValueError for a URL that is none, EngineError when nothing there answers as an engine does. With `kind`
    nothing is asked, so the server may be down.
    """
    root, versioned = _split_version(url)
    upstream = Upstream(root, name=name or "", api_key=api_key, timeouts=timeouts)
    if kind == "openai":
        return OpenAiEngine(upstream, prefix="/v1" if versioned or not upstream.path else "")
    if kind is not None:
        return TurnkeepEngine(upstream) if kind == "turnkeep" else VllmEngine(upstream)
    try:
        return await _probe(upstream)
    except BaseException:
        await upstream.aclose()
        raise


async def _probe(upstream: Upstream) -> Engine:
    if _object(await upstream.get("/turnkeep/v1/capabilities")).get("kind") is not None:
        return TurnkeepEngine(upstream)
    for prefix in ("/v1", ""):
        reply = await upstream.get(f"{prefix}/models")
        if reply.status in (404, 405):
            continue
        check(reply, upstream.name)
        cards = _object(reply).get("data")
        if not isinstance(cards, list):
            break
        if prefix and await _is_vllm(upstream, cards):
            return VllmEngine(upstream)
        known = [card for card in cards if isinstance(card, dict)]
        return OpenAiEngine(upstream, prefix=prefix, dialect=recognise(known))
    raise EngineBroken(
        f"{upstream.name} answers neither as Turnkeep's engine, nor as vLLM, nor with OpenAI's list of models",
        replica=upstream.name,
    )


async def _is_vllm(upstream: Upstream, cards: list[Any]) -> bool:
    if not any(isinstance(card, dict) and card.get("owned_by") == "vllm" for card in cards):
        return False
    return "version" in _object(await upstream.get("/version"))


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
