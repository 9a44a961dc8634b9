"""How much a statement tells that is not yet told, for each token it costs. Plain arithmetic over words and facts.

A statement is worth its facts and its rare words, weighed by who says it and how: what users say about themselves
counts most, an assistant's advice least. What has been chosen already counts nothing again.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compression.change import Changes
from compression.guard import KIND_WEIGHT, FactKind
from compression.statements import Role, Statement
from compression.tone import is_noise, tone_of, turns_round
from compression.words import ALL_FUNCTION_WORDS, Term, Vocabulary, normalise

# Weights were set by how many planted facts survive in conversations of several kinds (docs/log.md).
POINT = 12.0  # worth of a user's statement as such: one proposition, however long
ENOUGH = 4.0  # words and facts that make a whole proposition; fewer are worth less
LONGER, MOST_POINTS = 0.6, 2.3  # what is said in more words tells more, though less than so many points
WORD = 0.7  # worth of a rare word in it
FACT = 0.9  # times the guard's weight: worth of a fact in it
WIDE = 0.65  # times, for a pair of Chinese, Japanese or Korean characters
FACT_TONE = 0.55  # a fact counts at least so, however it is said
IDENTIFYING = 3.5  # worth of each token of an identifier that is named in prose: it is dear, and cannot be guessed
IDENTIFYING_ELSEWHERE = 0.8  # of one in code, in a tool's prose, in reasoning
GIVEN = 2.5  # of one that an assistant gives out in prose
RETURNED = 2.0  # of one that is a field of a tool's output
LONGEST = 80  # characters of one that are paid for
WORD_OF_ROLE: dict[Role, float] = {
    "user": 1.0,
    "summary": 1.0,
    "system": 0.7,
    "tool": 1.15,
    "call": 0.25,
    "assistant": 0.13,
    "reasoning": 0.03,
}
FACT_OF_ROLE: dict[Role, float] = {
    "user": 1.0,
    "summary": 1.0,
    "system": 0.8,
    "tool": 0.9,
    "call": 0.4,
    "assistant": 0.2,
    "reasoning": 0.05,
}
CHOSEN = 0.4  # of a user's statement, for whatever an older summary chose to keep
_IDENTIFYING = frozenset(("identifier", "url", "email", "path", "phone"))

TAG_WORDS = 3  # before an identifier, that say what it identifies
REACH = 6  # words before and after its facts that the core of a statement may take
SHORT_ENOUGH = 0.75  # of a statement's words: a longer core gains nothing
_OPENERS = frozenset(
    ("which", "who", "that", "because", "when", "where", "i", "i'm", "i've", "we", "my", "our", "ich", "je", "mein")
)

_NUMBERED = re.compile(r"\d{4}|[A-Z]{2,}[-/_]?\d{3}|\d[A-Za-z0-9]*[-/_][A-Za-z0-9]*\d{3}|[0-9a-f]{7}")
_ODD = re.compile(r"[^A-Za-z\s]")


@dataclass(frozen=True, slots=True)
class Option:
    """One way to say a statement: all of it, or the part around its facts."""

    statement: Statement
    text: str
    units: tuple[tuple[str, float], ...]  # what it tells, each with its worth
    point: float  # its worth as a proposition, in full where all of `units` is new
    worth: float  # of all of it
    cost: float  # tokens, estimated, a thought costing about the same in every script: what worth is held against
    price: float  # tokens, as near to the real count as is known: what the budget pays

    def gain(self, told: set[str]) -> float:
        """What it adds to what has been told."""
        new = sum(worth for key, worth in self.units if key not in told)
        return new + self.point * new / self.whole if new else 0.0

    @property
    def whole(self) -> float:
        return self.worth - self.point


def options(statements: Sequence[Statement], changed: Changes) -> list[Option]:
    """Every way to say every statement, with what it is worth alone."""
    rarity = _rarity(statements)
    vocabulary = Vocabulary()
    found: list[Option] = []
    for statement in statements:
        tone = tone_of(statement)
        if (statement.index, "") in changed:
            tone *= 0.1
        dead = {value for _, value in statement.facts if (statement.index, value) in changed}
        texts = dict.fromkeys((statement.text, *shorter(statement)))
        found.extend(
            _option(statement, text, terms, tone, tuple(_units(statement, text, terms, tone, rarity, dead)))
            for text in texts
            for terms in (statement.terms if text is statement.text else vocabulary.terms(text),)
        )
    return found


def _option(
    statement: Statement, text: str, terms: Sequence[Term], tone: float, units: tuple[tuple[str, float], ...]
) -> Option:
    role = max(WORD_OF_ROLE[statement.role], CHOSEN) if statement.chosen else WORD_OF_ROLE[statement.role]
    full = _substance(statement, text, terms) / ENOUGH
    point = POINT * role * tone * (full if full < 1.0 else min(MOST_POINTS, 1.0 + LONGER * (full - 1.0)))
    cost = cost_of(text)
    return Option(statement, text, units, point, point + sum(worth for _, worth in units), cost, cost)


def _substance(statement: Statement, text: str, terms: Sequence[Term]) -> float:
    """How many words and facts a proposition is about."""
    facts = sum(value in text for _, value in statement.facts)
    return sum(WIDE if term.wide else 1.0 for term in terms if not term.chat) + 0.5 * facts


def _rarity(statements: Sequence[Statement]) -> dict[str, float]:
    turns: dict[str, set[int]] = defaultdict(set)
    for statement in statements:
        for term in statement.terms:
            turns[term.stem].add(statement.turn)
    total = 1 + max((statement.turn for statement in statements), default=0)
    top = math.log(1 + total)
    return {word: (math.log((1 + total) / len(where)) / top if total > 1 else 1.0) for word, where in turns.items()}


def _units(
    statement: Statement, text: str, terms: Sequence[Term], tone: float, rarity: dict[str, float], dead: set[str]
) -> Iterable[tuple[str, float]]:
    per_fact, per_word = FACT_OF_ROLE[statement.role], WORD_OF_ROLE[statement.role]
    if statement.chosen:
        per_fact, per_word = max(per_fact, CHOSEN), max(per_word, CHOSEN)
    seen: set[str] = set()
    for kind, value in statement.facts:
        key = normalise(value)
        if value not in text or key in seen:
            continue
        seen.add(key)
        weight = FACT * KIND_WEIGHT[kind] * per_fact * max(tone, FACT_TONE)
        if kind in _IDENTIFYING and statement.kind != "code" and not is_noise(statement):
            weight = max(weight, _price(statement, kind, value) * cost_of(value[:LONGEST]))
        yield key, 0.2 * weight if value in dead else weight
    for term in terms:
        if term.stem not in seen:
            seen.add(term.stem)
            size = (0.25 if term.chat else 1.0) * (WIDE if term.wide else 1.0)
            yield term.stem, WORD * per_word * tone * size * (0.25 + 0.75 * rarity.get(term.stem, 1.0))


def _price(statement: Statement, kind: FactKind, value: str) -> float:
    if statement.role in ("user", "summary"):
        return IDENTIFYING
    if statement.role == "assistant" and _is_given(kind, value):
        return GIVEN
    return RETURNED if statement.kind == "field" and statement.role == "tool" else IDENTIFYING_ELSEWHERE


def _is_given(kind: FactKind, value: str) -> bool:
    """Whether an assistant names something that exists elsewhere (an order, a link), not a name in code it "
    "explains."""
    return kind != "identifier" or _NUMBERED.search(value) is not None


