"""Who may take a turn at all. Knows no costs, no HTTP and no clock but the moment it is given."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gateway.fleet.identity import ModelIdentity
from gateway.fleet.replica import Replica


def eligible(
    replicas: Iterable[Replica],
    *,
    model: str,
    now: float,
    tried: Collection[str] = (),
    answered: ModelIdentity | None = None,
) -> list[Replica]:
    """The replicas that serve the model, can take a turn and were not tried; fallbacks only where no other can.

    `answered`: by whom the path was answered so far. Another model under the name comes only where that one cannot.
    """
    fit = [r for r in replicas if r.serves(model) and r.available(now) and r.name not in tried]
    ordinary = [r for r in fit if not r.fallback]
    return of_one_model(ordinary, model, answered) or fit


def of_one_model(replicas: list[Replica], model: str, answered: ModelIdentity | None) -> list[Replica]:
    """Those that serve the model which answered so far; all where none does, or nobody knows who answered."""
    if answered is None:
        return replicas
    return [r for r in replicas if r.fingerprint(model) == answered.fingerprint] or replicas
