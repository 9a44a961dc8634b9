"""Reads a session from exported JSON lines. Every line is checked before anything of it is used; knows no store.

{"object": "session", "format": 1, …}
{"object": "turn", "id", "parent_id", "seq", "status", "input": [items], "output": [items], "usage", …}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compression.conversation import Item, Turn, TurnStatus
from gateway.api.body import parse_object
from gateway.errors import BadRequest
from gateway.sessions.items import check_pairs, open_calls, parse_items

FORMAT = 1
STATUS: dict[str, TurnStatus] = {
    "completed": "completed",
    "incomplete": "incomplete",
    "failed": "failed",
    "in_progress": "incomplete",
}
HEAD_FIELDS = {"object", "format", "id", "model", "system", "tools", "title", "user_ref", "metadata", "policy"}
HEAD_FIELDS |= {"head_turn_id", "created_at"}
TURN_FIELDS = {"object", "id", "parent_id", "seq", "status", "model", "finish_reason", "input", "output", "usage"}
TURN_FIELDS |= {"created_at", "pinned"}
COUNTS = ("prompt_tokens", "output_tokens", "cached_tokens")
MAX_TURNS = 10_000


@dataclass(frozen=True, slots=True)
class ImportedTurn:
    id: str
    parent_id: str | None
    status: TurnStatus
    model: str
    finish_reason: str | None
    input: tuple[Item, ...]
    output: tuple[Item, ...]
    usage: Mapping[str, Any]
    open_calls: Mapping[str, str]
    pinned: bool = False

    def standing(self) -> Turn:
        """As compaction sees it; its place in the file is its place in the tree."""
        return Turn(self.id, self.parent_id, 0, self.status, self.input, self.output)


def parse_lines(body: bytes) -> tuple[dict[str, Any], list[ImportedTurn], int]:
    """The session, its turns, and how many compactions are passed over: a file's summaries are not trusted, and are
    made anew when needed. Every line is checked. Raises BadRequest or Unprocessable that names the line."""
    lines = [line for line in body.split(b"\n") if line.strip()]
    if not lines:
        raise BadRequest("the body holds no lines", code="invalid_import")
    head = parse_object(lines[0])
    if head.get("object") != "session" or head.get("format") != FORMAT:
        raise BadRequest(f'line 1 must be the session, with "format": {FORMAT}', code="invalid_import")
    _check_fields(head, HEAD_FIELDS, "line 1")
    if len(lines) > MAX_TURNS + 1:
        raise BadRequest(f"the file has {len(lines) - 1} turns of at most {MAX_TURNS}", code="invalid_import")
    known: dict[str, ImportedTurn] = {}
    left_out = 0
    for number, line in enumerate(lines[1:], 2):
        raw = parse_object(line)
        if raw.get("object") == "compaction":
            left_out += 1
            continue
        turn = _parse_turn(raw, known, number, str(head.get("model")))
        known[turn.id] = turn
    last = head.get("head_turn_id")
    if last is not None and (not isinstance(last, str) or last not in known):
        raise BadRequest("line 1: head_turn_id names no turn of this file", code="invalid_import")
    return head, list(known.values()), left_out


def _parse_turn(raw: Mapping[str, Any], known: Mapping[str, ImportedTurn], number: int, model: str) -> ImportedTurn:
    where = f"line {number}"
    turn_id, parent_id = raw.get("id"), raw.get("parent_id")
    _check_fields(raw, TURN_FIELDS, where)
    if raw.get("object") != "turn" or not isinstance(turn_id, str) or not turn_id or turn_id in known:
        raise BadRequest(f"{where} must be a turn with an id of its own", code="invalid_import")
    if parent_id is not None and (not isinstance(parent_id, str) or parent_id not in known):
        raise BadRequest(f"{where}: parent_id names no earlier turn", code="invalid_import")
    status = STATUS.get(str(raw.get("status")))
    if status is None:
        raise BadRequest(f"{where}: status is completed, incomplete or failed", code="invalid_import")
    given = tuple(parse_items(raw.get("input"), param=f"{where}.input"))
    if not isinstance(raw.get("output"), list | None):
        raise BadRequest(f"{where}: output is a list of items", code="invalid_import")
    output = tuple(parse_items(raw["output"], param=f"{where}.output")) if raw.get("output") else ()
    if not isinstance(raw.get("pinned"), bool | None):
        raise BadRequest(f"{where}: pinned is true or false", code="invalid_import")
    if not isinstance(raw.get("model"), str | None):
        raise BadRequest(f"{where}: model is a string", code="invalid_import")
    waiting = dict(known[parent_id].open_calls) if parent_id is not None else {}
    check_pairs(waiting, given, param=f"{where}.input")
    answered = {item.payload["call_id"] for item in given if item.type == "function_call_output"}
    calls = {**{k: v for k, v in waiting.items() if k not in answered}, **open_calls((*given, *output))}
    usage = raw.get("usage")
    reason = raw.get("finish_reason")
    return ImportedTurn(
        turn_id,
        parent_id,
        status,
        (raw.get("model") or model)[:256],
        reason[:64] if isinstance(reason, str) else None,
        given,
        output,
        _usage(usage) if isinstance(usage, dict) else {},
        calls,
        raw.get("pinned") is True,
    )


def _check_fields(raw: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := next((name for name in raw if name not in known), None):
        shown = unknown[:64]
        raise BadRequest(f"{where}: {shown} is not a field here", code="unknown_field", param=shown)


def _usage(raw: Mapping[str, Any]) -> dict[str, int]:
    """The token counts among what the file says; other words are not ours."""
    return {name: value for name in COUNTS if type(value := raw.get(name)) is int and 0 <= value < 2**53}
