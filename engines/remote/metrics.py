"""Prometheus text of other engines, and what their names mean. Releases move names: the first found counts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engines.contract import EngineLoad
from engines.remote.replies import MAX_COUNT

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')

MAX_DIGITS = 15  # of a label's number


@dataclass(frozen=True, slots=True)
class Names:
    """Metric names of one kind of engine, newest first."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    used_ratio: tuple[str, ...]
    started: tuple[str, ...]  # seconds since 1970, changes with a restart
    config: str = ""  # an info metric with block_size and num_gpu_blocks


VLLM = Names(
    ("vllm:num_requests_running",),
    ("vllm:num_requests_waiting",),
    ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ("process_start_time_seconds", "vllm:prompt_tokens_created"),
    "vllm:cache_config_info",
)
SGLANG = Names(
    ("sglang:num_running_reqs",), ("sglang:num_queue_reqs",), ("sglang:token_usage",), ("process_start_time_seconds",)
)
LLAMACPP = Names(
    ("llamacpp:requests_processing",), ("llamacpp:requests_deferred",), ("llamacpp:kv_cache_usage_ratio",), ()
)


class Metrics:
    """One scrape. Values of the same name (ranks, models) are added up, or averaged where they are ratios."""

    def __init__(self, text: str) -> None:
        self._values: dict[str, list[float]] = {}
        self._labels: dict[str, Mapping[str, str]] = {}
        for line in text.splitlines():
            if (match := _SAMPLE.match(line)) is None:
                continue
            name, labels, value = match.groups()
            try:
                number = float(value)
            except ValueError:
                continue
            if not 0 <= number <= MAX_COUNT:  # NaN of a mean over nothing, too
                continue
            self._values.setdefault(name, []).append(number)
            if labels:
                self._labels.setdefault(name, dict(_LABEL.findall(labels)))

    def total(self, names: tuple[str, ...]) -> float | None:
        return next((sum(self._values[name]) for name in names if name in self._values), None)

    def mean(self, names: tuple[str, ...]) -> float | None:
        found = next((self._values[name] for name in names if name in self._values), None)
        return sum(found) / len(found) if found else None

    def text(self, name: str, label: str) -> str:
        return self._labels.get(name, {}).get(label, "")

    def label(self, name: str, label: str) -> int | None:
        value = self.text(name, label)
        return int(value) if value.isdecimal() and len(value) <= MAX_DIGITS else None

    def load(self, names: Names) -> EngineLoad:
        total, ratio = self.label(names.config, "num_gpu_blocks"), self.mean(names.used_ratio)
        return EngineLoad(
            running=int(self.total(names.running) or 0),
            waiting=int(self.total(names.waiting) or 0),
            kv_used_ratio=ratio,
            kv_blocks_total=total,
            kv_blocks_used=None if total is None or ratio is None else round(total * ratio),
        )

    def epoch(self, names: Names) -> str | None:
        started = self.total(names.started)
        return None if started is None else f"{started:.3f}"

    def unseen(self, names: Names) -> tuple[str, ...]:
        """The names of what a scrape should show and does not."""
        wanted = (names.running, names.waiting, names.used_ratio)
        return tuple(each[0] for each in wanted if self.total(each) is None)
