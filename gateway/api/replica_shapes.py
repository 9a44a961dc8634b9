"""Replicas as the admin API and the dashboard tell them: how each is, what is believed of it, what cannot be seen."""

from __future__ import annotations

from typing import Any

from gateway.api.capabilities import capabilities_json
from gateway.api.state import Gateway
from gateway.fleet.member import Member
from gateway.fleet.replica import Replica
from gateway.fleet.residency import Held
from gateway.store.replica_records import ReplicaRecord


def replicas_json(gateway: Gateway) -> list[dict[str, Any]]:
    """All replicas in order of name, those that have not joined yet too."""
    joined = {replica.name: replica_json(gateway, replica) for replica in gateway.fleet}
    waiting = {name: pending_json(gateway, name, member) for name, member in gateway.roster.pending.items()}
    return [told for _, told in sorted({**waiting, **joined}.items())]


def replica_json(gateway: Gateway, replica: Replica) -> dict[str, Any]:
    caps, load = replica.capabilities, replica.load
    models = caps.models if caps is not None else ()
    named = replica.revision is not None
    return {
        **_named(gateway, replica.name, replica.url, replica.source),
        "state": replica.state,
        "healthy": replica.available(gateway.fleet.now()),
        "kind": caps.kind if caps is not None else None,
        "models": list(models),
        "window": caps.window if caps is not None else None,
        "epoch": caps.epoch if caps is not None else None,
        "by_ids": [model for model in models if gateway.models.by_ids(model, replica)],
        "why_chat": {m: gateway.models.problems[m] for m in models if m in gateway.models.problems},
        "fallback": replica.fallback,
        "capabilities": capabilities_json(caps) if caps is not None else {},
        "fingerprints": {model: replica.fingerprint(model) for model in models},
        "unseen": [what for what in (caps.unseen if caps is not None else ()) if what != "fingerprint" or not named],
        "in_flight": replica.in_flight,
        "max_in_flight": replica.queue.limit,
        "queued": replica.queued,
        "refused": dict(replica.queue.refused),
        "running": load.running,
        "waiting": load.waiting,
        "kv_used_ratio": load.kv_used_ratio,
        "kv_blocks_total": load.kv_blocks_total,
        "kv_blocks_cached": load.kv_blocks_cached,
        "kv_blocks_used": load.kv_blocks_used,
        "cache": cache_json(gateway.fleet.outlook.held.get(replica.name)),
        "last_error": replica.last_error,
    }


def pending_json(gateway: Gateway, name: str, member: Member | None) -> dict[str, Any]:
    """One that nothing has answered for so far."""
    record = gateway.roster.records.get(name)
    url, source = (member.url, member.source) if member is not None else ((record and record.url) or "", "api")
    return {
        **_named(gateway, name, url, source),
        "state": "connecting",
        "healthy": False,
        "kind": member.kind if member is not None else None,
        **dict.fromkeys(("window", "epoch", "kv_used_ratio", "kv_blocks_total", "kv_blocks_cached", "kv_blocks_used")),
        **{name: [] for name in ("models", "by_ids", "unseen")},
        "fallback": member is not None and member.fallback,
        **{name: {} for name in ("why_chat", "refused", "capabilities", "fingerprints")},
        **dict.fromkeys(("in_flight", "queued", "running", "waiting"), 0),
        "max_in_flight": None,
        "cache": cache_json(None),
        "last_error": gateway.roster.trouble.get(name),
    }


def cache_json(held: Held | None) -> dict[str, Any]:
    """What is believed to be cached there, how far that is believed, and why."""
    held = held or Held()
    return {
        "trust": held.trust,
        "resident_tokens": held.held_tokens,
        "predictions": held.judged,
        "predictions_right": held.came_true,
        "right_share": round(held.came_true / held.judged, 4) if held.judged else None,
        "credit": round(held.right, 4),
        "feed": {
            "state": held.feed,
            "problem": held.problem or None,
            "last_reset": held.last_reset or None,
            "ranks": held.told.ranks if held.live else None,
            "unknown_parents": held.told.unknown_parents,
        },
    }


def _named(gateway: Gateway, name: str, url: str, source: str) -> dict[str, Any]:
    record = gateway.roster.records.get(name)
    return {
        "object": "replica",
        "name": name,
        "url": url,
        "source": source,
        "has_api_key": _has_key(gateway, name, record),
        "draining": draining_json(record),
    }


def _has_key(gateway: Gateway, name: str, record: ReplicaRecord | None) -> bool:
    """Whether it is asked with a key, which is never shown."""
    if record is not None and record.credential is not None:
        return True
    return any(upstream.name == name and upstream.api_key is not None for upstream in gateway.settings.upstreams)


def draining_json(record: ReplicaRecord | None) -> dict[str, Any] | None:
    if record is None or record.state == "active":
        return None
    nothing = {"sessions_left": 0, "moved": 0, "released": 0, "failed": 0, "running": 0, "timed_out": False}
    return {
        **nothing,
        **record.progress,
        "done": record.state == "drained",
        "since": record.changed_at,
        "until": record.drain_until,
        "reason": record.reason,
    }


def history_json(gateway: Gateway, replica: Replica) -> list[dict[str, Any]]:
    """The last changes, the newest first."""
    ago = gateway.clock() - gateway.fleet.now()  # from the fleet's clock to the world's
    return [
        {"at": round(change.at + ago, 3), "state": change.state, "reason": change.reason}
        for change in reversed(replica.history)
    ]
