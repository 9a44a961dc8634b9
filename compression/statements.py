"""A conversation as a list of statements: who says what, one clause each, with the facts in it.

Messages come clause by clause; JSON of tools comes as `key: value` pairs, the key with the
name of the object it is in. Nothing is judged here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from compression.clauses import Clause, ClauseKind, clauses_of, num_words
from compression.conversation import Item, Turn
from compression.filler import trim
from compression.patterns import FactKind, spans
from compression.words import Term, Vocabulary, language_of

Role = Literal["user", "assistant", "tool", "call", "reasoning", "system", "summary"]
MAX_FIELDS = 400  # of one tool output; past it, only every n-th is read
MAX_VALUE_CHARS = 160  # of one JSON string before it is read as text
PASTED_CHARS = 1500  # of a user message; in a longer one, only what is in the first person is surely the user's own
SHORT_ANSWER_WORDS = 5  # so few words of a user are an answer to what the assistant asked last
HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")  # JSON may hold one, UTF-8 may not


_STAMP = re.compile(r"^\[?\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}[\d.,]*(?:Z|[+-]\d{2}:?\d{2})?\]?\s+", re.MULTILINE)


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


class Said(NamedTuple):
    """A clause and who says it, before it is read."""

    clause: Clause
    role: Role
    speaker: str
    subject: str = ""
    pasted: bool = False


class Reader:
    """Makes statements: finds their facts and terms, and numbers them."""

    def __init__(self, *, german: bool, chosen: bool = False) -> None:
        self.statements: list[Statement] = []
        self._german, self._chosen = german, chosen
        self._vocabulary = Vocabulary()

    def read(self, said: Said, turn_id: str, turn: int) -> None:
        clause, role, speaker, subject, pasted = said
        self.statements.append(
            Statement(
                clause.text,
                clause.kind,
                role,
                speaker,
                turn_id,
                turn,
                len(self.statements),
                clause.follows,
                subject,
                self._facts(clause),
                self._vocabulary.terms(clause.text),
                pasted,
                self._chosen,
            )
        )

    def _facts(self, clause: Clause) -> tuple[tuple[FactKind, str], ...]:
        text = clause.text.partition(": ")[2] if clause.kind == "field" else clause.text  # a key is no fact
        return tuple((span.kind, span.value) for span in spans(text, german=self._german))


def statements_of(turns: Sequence[Turn]) -> list[Statement]:
    """All statements in order. Never raises on odd payloads: what cannot be read as JSON is read as text."""
    reader = Reader(german=language_of(" ".join(_prose(turns))) == "de")
    calls: dict[str, tuple[str, str]] = {}
    asked = ""  # the end of what the assistant said last: a short answer needs its question
    for number, turn in enumerate(turns):
        for item in turn.items:
            for said in _of_item(item, calls, asked):
                reader.read(said, turn.id, number)
            if item.type == "message":
                asked = item.text[-400:] if item.role == "assistant" else ""
    return reader.statements


def _prose(turns: Sequence[Turn]) -> Iterator[str]:
    left = 6000
    for turn in turns:
        for item in turn.items:
            if item.type == "message" and left > 0:
                text = item.text[:600]
                left -= len(text)
                yield text


def _of_item(item: Item, calls: dict[str, tuple[str, str]], asked: str) -> Iterator[Said]:
    if item.type == "function_call":
        name = str(item.payload.get("name", "")) or "function"
        calls[str(item.payload.get("call_id", ""))] = (name, item.text)
        yield from _fields(item.text, "call", f"Call {name}", "")
    elif item.type == "function_call_output":
        name, arguments = calls.get(str(item.payload.get("call_id", "")), ("", ""))
        yield from _fields(item.text, "tool", f"Tool {name}".rstrip(), f"{name}({arguments})")
    elif item.type == "reasoning":
        yield from _clauses(item.text or _summary_text(item), "reasoning", "Reasoning")
    else:
        role: Role = item.role if item.role in ("user", "assistant") else "system"  # type: ignore[assignment]
        pasted = role == "user" and len(item.text) > PASTED_CHARS
        clauses = list(clauses_of(item.text))
        if role == "user" and _is_short_answer(clauses) and (question := _last_question(asked)):
            clauses = [Clause(f"{question.rstrip(' ?？')} - {clauses[0].text}", "statement", False)]
        for clause in clauses:
            yield Said(clause, role, role.capitalize(), "", pasted)


def _is_short_answer(clauses: Sequence[Clause]) -> bool:
    return len(clauses) == 1 and clauses[0].kind == "statement" and num_words(clauses[0].text) <= SHORT_ANSWER_WORDS


def _summary_text(item: Item) -> str:
    parts = item.payload.get("summary")
    if not isinstance(parts, list):
        return ""
    return " ".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _clauses(text: str, role: Role, speaker: str) -> Iterator[Said]:
    if role == "tool":
        text = _STAMP.sub("", text)
    for clause in clauses_of(text):
        yield Said(clause, role, speaker)


def _last_question(text: str) -> str:
    clauses = list(clauses_of(text))
    last = clauses[-1] if clauses else None
    return last.text if last is not None and last.kind == "question" and num_words(last.text) <= 14 else ""


def _fields(text: str, role: Role, speaker: str, subject: str) -> Iterator[Said]:
    """A tool's arguments or output: its JSON leaf by leaf, or its text clause by clause."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        yield from _clauses(text, role, speaker)
        return
    if isinstance(value, str) or not isinstance(value, dict | list):
        yield from _clauses(_scalar(value), role, speaker)
        return
    pairs = list(_leaves(value, (), 0))
    step = max(1, len(pairs) // MAX_FIELDS)
    for path, leaf in pairs[::step]:
        named = [part for part in path if not part.isdigit()]
        if len(leaf) > MAX_VALUE_CHARS:
            yield from _clauses(leaf, role, speaker)
        else:
            text = f"{'.'.join(named[-2:]) or 'value'}: {trim(leaf) or leaf}"
            yield Said(Clause(text, "field", False), role, speaker, f"{subject}{path}" if subject else "")


def _leaves(value: object, path: tuple[str, ...], depth: int) -> Iterator[tuple[tuple[str, ...], str]]:
    if depth > 12:
        return
    if isinstance(value, dict):
        scalars_first = sorted(value.items(), key=lambda pair: isinstance(pair[1], dict | list))
        for key, inner in scalars_first:
            yield from _leaves(inner, (*path, _scalar(key)), depth + 1)
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
    if not isinstance(value, str):
        return str(value)
    return value if value.isascii() else HALF_OF_A_PAIR.sub("\ufffd", value)
