"""Chooses a replica for a request that belongs to no session. Knows no HTTP, no store and no clock but its moment."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gateway.fleet.replica import Replica


def offers(replica: Replica, model: str, route: str, *, ids: bool) -> bool:
    """Whether it answers `route` for this model, or could by token ids where that will do (`ids`)."""
    caps = replica.capabilities
    return caps is not None and replica.serves(model) and (route in caps.routes or (ids and caps.takes_ids))


def choose_for(
    route: str, replicas: Iterable[Replica], *, model: str, ids: bool, now: float, tried: Collection[str] = ()
) -> Replica | None:
    """Of those that offer it and can take it, the one with the least work; one with the route itself before others."""
    fit = [r for r in replicas if r.name not in tried and r.available(now) and offers(r, model, route, ids=ids)]

    def cost(replica: Replica) -> tuple[bool, int, str]:
        caps = replica.capabilities
        lacks = caps is None or route not in caps.routes
        return lacks, replica.in_flight + replica.queued + replica.load.waiting, replica.name

    return min(fit, key=cost, default=None)
