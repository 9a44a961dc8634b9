"""How much a replica reads, and how much the replicas that a session may go to do. Plain functions.

A session's budget is the largest window that it may go to: nothing is taken out of a conversation while some replica
can hold it whole. A turn goes to replicas that it fits; where only smaller ones are left, it is made to fit them.
"""

from __future__ import annotations

from gateway.fleet.eligible import of_one_model
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.sessions.history import History
from gateway.sessions.models import Models


def window_at(model: str, replica: Replica, models: Models) -> int | None:
    """Tokens of prompt and answer that the model takes there; None: nobody knows."""
    told = replica.capabilities.window if replica.capabilities is not None else None
    tokens = models.by_ids(model, replica)
    return told if tokens is None else min(tokens.window, told or tokens.window)


def window_of(model: str, fleet: Fleet, models: Models, history: History | None = None) -> int | None:
    """The largest window of the eligible set: replicas that serve the model, and of them those that answered `history`,
    neither drained nor fallbacks while there are others. One that does not answer now still counts: it comes back."""
    serving = [r for r in fleet if r.serves(model)]
    eligible = [r for r in serving if not r.draining] or serving
    eligible = [r for r in eligible if not r.fallback] or eligible
    eligible = of_one_model(eligible, model, history.answered(model) if history is not None else None)
    known = [window for r in eligible if (window := window_at(model, r, models)) is not None]
    if known:
        return max(known)
    tokens = models.tokens(model)
    return tokens.window if tokens is not None else None
