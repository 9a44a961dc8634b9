"""How a turn ended, decided from what was read and why it stopped; and the write that keeps it. Plain functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from compression.conversation import Item, TurnStatus
from engines.contract import chain_digest
from gateway.errors import GatewayError
from gateway.fleet.chain import Chain, extend
from gateway.fleet.identity import ModelIdentity
from gateway.fleet.placement import Placement
from gateway.sessions.command import TurnCommand
from gateway.sessions.failures import as_event
from gateway.sessions.history import TAIL, History
from gateway.sessions.items import has_images, meaning, open_calls
from gateway.sessions.prepare import Prepared
from gateway.sessions.prompt import ID_BYTES, NO_MARKS
from gateway.sessions.reader import AnswerReader
from gateway.sessions.run import TurnRun
from gateway.store.records import FinishTurn, TurnTokens
from gateway.store.usage_records import Spender


@dataclass(frozen=True, slots=True)
class Outcome:
    """completed: the engine finished. incomplete: it was stopped, or lost under way; the partial answer stays and the
    session goes on from it. failed: the engine or the gateway failed. The same idempotency key runs again what failed,
    or was cut off by an engine's or the gateway's own end: that has no finish reason."""

    status: TurnStatus
    finish_reason: str | None
    output: tuple[Item, ...]
    error: Mapping[str, Any] | None = None

    @property
    def code(self) -> str | None:
        return str(self.error["code"]) if self.error is not None else None

    def failed(self, code: str, message: str) -> Outcome:
        error = {"type": "server_error", "code": code, "message": message}
        return replace(self, status="failed", finish_reason="error", error=error)


def outcome(run: TurnRun, reader: AnswerReader, error: GatewayError | None) -> Outcome:
    answer = reader.answer
    if error is not None and error.details.get("partial"):
        return Outcome("incomplete", None, answer.items(complete=False), as_event(error))
    if error is not None:
        return Outcome("failed", "error", answer.items(complete=False) if reader.started else (), as_event(error))
    if reader.finish is not None and reader.finish != "cancelled":
        cut = reader.finish == "length"
        return Outcome("completed", reader.finish_reason, answer.items(complete=not cut))
    reason = run.cancel_reason or "cancelled"
    output = answer.items(complete=False) if reader.started else ()
    if reason == "lease_lost":
        return Outcome("incomplete", "cancelled", output).failed(reason, "another gateway took this session over")
    told = {"type": "cancelled", "code": reason, "message": f"the turn was stopped: {reason.replace('_', ' ')}"}
    return Outcome("incomplete", None if reason == "gateway_shutdown" else "cancelled", output, told)


def as_failure(error: Exception) -> GatewayError:
    if isinstance(error, GatewayError):
        return error
    return GatewayError("the turn failed inside the gateway; the log has the reason under this turn's id")


def finish_turn(
    command: TurnCommand,
    history: History,
    prepared: Prepared,
    run: TurnRun,
    reader: AnswerReader,
    result: Outcome,
    placement: Placement,
    usage: Mapping[str, Any],
) -> FinishTurn:
    """Transaction 2. The head moves to a turn that holds an answer, complete or not; never to a failed one."""
    assert command.session_id is not None
    kept = command.ask.kept
    calls = open_calls((*kept, *result.output))
    answered = _answered(placement, history, command.ask.model)
    going_on = {**history.open_calls, **calls}
    marks = prepared.built.marks if prepared.built is not None else NO_MARKS
    for item in kept:
        if item.type == "function_call_output":
            going_on.pop(item.payload["call_id"], None)
    return FinishTurn(
        tenant_id=command.tenant_id,
        session_id=command.session_id,
        turn_id=run.turn_id,
        fence=run.fence,
        status=result.status,
        output=result.output,
        finish_reason=result.finish_reason,
        tokens=_tokens(prepared, reader) if result.status != "failed" else None,
        meaning=meaning(history.meaning(command.ask.system), (*kept, *result.output)),
        usage=usage,
        placement=placement.as_json(),
        prefix_report=prepared.built.report if prepared.built is not None else {},
        error=result.error,
        metadata={
            TAIL: {
                "open_calls": going_on,
                "reasoning": reader.answer.has_reasoning or (history.head.reasoning and _extends(prepared, history)),
                "foreign_end": _foreign_end(prepared, reader),
                "images": history.pictured or has_images(kept),
                **({"answered": {"fingerprint": answered.fingerprint}} if answered is not None else {}),
                **({"view": history.head.view} if history.head.view else {}),
                **({"marks": marks.as_json()} if marks != NO_MARKS else {}),
                **(
                    {"chain": extend(prepared.kept, reader.ids)[0].ended().as_text()}
                    if prepared.kept is not None
                    else {}
                ),
            }
        },
        spender=Spender(command.key_id, command.ask.model),
        move_head=command.move_head
        and (result.status == "completed" or (result.status == "incomplete" and bool(result.output))),
    )


def _answered(placement: Placement, history: History, model: str) -> ModelIdentity | None:
    """By whom the path is answered now: a fallback only stands in."""
    return history.answered(model) if placement.replica.fallback else ModelIdentity(placement.fingerprint)


def _chain(kept: Chain, answer: bytes) -> str:
    return extend(kept, answer)[0].ended().as_text()


def _extends(prepared: Prepared, history: History) -> bool:
    """Whether the turn went on from the ids of the path as they were, not from a new rendering."""
    return prepared.built is not None and prepared.built.base_tokens == history.head.path_tokens


def _foreign_end(prepared: Prepared, reader: AnswerReader) -> bool:
    if prepared.tokens is None:
        return False
    return prepared.tokens.tail(reader.id_list[-1:], path_tokens=0, digest=b"").foreign_end


def _tokens(prepared: Prepared, reader: AnswerReader) -> TurnTokens | None:
    built, tokens = prepared.built, prepared.tokens
    if built is None or tokens is None:
        return None
    output = reader.ids
    tail = tokens.tail(reader.id_list[-1:], path_tokens=0, digest=b"")
    return TurnTokens(
        fingerprint=built.fingerprint,
        base_tokens=built.base_tokens,
        prompt_ids=built.kept_ids,
        output_ids=output,
        path_tokens=built.kept_tokens + len(output) // ID_BYTES,
        path_digest=chain_digest(built.kept_digest, output),
        open_answer=tail.open_answer,
    )
