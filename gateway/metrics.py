"""The gateway's Prometheus metrics: made once by the application, counted by wrapping the turn's terminal event."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.fleet.fleet import Fleet
from gateway.sessions.registry import Registry
from gateway.sessions.run import TurnRun
from gateway.store.compaction_records import CompactionRecord
from gateway.store.sessions import Store

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Names follow the field's conventions; seconds and tokens."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.turns = Counter("turnkeep_turns", "Turns ended.", ["status", "mode"], registry=registry)
        self.tokens = Counter("turnkeep_tokens", "Tokens of ended turns.", ["kind"], registry=registry)
        self.ttft = Histogram(
            "turnkeep_time_to_first_token_seconds", "From the turn's begin.", buckets=TTFT_BUCKETS, registry=registry
        )
        self.duration = Histogram(
            "turnkeep_turn_duration_seconds",
            "From begin to end.",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.compactions = Counter(
            "turnkeep_compactions", "Compactions ended.", ["status", "trigger"], registry=registry
        )
        self.compacted_tokens = Counter(
            "turnkeep_compaction_tokens", "Tokens that compactions removed and prefilled.", ["kind"], registry=registry
        )
        self.forwarded = Counter(
            "turnkeep_forwarded",
            "Requests without a session ended: completions, embeddings, rerank.",
            ["route", "status"],
            registry=registry,
        )
        self.forwarded_tokens = Counter(
            "turnkeep_forwarded_tokens", "Tokens of these requests.", ["route", "kind"], registry=registry
        )
        self.forwarded_duration = Histogram(
            "turnkeep_forwarded_duration_seconds",
            "From begin to end.",
            ["route"],
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.limited = Counter(
            "turnkeep_limited", "Requests that a limit of a tenant or a key refused.", ["limit"], registry=registry
        )
        self.limits_blind = Counter(
            "turnkeep_limits_blind", "Requests whose limits could not be counted.", registry=registry
        )
        self.database_up = Gauge("turnkeep_database_up", "0: it took nothing when last asked.", registry=registry)
        self.unsaved = Counter(
            "turnkeep_unsaved_turns", "Turns that could not be kept, and were answered.", ["reason"], registry=registry
        )
        self.usage_waiting = Gauge(
            "turnkeep_usage_waiting", "Accounts whose usage waits to be booked.", registry=registry
        )
        self.kv_given_up = Counter(
            "turnkeep_limits_kv_given_up",
            "Sessions whose K/V a replica gave up for a limit of KV bytes.",
            registry=registry,
        )
        self.running = Gauge("turnkeep_turns_running", "Turns that run here.", registry=registry)
        self.replica_up = Gauge("turnkeep_replica_up", "1: answers probes.", ["replica"], registry=registry)
        self.queue_wait = Histogram(
            "turnkeep_queue_wait_seconds",
            "Time that ended turns waited for a place at a replica.",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.queue_refused = Counter(
            "turnkeep_queue_refused", "Turns that got no place at a replica.", ["replica", "reason"], registry=registry
        )
        self.replica_waiting = Gauge(
            "turnkeep_replica_waiting", "Turns that wait here for a place there.", ["replica"], registry=registry
        )
        self.replica_in_flight = Gauge(
            "turnkeep_replica_in_flight", "Turns that this gateway has there.", ["replica"], registry=registry
        )
        self.replica_kv = Gauge(
            "turnkeep_replica_kv_used_ratio", "KV blocks in use or cached, of all.", ["replica"], registry=registry
        )

        self.replica_resident = Gauge(
            "turnkeep_replica_resident_tokens", "Believed to be cached there.", ["replica"], registry=registry
        )
        self.replica_right = Gauge(
            "turnkeep_replica_right_ratio",
            "Of what was predicted to be cached there, came true lately.",
            ["replica"],
            registry=registry,
        )

    def turn_ended(self, run: TurnRun) -> None:
        """Count a turn that has ended."""
        ended = run.ended
        if ended is None:
            return
        if run.unsaved is not None:
            self.unsaved.labels(run.unsaved).inc()
        self.turns.labels(ended.status, str(ended.metadata.get("mode", "none"))).inc()
        usage = ended.usage
        self.tokens.labels("prompt").inc(usage.get("prompt_tokens") or 0)
        self.tokens.labels("cached").inc(usage.get("cached_tokens") or 0)
        self.tokens.labels("output").inc(usage.get("output_tokens") or 0)
        if run.first_piece_at is not None:
            self.ttft.observe(run.first_piece_at - run.started_at)
        self.queue_wait.observe((ended.metadata.get("queued_ms") or 0.0) / 1000)
        self.duration.observe(time.monotonic() - run.started_at)

    def refused(self, limit: str) -> None:
        """Count a request that was refused by a limit of this name."""
        self.limited.labels(limit).inc()

    def forwarded_ended(self, route: str, status: str, duration_s: float) -> None:
        """Count a request without a session that has ended: completed, refused, failed or cancelled."""
        self.forwarded.labels(route, status).inc()
        self.forwarded_duration.labels(route).observe(duration_s)

    def forwarded_used(self, route: str, usage: Mapping[str, Any]) -> None:
        """Count the tokens that the engine told of it."""
        for kind, name in (("prompt", "prompt_tokens"), ("output", "completion_tokens")):
            if isinstance(count := usage.get(name), int) and count > 0:
                self.forwarded_tokens.labels(route, kind).inc(count)

    def compaction_ended(self, record: CompactionRecord) -> None:
        """Count a compaction that has ended, committed or not."""
        self.compactions.labels(record.status, record.trigger).inc()
        report = record.report
        if record.status == "committed":
            self.compacted_tokens.labels("removed").inc(max(0, report["tokens_before"] - report["tokens_after"]))
        self.compacted_tokens.labels("prefilled").inc(report.get("prefill_tokens") or 0)


def observe(metrics: Metrics, fleet: Fleet, registry: Registry, store: Store) -> None:
    """Set the gauges from how things stand."""
    metrics.database_up.set(not store.away)
    metrics.usage_waiting.set(store.usage_waiting)
    metrics.running.set(len(registry))
    for gauge in (
        *(metrics.replica_up, metrics.replica_in_flight, metrics.replica_waiting, metrics.replica_kv),
        *(metrics.replica_resident, metrics.replica_right),
    ):
        gauge.clear()  # a replica that was removed says nothing more
    for replica in fleet:
        metrics.replica_up.labels(replica.name).set(replica.healthy)
        metrics.replica_in_flight.labels(replica.name).set(replica.in_flight)
        metrics.replica_waiting.labels(replica.name).set(replica.queued)
        if (held := fleet.outlook.held.get(replica.name)) is not None:
            metrics.replica_resident.labels(replica.name).set(held.held_tokens)
            metrics.replica_right.labels(replica.name).set(held.right)
        for reason, count in replica.queue.take_refused().items():
            metrics.queue_refused.labels(replica.name, reason).inc(count)
        if replica.load.kv_used_ratio is not None:
            metrics.replica_kv.labels(replica.name).set(replica.load.kv_used_ratio)
