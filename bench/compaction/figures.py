"""From what was seen after each compaction to the figures of docs/bench.md. Plain arithmetic."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.compaction.score import Verdict

OURS, EXTRACTED = "ours", "ours, extraction only"
NO_RIVALS = frozenset({OURS, EXTRACTED, "full context", "oracle"})  # not among the others that ours is held against
AGES = ((1, 1), (2, 4), (5, 10))  # compactions that a fact has been through


@dataclass(frozen=True, slots=True)
class Seen:
    """One fact in one kept context. `age`: compactions since it was told."""

    id: str
    kind: str
    ruled: bool
    identifier: bool
    age: int
    survives: bool
    connected: bool
    superseded: Verdict | None = None
    read: bool | None = None  # whether the model preferred its value; None: not asked


@dataclass(frozen=True, slots=True)
class Look:
    """One method's context after one compaction of one conversation."""

    method: str
    seed: int
    modelled: bool  # of the conversations in which summaries were asked of the model
    compactions: int
    budget: int  # tokens
    tokens: int
    seen: tuple[Seen, ...]


def lost(looks: Iterable[Look], which: Callable[[Seen], bool] = lambda seen: True) -> int:
    return sum(which(seen) and not seen.survives for look in looks for seen in look.seen)


def of(looks: Iterable[Look], method: str, compactions: int, *, modelled: bool | None = None) -> list[Look]:
    return [
        look
        for look in looks
        if look.method == method and look.compactions == compactions and (modelled is None or look.modelled is modelled)
    ]


GROUPS: dict[str, Callable[[Seen], bool]] = {
    "all": lambda seen: True,
    "ruled": lambda seen: seen.ruled,
    "unruled": lambda seen: not seen.ruled,
}


def over_best_other(
    looks: Sequence[Look], ours: str, points: Sequence[int], *, modelled: bool | None
) -> dict[str, Any]:
    """Facts lost by `ours` over those lost by the best of the others, in the same conversations, by group and point.
    `worst`: of the points; None where there is nothing to compare."""
    result: dict[str, Any] = {}
    for group, which in GROUPS.items():
        ratios: dict[str, Any] = {}
        for point in points:
            mine = of(looks, ours, point, modelled=modelled)
            seeds = {look.seed for look in mine}
            rivals: dict[str, int] = {}
            for method in {look.method for look in looks} - NO_RIVALS:
                theirs = [look for look in of(looks, method, point, modelled=modelled) if look.seed in seeds]
                if {look.seed for look in theirs} == seeds:
                    rivals[method] = lost(theirs, which)
            if not mine or not rivals:
                continue
            best = min(rivals, key=lambda name: rivals[name])
            ratios[str(point)] = {
                "lost": lost(mine, which),
                "told": sum(which(seen) for look in mine for seen in look.seen),
                "best_other": best,
                "best_other_lost": rivals[best],
                "ratio": _ratio(lost(mine, which), rivals[best]),
            }
        ratios["worst"] = max((each["ratio"] for each in ratios.values()), default=None)
        result[group] = ratios
    return result


def _ratio(mine: int, theirs: int) -> float:
    return round(mine / theirs, 3) if theirs else float(mine)


def row(looks: Sequence[Look]) -> dict[str, Any]:
    """The figures of one method after so many compactions, over conversations."""
    seen = [one for look in looks for one in look.seen]
    shares = [lost([look]) / len(look.seen) for look in looks if look.seen]
    read = [one for one in seen if one.read is not None]
    verdicts = Counter(one.superseded for one in seen if one.superseded is not None)
    return {
        "method": looks[0].method,
        "modelled": looks[0].modelled,
        "compactions": looks[0].compactions,
        "conversations": len(looks),
        "budget_tokens": round(statistics.mean(look.budget for look in looks)),
        "kept_tokens": round(statistics.mean(look.tokens for look in looks)),
        "facts": len(seen),
        "lost": lost(looks),
        "lost_share": share(lost(looks), len(seen)),
        "lost_share_spread": [round(min(shares), 3), round(max(shares), 3)] if shares else None,
        "lost_share_deviation": round(statistics.stdev(shares), 3) if len(shares) > 1 else None,
        "lost_ruled": lost_share(seen, GROUPS["ruled"]),
        "lost_unruled": lost_share(seen, GROUPS["unruled"]),
        "connected_share": share(sum(one.connected for one in seen), len(seen)),
        "identifier_survival": survival(seen),
        "superseded": {verdict: verdicts[verdict] for verdict in ("right", "stale", "unmarked", "gone")},
        "reader_asked": len(read),
        "reader_recall": share(sum(bool(one.read) for one in read), len(read)),
    }


def share(part: int, whole: int) -> float | None:
    return round(part / whole, 3) if whole else None


def lost_share(seen: Sequence[Seen], which: Callable[[Seen], bool]) -> float | None:
    chosen = [one for one in seen if which(one)]
    return share(sum(not one.survives for one in chosen), len(chosen))


def survival(seen: Iterable[Seen]) -> float | None:
    identifiers = [one for one in seen if one.identifier]
    return share(sum(one.survives for one in identifiers), len(identifiers))


def by_kind(looks: Sequence[Look]) -> dict[str, Any]:
    """For each kind: how many were told, and how many each method lost and the model could not read."""
    return _table(looks, lambda one: one.kind)


def by_age(looks: Sequence[Look]) -> dict[str, Any]:
    """The same by compactions that the facts have been through."""
    return _table(looks, lambda one: next((f"{a}-{b}" if a < b else str(a) for a, b in AGES if a <= one.age <= b), "0"))


def _table(looks: Sequence[Look], key: Callable[[Seen], str]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for look in looks:
        for one in look.seen:
            cell = table.setdefault(key(one), {}).setdefault(look.method, Counter())
            cell["told"] += 1
            cell["lost"] += not one.survives
            cell["asked"] += one.read is not None
            cell["read"] += bool(one.read)
    return {name: {method: dict(cell) for method, cell in cells.items()} for name, cells in sorted(table.items())}
