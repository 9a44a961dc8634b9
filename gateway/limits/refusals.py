"""What is said to somebody who is over a limit: which one, whose, how much, and when to come again."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from gateway.errors import Forbidden, GatewayError, RateLimited
from gateway.store.limit_records import Holder, TooManySessions

RETRY_S = 1.0  # after which a turn may have ended


@dataclass(frozen=True, slots=True)
class Refusal:
    """`limit`: its name, as it is set."""

    limit: str
    error: GatewayError


def requests(holder: Holder, limit: int, wait_s: float | None) -> Refusal:
    message = f"{whose(holder)} may send {limit} requests a minute"
    return _rate("requests_per_minute", holder, message, wait_s, limit=limit)


def tokens(holder: Holder, limit: int, used: int, requested: int, wait_s: float | None) -> Refusal:
    message = f"{whose(holder)} may use {limit} tokens a minute; {used} are used, and this turn may take {requested}"
    if wait_s is None:
        message += ": ask for a shorter answer, or send less"
    return _rate("tokens_per_minute", holder, message, wait_s, limit=limit, used=used, requested=requested)


def concurrent(holder: Holder, limit: int, running: int) -> Refusal:
    message = f"{whose(holder)} may have {limit} turns at once; {running} run"
    return _rate("concurrent_turns", holder, message, RETRY_S, limit=limit, used=running)


def month(holder: Holder, limit: int, used: int, requested: int, over_s: float) -> Refusal:
    message = f"{whose(holder)} may use {limit} tokens this month; {used} are used, and this turn may take {requested}"
    details = _details("month_tokens", holder, limit=limit, used=used, requested=requested)
    error = RateLimited(message, code="insufficient_quota", retry_after_s=over_s, details=details)
    return Refusal("month_tokens", error)


def stored(holder: Holder, limit: int, used: int) -> Refusal:
    message = f"{whose(holder)} may store {limit} bytes, and has {used}: delete sessions"
    details = _details("stored_bytes", holder, limit=limit, used=used)
    return Refusal("stored_bytes", Forbidden(message, code="storage_limit_exceeded", details=details))


def sessions(error: TooManySessions) -> Refusal:
    holder, limit = error.bound.holder, error.bound.most
    message = f"{whose(holder)} may have {limit} sessions, and has {error.stored}: delete some"
    details = _details("sessions", holder, limit=limit, used=error.stored)
    return Refusal("sessions", Forbidden(message, code="session_limit_exceeded", details=details))


def whose(holder: Holder) -> str:
    return f"key {holder.key_id}..." if holder.key_id else f"tenant {holder.tenant_id}"


def _rate(name: str, holder: Holder, message: str, wait_s: float | None, **numbers: int) -> Refusal:
    if wait_s is not None:
        message += f"; come again in {max(1, ceil(wait_s))} s"
    details = _details(name, holder, **numbers)
    return Refusal(name, RateLimited(message, retry_after_s=wait_s, details=details))


def _details(name: str, holder: Holder, **numbers: int) -> dict[str, object]:
    return {"name": name, "of": "key" if holder.key_id else "tenant", **numbers}
