"""What a replica was found to be able to do, as the admin API tells it."""

from __future__ import annotations

from typing import Any

from engines.contract import Capabilities

FLAGS = (  # fields of Capabilities
    "takes_ids",
    "returns_ids",
    "takes_delta",
    "continues",
    "takes_shift",
    "takes_bits",
    "retains",
    "takes_salt",
    "takes_chat",
    "takes_images",
    "parses_tools",
    "parses_reasoning",
    "reports_cached",
    "kv_events",
    "keeps_sessions",
    "prefills",
)


def capabilities_json(caps: Capabilities) -> dict[str, Any]:
    """`unseen`, beside it in a replica's JSON, says what could not be learnt."""
    told = {name: getattr(caps, name) for name in FLAGS}
    return {**told, "max_running": caps.max_running, "adapters": list(caps.adapters), "routes": sorted(caps.routes)}
