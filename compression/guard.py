"""The facts of a conversation that must survive compaction, and the ledger that a summary is held against.

A fact is a value (a number, a name, a path …) with the shortest clause that says it. A value that a later statement
changed is marked; the ledger carries only what still holds. Works by rules: what they see is in `patterns.py`, what
they cannot see (preferences, relations in plain words) is the business of `extract.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from compression.change import Changes, superseded
from compression.conversation import Turn
from compression.patterns import FactKind
from compression.statements import Role, Statement, statements_of
from compression.words import is_cjk, normalise

__all__ = ["Fact", "FactKind", "Ledger", "facts_in", "facts_of"]

KIND_WEIGHT: dict[FactKind, float] = {
    "identifier": 5.0,
    "url": 4.5,
    "email": 5.0,
    "path": 5.0,
    "phone": 5.0,
    "version": 3.5,
    "date": 4.6,
    "time": 2.5,
    "money": 3.0,
    "measure": 3.0,
    "number": 2.2,
    "quoted": 2.6,
    "name": 1.8,
}
ROLE_WEIGHT: dict[Role, float] = {
    "user": 1.0,
    "summary": 1.0,
    "system": 0.8,
    "tool": 0.7,
    "call": 0.5,
    "assistant": 0.35,
    "reasoning": 0.1,
}


@dataclass(frozen=True, slots=True)
class Fact:
    """`clause` is the shortest self-contained clause that says the value; `superseded_by` the clause that "
    "changed it."""

    kind: FactKind
    value: str
    clause: str
    turn_id: str
    role: str
    superseded_by: str | None = None
    speaker: str = ""

    @property
    def weight(self) -> float:
        """How much a reader would miss it: by kind, and by who said it."""
        return KIND_WEIGHT[self.kind] * ROLE_WEIGHT.get(self.role, 0.5)  # type: ignore[call-overload, no-any-return]


def facts_of(turns: Sequence[Turn]) -> tuple[Fact, ...]:
    """All facts in order, each value once for each clause; changed values are marked, not left out."""
    return facts_in(statements_of(turns))


def facts_in(statements: Sequence[Statement], changed: Changes | None = None) -> tuple[Fact, ...]:
    """The same from statements; `changed`: what `superseded` found in them, where it was asked already."""
    changed = superseded(statements) if changed is None else changed
    found: list[Fact] = []
    for statement in statements:
        for kind, value in statement.facts:
            later = changed.get((statement.index, value))
            by = statements[later].text if later is not None else None
            found.append(Fact(kind, value, statement.text, statement.turn_id, statement.role, by, statement.speaker))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The facts that still hold, each value once (where a user and the assistant both say it, the user's clause)."""

    facts: tuple[Fact, ...]
    _values: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        best: dict[str, Fact] = {}
        for fact in self.facts:
            value = normalise(fact.value)
            if fact.superseded_by is not None or not value:
                continue
            if value not in best or fact.weight > best[value].weight:
                best[value] = fact
        object.__setattr__(self, "facts", tuple(best.values()))
        object.__setattr__(self, "_values", tuple(best))

    def missing(self, text: str) -> tuple[Fact, ...]:
        """The facts whose value does not stand in the text, compared after normalisation."""
        there = Haystack(text)
        return tuple(fact for fact, value in zip(self.facts, self._values, strict=True) if not there.has(value))

    def kept(self, text: str) -> tuple[Fact, ...]:
        there = Haystack(text)
        return tuple(fact for fact, value in zip(self.facts, self._values, strict=True) if there.has(value))

    def lines(self, limit: int | None = None) -> tuple[str, ...]:
        """One line for each clause, in order, "User: …"; `limit` keeps the weightiest."""
        by_clause: dict[tuple[str, str], float] = defaultdict(float)
        for fact in self.facts:
            by_clause[(fact.speaker or fact.role.capitalize(), fact.clause)] += fact.weight
        chosen: Iterable[tuple[str, str]] = by_clause
        if limit is not None and limit < len(by_clause):
            best = set(sorted(by_clause, key=lambda key: -by_clause[key])[: max(0, limit)])
            chosen = [key for key in by_clause if key in best]
        return tuple(f"{speaker}: {clause}" for speaker, clause in chosen)


class Haystack:
    """A text prepared for asking whether values stand in it as whole words (in CJK text: anywhere)."""

    def __init__(self, text: str) -> None:
        self._text = normalise(text)

    def has(self, value: str) -> bool:
        """`value` is normalised. "30" does not stand in "1300", nor in "30.5"; it does in "30 minutes"."""
        start = self._text.find(value)
        while start >= 0:
            end = start + len(value)
            if _edge(self._text, start - 1, value[0], -1) and _edge(self._text, end, value[-1], 1):
                return True
            start = self._text.find(value, start + 1)
        return False


def _edge(text: str, at: int, own: str, step: int) -> bool:
    """Whether a value may begin or end here: its neighbour is not part of the same word or number."""
    if at < 0 or at >= len(text):
        return True
    other = text[at]
    if own.isdigit() and other in ".," and 0 <= at + step < len(text) and text[at + step].isdigit():
        return False
    if not (own.isalnum() and other.isalnum()):
        return True
    if is_cjk(own) or is_cjk(other):
        return True
    return (
        own.isdigit() != other.isdigit()
        and bool(re.match(r"[a-z]", other if own.isdigit() else own))
        and not own.isalpha()
    )
