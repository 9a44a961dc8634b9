"""Chooses a replica for a turn: who can take it, and of those the cheapest.

Knows no HTTP, no store and no clock but the moment it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gateway.fleet.cost import Candidate, Choice, Reason, cheapest, over_bound
from gateway.fleet.eligible import eligible
from gateway.fleet.identity import ModelIdentity
from gateway.fleet.outlook import Outlook, Path
from gateway.fleet.replica import Replica


@dataclass(frozen=True, slots=True)
class Pin:
    """The replica that ran a session's last turn, which life of it, and when (seconds since 1970)."""

    replica: str
    epoch: str | None
    used_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """`costs`: of each replica that could have taken it, in tokens; none where it stays with its pin.

    `fingerprint`: of the model there, now; `changed_from`: who answered the path so far, where that is another.
    """

    replica: Replica
    reason: Reason
    expected_cached_tokens: int
    costs: Mapping[str, int] = field(default_factory=dict)
    fingerprint: str | None = None
    changed_from: ModelIdentity | None = None

    @property
    def epoch(self) -> str | None:
        """Changes when the replica restarts: what it had cached is gone then."""
        return self.replica.capabilities.epoch if self.replica.capabilities is not None else None

    def as_json(self) -> dict[str, object]:
        return {
            "replica": self.replica.name,
            "reason": self.reason,
            "expected_cached_tokens": self.expected_cached_tokens,
            "epoch": self.epoch,
            "costs": dict(self.costs),
            "fingerprint": self.fingerprint,
            **(
                {"model_changed": {"from": self.changed_from.fingerprint, "to": self.fingerprint}}
                if self.changed_from is not None
                else {}
            ),
            **self.replica.marks(),
        }


def choose(
    replicas: Sequence[Replica],
    *,
    model: str,
    pin: Pin | None,
    path: Path,
    outlook: Outlook,
    now: float,
    at: float,
    key: bytes = b"",
    tried: Collection[str] = (),
    answered: ModelIdentity | None = None,
    suits: Callable[[Replica], bool] | None = None,
) -> Placement | None:
    """The pinned replica where it can take the turn and is not over its bound, else the cheapest; None: nobody can.

    `now`: of the replicas' clock, `at`: seconds since 1970. `path`: the prompt, or the session's path where the prompt
    is not made yet. `key`: names the session, for the ring. `answered`: by whom the path was answered so far; where
    nobody serves that model, another one under the name takes it. `suits`: who can do what is asked.
    """
    fit = eligible(replicas, model=model, now=now, tried=tried, answered=answered)
    home = next((r for r in fit if pin is not None and r.name == pin.replica), None)
    outgrown = home is not None and suits is not None and not suits(home)
    if home is not None and not outgrown and _stays(home, fit, path, outlook, at):
        choice = Choice(home.name, "pinned", round(_cached(home, pin, path, outlook, at)), {})
    else:
        able = fit if suits is None else [r for r in fit if suits(r)] or fit
        found = cheapest(
            [_candidate(r, pin, path, outlook, at) for r in able],
            prompt_tokens=path.num_tokens,
            key=key,
            ring=outlook.ring(r.name for r in replicas if r.serves(model)),
            pin=pin.replica if pin is not None else None,
        )
        if found is None:
            return None
        choice = found
    chosen = next(r for r in fit if r.name == choice.name)
    fingerprint = chosen.fingerprint(model)
    changed = answered if not chosen.fallback and answered not in (None, ModelIdentity(fingerprint)) else None
    reason: Reason = "pin_unfit" if outgrown and chosen is not home else choice.reason
    if chosen.fallback:
        reason = "fallback"
    elif tried:
        reason = "failover"
    elif changed is not None:
        reason = "model_changed"
    return Placement(chosen, reason, choice.cached, choice.costs, fingerprint, changed)


def _stays(home: Replica, fit: Sequence[Replica], path: Path, outlook: Outlook, at: float) -> bool:
    """Whether the pin holds, found out without a price: most turns of a session end here."""
    given = _given(home, outlook, at)
    if given <= path.num_tokens:
        return True
    return not over_bound(given, sum(_given(r, outlook, at) for r in fit) / len(fit), path.num_tokens)


def _given(replica: Replica, outlook: Outlook, at: float) -> float:
    """Tokens of work that it was lately given, or that wait for it in this gateway."""
    return outlook.recent(replica.name, at) + replica.queued_tokens


def _candidate(replica: Replica, pin: Pin | None, path: Path, outlook: Outlook, at: float) -> Candidate:
    found = outlook.candidate(replica.name, path, at, home=_home(replica, pin))
    waiting = replica.load.waiting * outlook.output_tokens(replica.name)  # of other gateways, too: requests, not tokens
    return replace(
        found,
        cached=_cached(replica, pin, path, outlook, at, found.cached),
        queued=found.queued + waiting + replica.queued_tokens,
        recent=found.recent + replica.queued_tokens,
    )


def _cached(
    replica: Replica, pin: Pin | None, path: Path, outlook: Outlook, at: float, known: float | None = None
) -> float:
    """Tokens of the prompt that it is believed to hold. `known`: as the outlook told.

    At home that is all of the path, where its feed may not have told of it yet.
    """
    home = _home(replica, pin)
    found = outlook.cached(replica.name, path, at, home=home) if known is None else known
    told = found or (outlook.tells(replica.name) and path.base.chunks)
    if not home or pin is None or (told and not outlook.awaited(replica.name, pin.used_at, at)):
        return found
    return max(found, outlook.right(replica.name) * path.base_tokens)  # all there is, is that it ran there


def _home(replica: Replica, pin: Pin | None) -> bool:
    """It ran the session's last turn in this life."""
    caps = replica.capabilities
    return pin is not None and pin.replica == replica.name and caps is not None and caps.epoch == pin.epoch
