"""The gateway's Prometheus metrics: made once by the application, counted by wrapping the turn's terminal event."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.fleet.fleet import Fleet
from gateway.sessions.registry import Registry
from gateway.sessions.run import TurnRun
from gateway.store.compaction_records import CompactionRecord

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
        self.running = Gauge("turnkeep_turns_running", "Turns that run here.", registry=registry)
        self.replica_up = Gauge("turnkeep_replica_up", "1: answers probes.", ["replica"], registry=registry)
        self.replica_in_flight = Gauge(
            "turnkeep_replica_in_flight", "Turns that this gateway has there.", ["replica"], registry=registry
        )
        self.replica_kv = Gauge(
            "turnkeep_replica_kv_used_ratio", "KV blocks in use or cached, of all.", ["replica"], registry=registry
        )

    def turn_ended(self, run: TurnRun) -> None:
        """Count a turn that has ended."""
        ended = run.ended
        if ended is None:
            return
        self.turns.labels(ended.status, str(ended.metadata.get("mode", "none"))).inc()
        usage = ended.usage
        self.tokens.labels("prompt").inc(usage.get("prompt_tokens") or 0)
        self.tokens.labels("cached").inc(usage.get("cached_tokens") or 0)
        self.tokens.labels("output").inc(usage.get("output_tokens") or 0)
        if run.first_piece_at is not None:
            self.ttft.observe(run.first_piece_at - run.started_at)
        self.duration.observe(time.monotonic() - run.started_at)

    def compaction_ended(self, record: CompactionRecord) -> None:
        """Count a compaction that has ended, committed or not."""
        self.compactions.labels(record.status, record.trigger).inc()
        report = record.report
        if record.status == "committed":
            self.compacted_tokens.labels("removed").inc(max(0, report["tokens_before"] - report["tokens_after"]))
        self.compacted_tokens.labels("prefilled").inc(report.get("prefill_tokens") or 0)


def observe(metrics: Metrics, fleet: Fleet, registry: Registry) -> None:
    """Set the gauges from how things stand."""
    metrics.running.set(len(registry))
    for replica in fleet:
        metrics.replica_up.labels(replica.name).set(replica.healthy)
        metrics.replica_in_flight.labels(replica.name).set(replica.in_flight)
        if replica.load.kv_used_ratio is not None:
            metrics.replica_kv.labels(replica.name).set(replica.load.kv_used_ratio)
