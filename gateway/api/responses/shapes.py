"""A turn as the response it is, while it runs and when it has ended. Plain functions over plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from compression.conversation import Item
from gateway.api.responses.ids import named_output
from gateway.api.responses.items import shown
from gateway.sessions.history import TAIL
from gateway.sessions.replay import metadata_of
from gateway.sessions.run import TurnEnded, TurnStarted
from gateway.sessions.terms import RESPONSE
from gateway.store.records import TurnRecord

# OpenAI's codes of a failed response; what is more exact stands in `type`.
ERROR_CODES = {"rate_limit_exceeded": "rate_limit_exceeded", "queue_full": "rate_limit_exceeded"}
LENGTH = {"reason": "max_output_tokens"}


@dataclass(frozen=True, slots=True)
class Standing:
    """A response as far as it has come. `status`, `finish_reason`: the turn's."""

    id: str
    turn_id: str
    session_id: str | None
    model: str
    created_at: float
    status: str = "in_progress"
    finish_reason: str | None = None
    completed_at: float | None = None
    output: tuple[Item, ...] = ()
    usage: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None

    @property
    def asked(self) -> Mapping[str, Any]:
        """What it was asked with."""
        found: Mapping[str, Any] = self.metadata.get(RESPONSE) or {}
        return found


def of_record(response_id: str, record: TurnRecord) -> Standing:
    turn = record.turn
    return Standing(
        response_id,
        turn.id,
        record.session_id,
        record.model,
        record.created_at,
        turn.status,
        record.finish_reason,
        record.completed_at,
        turn.output,
        record.usage,
        metadata_of(record),
        record.error,
    )


def of_started(response_id: str, event: TurnStarted) -> Standing:
    return Standing(
        response_id, event.turn_id, event.session_id, event.model, event.created_at, metadata=event.metadata
    )


def of_ended(begun: Standing, event: TurnEnded, now: float) -> Standing:
    """`begun`, as it ended; what was asked is told with the start."""
    return Standing(
        begun.id,
        begun.turn_id,
        begun.session_id,
        begun.model,
        begun.created_at,
        event.status,
        event.finish_reason,
        now,
        event.output,
        event.usage,
        {RESPONSE: begun.asked, **event.metadata},
        event.error,
    )


def status_of(status: str, finish_reason: str | None) -> str:
    """The response's, of the turn's: what was cut off by no wish of anybody's has failed."""
    if status == "completed":
        return "incomplete" if finish_reason in ("length", "content_filter") else "completed"
    if status == "incomplete":
        return "cancelled" if finish_reason == "cancelled" else "failed"
    return status


def response_json(
    standing: Standing,
    *,
    count: Callable[[str], int] | None = None,
    logprobs: list[dict[str, Any]] | None = None,
    seal: Callable[[Mapping[str, Any]], str] | None = None,
) -> dict[str, Any]:
    """`count`: tokens of a text, where the model's tokenizer is known; `seal`: of a reasoning item, where it is asked
    for."""
    asked, status = standing.asked, status_of(standing.status, standing.finish_reason)
    conversation = asked.get("conversation")
    told = {name: value for name, value in asked.items() if name not in ("conversation", "include")}
    return {
        "instructions": None,
        "previous_response_id": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "store": True,
        **told,
        "id": standing.id,
        "object": "response",
        "created_at": int(standing.created_at),
        "completed_at": int(standing.completed_at) if standing.completed_at and status == "completed" else None,
        "status": status,
        "error": _error(standing) if status == "failed" else None,
        "incomplete_details": _incomplete(standing) if status == "incomplete" else None,
        "model": standing.model,
        "output": output_json(standing, logprobs=logprobs, seal=seal),
        "usage": usage_json(standing, count) if standing.status != "in_progress" else None,
        "conversation": {"id": conversation} if conversation is not None else None,
        "service_tier": "default",
        "turnkeep": _turnkeep(standing),
    }


def output_json(
    standing: Standing,
    *,
    logprobs: list[dict[str, Any]] | None = None,
    seal: Callable[[Mapping[str, Any]], str] | None = None,
) -> list[dict[str, Any]]:
    cut = status_of(standing.status, standing.finish_reason) != "completed"
    out = []
    for item_id, item in named_output(standing.turn_id, standing.output):
        told = shown(item_id, item, status="incomplete" if cut and item is standing.output[-1] else "completed")
        if item.type == "reasoning" and seal is not None:
            told["encrypted_content"] = seal(told)
        if item.type == "message" and logprobs and told["content"]:
            told["content"][0] = {**told["content"][0], "logprobs": logprobs}
        out.append(told)
    return out


def usage_json(standing: Standing, count: Callable[[str], int] | None = None) -> dict[str, Any]:
    """`cached_tokens` is 0 where the engine does not say; `cache_write_tokens`: those it read and now holds."""
    usage = standing.usage
    given, output = int(usage.get("prompt_tokens") or 0), int(usage.get("output_tokens") or 0)
    cached = usage.get("cached_tokens")
    thought = "".join(item.text for item in standing.output if item.type == "reasoning")
    reasoning = min(output, count(thought)) if thought and count is not None else 0
    return {
        "input_tokens": given,
        "input_tokens_details": {
            "cached_tokens": cached or 0,
            "cache_write_tokens": max(0, given - cached) if cached is not None else 0,
        },
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": given + output,
    }


def _incomplete(standing: Standing) -> dict[str, Any]:
    return {"reason": "content_filter"} if standing.finish_reason == "content_filter" else dict(LENGTH)


def _error(standing: Standing) -> dict[str, Any]:
    error = standing.error or {}
    code = str(error.get("code") or "turn_lost")
    message = str(error.get("message") or "the gateway that ran it was lost")
    return {"code": ERROR_CODES.get(code, "server_error"), "type": code, "message": message}


def _turnkeep(standing: Standing) -> dict[str, Any]:
    told = {name: value for name, value in standing.metadata.items() if name not in (RESPONSE, TAIL)}
    return {"session_id": standing.session_id, "turn_id": standing.turn_id, **told}