def shorter(statement: Statement) -> Iterable[str]:
    """Shorter ways to say a statement: the part around its facts, each pair of a JSON object, each value by which
    something is looked up with the words before it."""
    if part := core(statement):
        yield part
    if statement.kind == "field":
        return
    for kind, value in statement.facts:
        if kind in _IDENTIFYING and (at := statement.text.find(value)) > 0:
            begin = statement.text.rfind(" ", 0, at) + 1
            before = statement.text[:begin].split()[-TAG_WORDS:]
            for number, word in enumerate(before, 1):
                if word[-1:] in ",;:":
                    before = before[number:]
                    break
            while before and before[0].casefold() in ALL_FUNCTION_WORDS:
                before = before[1:]
            if len(tag := " ".join((*before, statement.text[begin : at + len(value)]))) < 0.7 * len(statement.text):
                yield tag


def core(statement: Statement) -> str | None:
    """The part of a long statement around its facts, from a clause's begin to its end where those are near, or None
    where there is nothing to gain."""
    words = statement.text.split(" ")
    if len(words) < 8 or not statement.facts or statement.kind in ("field", "code"):
        return None
    places = [(at, value) for _, value in statement.facts if (at := statement.text.find(value)) >= 0]
    if not places:
        return None
    first = min(statement.text.count(" ", 0, at) for at, _ in places)
    last = max(statement.text.count(" ", 0, at + len(value)) for at, value in places) + 1
    begin = next((i for i in range(first, max(0, first - REACH) - 1, -1) if _begins(words, i)), max(0, first - REACH))
    end = next((i for i in range(last, min(len(words), last + REACH)) if words[i - 1][-1:] in ",;:.)"), None)
    end = min(len(words), last + 2) if end is None else end
    while end > last and words[end - 1].strip(",;:").casefold() in ALL_FUNCTION_WORDS:
        end -= 1
    if end - begin > SHORT_ENOUGH * len(words) or turns_round(" ".join((*words[:begin], *words[end:]))):
        return None
    return " ".join(words[begin:end]).strip(" ,;:-")


def _begins(words: Sequence[str], at: int) -> bool:
    return at == 0 or words[at - 1][-1:] in ",;:" or words[at].casefold() in _OPENERS


def cost_of(text: str) -> float:
    """Tokens of a text and of what joins it to its neighbour, roughly: scaled to the real count afterwards."""
    odd = len(_ODD.findall(text))
    wide = 0 if text.isascii() else sum(1 for char in text if char > "\u2e7f")
    return 1.0 + 0.7 * wide + 0.6 * (odd - wide) + max(text.count(" ") + 1.0, (len(text) - odd) / 5.0)
