"""The rows of a run as an SVG: hits over what is reachable, and the load of the busiest replica. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot  # after the choice of backend

MOST_LOAD = 2.0  # a bar beyond is cut, with its number on it


def drawn(rows: Sequence[dict[str, Any]]) -> str:
    capacities = sorted({row["capacity_blocks"] for row in rows}, reverse=True)
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    figure, axes = pyplot.subplots(len(capacities), 2, figsize=(11, 3.4 * len(capacities)), squeeze=False)
    for line, capacity in enumerate(capacities):
        here = [row for row in rows if row["capacity_blocks"] == capacity]
        sizes = sorted({row["replicas"] for row in here})
        for column, (field, title) in enumerate(
            [("hit_over_reachable", "hits over reachable"), ("load_max_over_mean", "busiest replica over mean")]
        ):
            axis = axes[line][column]
            width = 0.8 / len(policies)
            for number, policy in enumerate(policies):
                values = [next(r[field] for r in here if (r["policy"], r["replicas"]) == (policy, n)) for n in sizes]
                at = [place + number * width - 0.4 + width / 2 for place in range(len(sizes))]
                bars = axis.bar(at, [min(value, MOST_LOAD) for value in values], width, label=policy)
                for bar, value in zip(bars, values, strict=True):
                    if value > MOST_LOAD:
                        axis.text(bar.get_x() + width / 2, MOST_LOAD, f"{value:.0f}", ha="center", va="bottom", size=7)
            axis.set_xticks(range(len(sizes)), [f"{n} replicas" for n in sizes])
            axis.set_title(f"{title}, {capacity:,} blocks each", size=10)
            axis.axhline(1.0, color="grey", linewidth=0.7)
    axes[0][0].legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
