"""Where a turn goes: which home of its session still counts, and who takes it. Sends nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gateway.errors import NotFound, QueueRefused, Unavailable
from gateway.fleet.fleet import Fleet
from gateway.fleet.identity import ModelIdentity
from gateway.fleet.outlook import Path
from gateway.fleet.placement import Pin, Placement, choose
from gateway.sessions.demands import Suits
from gateway.sessions.history import History
from gateway.sessions.models import Models
from gateway.sessions.paths import standing_path
from gateway.sessions.tokens import ModelTokens


def standing_pin(history: History, fleet: Fleet) -> Pin | None:
    """The session's pin, as its head turn keeps it for every gateway; None where there is none, where its replica was
    removed, and where the session was idle for so long that nothing of it can be cached there."""
    pin = history.pin
    if pin is None or fleet.get(pin.replica) is None:
        return None
    return pin if fleet.wall() - history.last_used_at <= fleet.pin_ttl_s else None


def read_at_home(model: str, history: History, models: Models) -> ModelTokens | None:
    """The model's tokens as the session's home reads them."""
    return models.tokens(model, at=history.pin.replica if history.pin is not None else None)


async def known(history: History, fleet: Fleet) -> None:
    """Have the session's home be known here, where another gateway added it a moment ago."""
    if history.pin is not None and fleet.get(history.pin.replica) is None:
        await fleet.find(history.pin.replica)


def place(
    model: str,
    history: History,
    fleet: Fleet,
    tried: Sequence[str] = (),
    *,
    tenant_id: str = "",
    going_on: bool = False,
    key: bytes = b"",
    path: Path | None = None,
    among: Collection[str] | None = None,
    answered: ModelIdentity | None = None,
    suits: Suits | None = None,
) -> Placement:
    """A replica whose line is full for this tenant is passed over, unless an answer goes on that has begun elsewhere.
    `answered`: who began that answer; else it is whom the history names. `suits`: who can do what is asked; where
    nobody can, the refusal says what it lacks.

    Raises NotFound (model), Unavailable (no replica), QueueRefused (no place there even to wait).
    """
    full = [] if going_on else [r for r in fleet if r.queue.refuses(tenant_id)]
    placement = choose(
        [r for r in fleet if r not in full and (among is None or r.name in among)],
        model=model,
        pin=standing_pin(history, fleet),
        path=path or standing_path(history),
        outlook=fleet.outlook,
        now=fleet.now(),
        at=fleet.wall(),
        key=key,
        tried=tried,
        answered=answered or history.answered(model),
        suits=suits,
    )
    if placement is not None:
        return placement
    busy = [r for r in full if r.serves(model) and r.available(fleet.now()) and r.name not in tried]
    if busy:
        busy[0].queue.refused["full"] += 1
        raise QueueRefused(
            f"every replica that serves {model[:100]!r} has as many turns waiting as it may",
            retry_after_s=min(r.queue.retry_after_s() for r in busy),
        )
    if model not in fleet.models and any(r.healthy for r in fleet):
        raise NotFound(
            f"the model {model[:100]!r} is not served here; served are: {', '.join(fleet.models) or 'none'}",
            code="model_not_found",
            param="model",
        )
    raise Unavailable(f"no replica that serves {model[:100]!r} can take the turn right now", retry_after_s=1.0)
