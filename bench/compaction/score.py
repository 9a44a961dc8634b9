"""What a kept context still says: values, what they belong to, and values that were superseded. Text only, no model."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, Protocol

# Kinds whose values are words of everyday speech: they survive if all their words stand in one clause, in whatever
# order and form. Other values must stand as they are.
IN_WORDS = frozenset({"preference", "negation", "relation", "cause", "order", "plain", "constraint"})
STOP = frozenset(
    re.findall(
        r"\w+",
        "a an the of in on at to by for is are was were be been it its my our your their and or that this with i we"
        " they he she his her had has have did do does only",
    )
)
CHANGED = re.compile(
    r"\b(now|new|moved|changed?|instead|not|no longer|raised|after all|another|was|were|formerly|previous(ly)?|earlier|"
    r"until|old|supersed\w+|updated?|replac\w+|used to|then)\b|->|→|⇒"
)
CLAUSE = re.compile(r"[.!?](?=[\s\"')\]]|$)|[。！？]")
QUOTES = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "`": None, "*": None, "\u00a0": " "})

Verdict = Literal["right", "stale", "unmarked", "gone"]


class Planted(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def keys(self) -> tuple[str, ...]: ...
    @property
    def old(self) -> str | None: ...


def normalised(text: str) -> str:
    """One spelling for what reads the same: width, case, quotes, markdown, doubled backslashes, grouped digits."""
    plain = unicodedata.normalize("NFKC", text).translate(QUOTES).casefold().replace("\\\\", "\\")
    return re.sub(r"\s+", " ", re.sub(r"(?<=\d),(?=\d{3}\b)", "", plain)).strip()


@lru_cache(maxsize=4096)
def _line(text: str) -> tuple[str, ...]:
    return tuple(plain for part in CLAUSE.split(text) if (plain := normalised(part)))


def clauses(text: str) -> list[str]:
    """Sentences and lines, normalised."""
    return [clause for line in text.split("\n") for clause in _line(line)]


def holds(clause: str, value: str) -> bool:
    """A normalised value stands in a normalised text as a whole, not inside a longer word or number."""
    before = r"(?<![a-z0-9])" if value[0].isascii() and value[0].isalnum() else ""
    after = r"(?![a-z0-9])" if value[-1].isascii() and value[-1].isalnum() else ""
    return re.search(before + re.escape(value) + after, clause) is not None


def words_of(value: str) -> list[str]:
    """What must be there of a value in plain words: no articles and the like, and of each word what inflection
    leaves."""
    return [word[: max(5, len(word) - 2)] for word in re.findall(r"[\w-]+", normalised(value)) if word not in STOP]


def names(clause: str, keys: Iterable[str]) -> bool:
    """One of the subject's words begins a word of the clause (or stands in it, where words are not spaced)."""
    return any(key in clause if not key.isascii() else re.search(rf"\b{re.escape(key)}", clause) for key in keys)


class Kept:
    """A kept context, ready to be asked."""

    def __init__(self, text: str) -> None:
        self.clauses = clauses(text)

    def where(self, value: str, kind: str) -> list[str]:
        """The clauses that say the value: literally or, where it is everyday words, in its words."""
        plain = normalised(value)
        words = words_of(value) if kind in IN_WORDS else []
        return [
            clause
            for clause in self.clauses
            if (plain in clause and holds(clause, plain))
            or (words and all(word in clause and re.search(rf"\b{re.escape(word)}", clause) for word in words))
        ]

    def survives(self, fact: Planted) -> bool:
        return bool(self.where(fact.value, fact.kind))

    def connected(self, fact: Planted) -> bool:
        """The value stands in one clause with a word of its subject."""
        return any(names(clause, fact.keys) for clause in self.where(fact.value, fact.kind))

    def superseded(self, fact: Planted) -> Verdict:
        """Of a fact that was told twice: stale, where only the old value is left; unmarked, where both stand and
        nothing beside either says which holds."""
        assert fact.old is not None
        new, old = self.where(fact.value, fact.kind), self.where(fact.old, fact.kind)
        if not old:
            return "right" if new else "gone"
        if not new:
            return "stale"
        return "right" if any(CHANGED.search(clause) for clause in (*new, *old)) else "unmarked"
