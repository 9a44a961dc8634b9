"""Translates what engines and the store raise into what clients are told. The one edge between the trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from engines.contract import (
    ContextOverflow,
    EngineBroken,
    EngineError,
    EngineLost,
    EngineOverloaded,
    EngineTimeout,
    EngineUnreachable,
    RequestRefused,
)
from gateway.errors import (
    BadRequest,
    ContextTooLong,
    GatewayError,
    QueueRefused,
    RateLimited,
    Unavailable,
    UpstreamFailed,
    UpstreamTimeout,
)
from gateway.fleet.queue import QueueFull, QueueTimeout
from gateway.store.records import StoreUnavailable

log = structlog.get_logger(__name__)


def from_store(error: StoreUnavailable) -> Unavailable:
    """What is told of a database that is away; why it is stands in the log."""
    log.warning("the database did not answer", reason=str(error)[:200])
    return Unavailable("the database does not answer", code="database_unavailable", retry_after_s=1.0)


def from_engine(error: EngineError) -> GatewayError:
    text = str(error)
    if isinstance(error, ContextOverflow):
        return ContextTooLong(text, param="messages", details={"limit": error.limit, "requested": error.requested})
    if isinstance(error, RequestRefused):
        return BadRequest(text, code=error.code, param=error.param)
    if isinstance(error, QueueFull):
        return QueueRefused(text, retry_after_s=error.retry_after_s)
    if isinstance(error, QueueTimeout):
        return QueueRefused(text, code="queue_timeout", status=503, retry_after_s=error.retry_after_s)
    if isinstance(error, EngineOverloaded) and error.limited:
        return RateLimited(text, retry_after_s=error.retry_after_s or 1.0)
    if isinstance(error, EngineOverloaded):
        return Unavailable(text, code="overloaded", retry_after_s=error.retry_after_s or 1.0)
    if isinstance(error, EngineTimeout):
        return UpstreamTimeout(f"the engine did not answer in time ({error.stage}): {text}")
    if isinstance(error, EngineUnreachable):
        return Unavailable(f"the engine cannot be reached: {text}", code="upstream_unreachable", retry_after_s=1.0)
    if isinstance(error, EngineLost):
        return UpstreamFailed(f"the engine was lost in the middle of its answer: {text}", code="upstream_lost")
    if isinstance(error, EngineBroken):
        return UpstreamFailed(f"the engine broke its protocol: {text}", code="upstream_broken")
    return UpstreamFailed(text)


def broken_off(error: EngineError, why: Sequence[str] = ()) -> GatewayError:
    """For an answer that was under way and goes on nowhere; `why` not. What came of it is told and kept."""
    told: dict[str, object] = {"partial": True}
    if isinstance(error, EngineTimeout) and error.stage == "total":
        return UpstreamTimeout(f"the answer took longer than it may: {error}", details=told)
    reasons = "".join(f"; {reason}" for reason in why)
    message = f"the engine was lost in the middle of its answer: {error}{reasons}"
    return UpstreamFailed(message, code="upstream_lost", details=told)


def as_event(error: GatewayError) -> Mapping[str, Any]:
    """The error as the terminal event of a turn carries it."""
    told: dict[str, Any] = {"type": error.type, "code": error.code, "message": error.message}
    if error.param is not None:
        told["param"] = error.param
    if error.details.get("partial"):
        told["partial"] = True
    return told


def numbers_of(error: ContextTooLong) -> tuple[int, int | None]:
    """Tokens of the prompt (0: it was not said), and the window that it does not fit."""
    prompt_tokens, limit = error.details.get("prompt_tokens"), error.details.get("limit")
    return (prompt_tokens if isinstance(prompt_tokens, int) else 0), (limit if isinstance(limit, int) else None)


def overflow(*, prompt_tokens: int, window: int, asked: int | None, param: str = "messages") -> ContextTooLong:
    """The prompt alone fills the window: said with the numbers, in OpenAI's words, before anything is saved."""
    answer = f" and {asked} were asked for the answer" if asked is not None else ""
    return ContextTooLong(
        f"This model's maximum context length is {window} tokens. However, your messages resulted in "
        f"{prompt_tokens} tokens{answer}. Please reduce the length of the messages.",
        param=param,
        details={"limit": window, "requested": prompt_tokens + (asked or 0), "prompt_tokens": prompt_tokens},
    )
