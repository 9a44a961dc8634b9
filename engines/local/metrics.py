"""The engine's metrics, in a registry of its own. Counts requests, not chunks: a stream costs nothing here."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engines.contract import Usage
from engines.local.backend import ModelInfo, Status

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
PREFIX = "turnkeep_engine_"


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            PREFIX + "requests", "Requests by end: finished, failed, cancelled, or the code they were refused with.",
            ["end"], registry=self.registry,
        )  # fmt: skip
        self._tokens = Counter(
            PREFIX + "tokens", "Tokens of finished requests: prompt, cached (of the prompt), output.",
            ["kind"], registry=self.registry,
        )  # fmt: skip
        self._first = Histogram(
            PREFIX + "time_to_first_token_seconds", "From the request to its first delta.",
            registry=self.registry, buckets=SECONDS,
        )  # fmt: skip
        self._whole = Histogram(
            PREFIX + "request_seconds", "From the request to its end.", registry=self.registry, buckets=SECONDS
        )

    def refused(self, code: str) -> None:
        self._requests.labels(code).inc()

    def ended(self, end: str, seconds: float) -> None:
        self._requests.labels(end).inc()
        self._whole.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def used(self, usage: Usage) -> None:
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("cached").inc(usage.cached_tokens or 0)
        self._tokens.labels("output").inc(usage.output_tokens)


class Snapshot(Collector):
    """What the backend last said, as metrics; made for one scrape."""

    def __init__(self, info: ModelInfo, status: Status, running: int, waiting: int) -> None:
        self._info, self._status, self._running, self._waiting = info, status, running, waiting

    def collect(self) -> Iterator[Metric]:
        info, status = self._info, self._status
        yield _gauge("running", "Requests that generate or prefill.", self._running)
        yield _gauge("waiting", "Requests that wait for their prefill.", self._waiting)
        yield _gauge("window_tokens", "Longest prompt and answer together.", info.window)
        yield _gauge("pool_ok", "1 while the pool's books balance.", status.pool_ok)
        blocks = GaugeMetricFamily(PREFIX + "blocks", "KV blocks by state; they add up to the pool.", labels=["state"])
        blocks.add_metric(["free"], status.blocks_free)
        blocks.add_metric(["cached"], status.blocks_cached)
        blocks.add_metric(["used"], status.blocks_used)
        yield blocks
        if info.eviction is not None:
            policy = GaugeMetricFamily(PREFIX + "eviction_policy", "1 for the policy in force.", labels=["policy"])
            policy.add_metric([info.eviction], 1.0)
            yield policy
        for name, value in status.gauges.items():
            yield _gauge(name, f"{name} of the engine core.", value)
        sealed = GaugeMetricFamily(PREFIX + "sealed_units", "Units of 64 tokens in fewer bits.", labels=["codec"])
        for codec, count in status.sealed.items():
            sealed.add_metric([codec], count)
        yield sealed
        for figure in ("bytes", "capacity", "blocks") if status.tiers else ():
            tier = GaugeMetricFamily(
                f"{PREFIX}tier_{figure}", f"{figure} of the tiers below the pool.", labels=["tier"]
            )
            for name, load in status.tiers.items():
                tier.add_metric([name], load[figure])
            yield tier
        for name, value in status.counters.items():
            yield CounterMetricFamily(PREFIX + name, f"{name} of the engine core since its start.", value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=float(value))
