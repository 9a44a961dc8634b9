"""A conversation as a list of statements: who says what, one clause each, with the facts in it.

Messages come clause by clause; JSON of tools comes as `key: value` pairs, the key with the
name of the object it is in. Nothing is judged here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from compression.clauses import Clause, ClauseKind, clauses_of, num_words, trim
from compression.conversation import Item, Turn
from compression.patterns import FactKind, spans
from compression.words import Term, Vocabulary, language_of

Role = Literal["user", "assistant", "tool", "call", "reasoning", "system", "summary"]
MAX_FIELDS = 400  # of one tool output; past it, only every n-th is read
MAX_VALUE_CHARS = 160  # of one JSON string before it is read as text
PASTED_CHARS = 1500  # of a user message; in a longer one, only what is in the first person is surely the user's own
MAX_LINE_CHARS = 4000  # of one message that is a single "sentence": base64, minified code


@dataclass(frozen=True, slots=True)
class Statement:
    text: str
    kind: ClauseKind
    role: Role
    speaker: str  # "User", "Assistant", "Tool get_order", "Call get_order", …
    turn_id: str
    turn: int  # index of the turn within what was read
    index: int  # among all statements
    follows: bool = False  # continues the sentence before it
    subject: str = ""  # of a JSON field: tool, arguments and path: the same subject later has a newer value
    facts: tuple[tuple[FactKind, str], ...] = ()
    terms: tuple[Term, ...] = ()
    pasted: bool = False  # in a message so long that much of it is somebody else's text
    chosen: bool = False  # stands in an older summary: somebody chose it already


class Reader:
    """Finds the facts and terms of statements."""

    def __init__(self, *, german: bool) -> None:
        self._german = german
        self._vocabulary = Vocabulary()

    def __call__(self, statement: Statement) -> Statement:
        facts = tuple((span.kind, span.value) for span in spans(statement.text, german=self._german))
        return replace(statement, facts=facts, terms=self._vocabulary.terms(statement.text))


def statements_of(turns: Sequence[Turn]) -> list[Statement]:
    """All statements in order. Never raises on odd payloads: what cannot be read as JSON is read as text."""
    found: list[Statement] = []
    read = Reader(german=language_of(" ".join(_prose(turns))) == "de")
    calls: dict[str, tuple[str, str]] = {}
    asked = ""
    for number, turn in enumerate(turns):
        for item in turn.items:
            for statement in _of_item(item, calls, asked):
                found.append(read(replace(statement, turn_id=turn.id, turn=number, index=len(found))))
            if item.type == "message":
                asked = _last_question(item) if item.role == "assistant" else ""
    return found


def _prose(turns: Sequence[Turn]) -> Iterator[str]:
    left = 6000
    for turn in turns:
        for item in turn.items:
            if item.type == "message" and left > 0:
                text = item.text[:600]
                left -= len(text)
                yield text


def _of_item(item: Item, calls: dict[str, tuple[str, str]], asked: str) -> Iterator[Statement]:
    if item.type == "function_call":
        name = str(item.payload.get("name", "")) or "function"
        calls[str(item.payload.get("call_id", ""))] = (name, item.text)
        yield from _fields(item.text, "call", f"Call {name}", "")
    elif item.type == "function_call_output":
        name, arguments = calls.get(str(item.payload.get("call_id", "")), ("", ""))
        yield from _fields(item.text, "tool", f"Tool {name}".rstrip(), f"{name}({arguments})")
    elif item.type == "reasoning":
        text = item.text or _summary_text(item)
        yield from _clauses(text, "reasoning", "Reasoning")
    else:
        role: Role = item.role if item.role in ("user", "assistant") else "system"  # type: ignore[assignment]
        clauses = list(_read(item.text))
        if (
            role == "user"
            and asked
            and len(clauses) == 1
            and num_words(clauses[0].text) <= 5
            and clauses[0].kind == "statement"
        ):
            clauses = [Clause(f"{asked.rstrip(' ?？')} - {clauses[0].text}", "statement", False)]
        pasted = role == "user" and len(item.text) > PASTED_CHARS
        for clause in clauses:
            yield replace(_statement(clause, role, role.capitalize()), pasted=pasted)


def _summary_text(item: Item) -> str:
    parts = item.payload.get("summary")
    return (
        " ".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        if isinstance(parts, list)
        else ""
    )


def _read(text: str) -> Iterator[Clause]:
    for clause in clauses_of(text):
        yield (
            clause
            if len(clause.text) <= MAX_LINE_CHARS
            else Clause(clause.text[:MAX_LINE_CHARS], clause.kind, clause.follows)
        )


def _clauses(text: str, role: Role, speaker: str) -> Iterator[Statement]:
    for clause in _read(text):
        yield _statement(clause, role, speaker)


def _statement(clause: Clause, role: Role, speaker: str, subject: str = "") -> Statement:
    return Statement(clause.text, clause.kind, role, speaker, "", 0, 0, clause.follows, subject)


def _last_question(item: Item) -> str:
    clauses = list(clauses_of(item.text[-400:]))
    last = clauses[-1] if clauses else None
    return last.text if last is not None and last.kind == "question" and num_words(last.text) <= 14 else ""


def _fields(text: str, role: Role, speaker: str, subject: str) -> Iterator[Statement]:
    """A tool's arguments or output: its JSON leaf by leaf, or its text clause by clause."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        yield from _clauses(text, role, speaker)
        return
    if isinstance(value, str) or not isinstance(value, dict | list):
        yield from _clauses(str(value), role, speaker)
        return
    pairs = list(_leaves(value, (), 0))
    step = max(1, len(pairs) // MAX_FIELDS)
    for path, leaf in pairs[::step]:
        named = [part for part in path if not part.isdigit()]
        if len(leaf) > MAX_VALUE_CHARS:
            yield from _clauses(leaf, role, speaker)
        else:
            text = f"{'.'.join(named[-2:]) or 'value'}: {trim(leaf) or leaf}"
            yield _statement(Clause(text, "field", False), role, speaker, f"{subject}{path}" if subject else "")


def _leaves(value: object, path: tuple[str, ...], depth: int) -> Iterator[tuple[tuple[str, ...], str]]:
    if depth > 12:
        return
    if isinstance(value, dict):
        scalars_first = sorted(value.items(), key=lambda pair: isinstance(pair[1], dict | list))
        for key, inner in scalars_first:
            yield from _leaves(inner, (*path, str(key)), depth + 1)
    elif isinstance(value, list):
        if value and not any(isinstance(inner, dict | list) for inner in value):
            yield path, ", ".join(map(_scalar, value))
            return
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*path, str(number)), depth + 1)
    elif value is not None and value != "":
        yield path, _scalar(value)


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else str(value)
