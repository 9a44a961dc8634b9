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
from compression.guard import KIND_WEIGHT
from compression.statements import Role, Statement
from compression.words import CHAT_WORDS, content_words, is_cjk, normalise, stem

WORD_OF_ROLE: dict[Role, float] = {
    "user": 1.0,
    "summary": 1.0,
    "system": 0.7,
    "tool": 0.3,
    "call": 0.25,
    "assistant": 0.12,
    "reasoning": 0.03,
}
FACT_OF_ROLE: dict[Role, float] = {
    "user": 1.0,
    "summary": 1.0,
    "system": 0.8,
    "tool": 0.6,
    "call": 0.5,
    "assistant": 0.22,
    "reasoning": 0.05,
}
_IDENTIFYING = frozenset(("identifier", "url", "email", "path", "phone"))

_FIRST_PERSON = re.compile(
    r"\b(?:i|i'm|i've|i'd|i'll|my|me|mine|we|we're|we've|our|us|ich|mein\w*|mir|mich|wir|unser\w*|uns|je|j'|mon|"
    r"ma|mes|moi|nous|notre|nos|yo|mi|mis|"
    r"nuestr\w+|io|mio|mia|noi|eu|meu|minha|ik|mijn|wij|ons)\b|我|咱|私|僕|俺|うち|저|나|우리|제",
    re.IGNORECASE,
)
_NEGATION = re.compile(
    r"\b(?:not|never|no|none|nothing|without|cannot|\w+n't|avoid|except|nicht|nie|kein\w*|ohne|ne|n'|pas|jamais|"
    r"sans|aucun\w*|nunca|sin|ningun\w*|"
    r"non|mai|senza|não)\b|不|没|別|别|未|无|無|ない|ません|なし|ず|안|없|못",
    re.IGNORECASE,
)
_STANCE = re.compile(
    r"\b(?:prefer\w*|like[sd]?|love[sd]?|hate[sd]?|dislike\w*|enjoy\w*|favou?rite|allerg\w+|always|never|"
    r"usually|must|only|want\w*|need\w*|decided?|"
    r"agreed?|chose|chosen|going with|settled|plan\w*|promis\w+|will|should|deadline|due|owner|responsible|"
    r"in charge|called|named|lives?|works?|"
    r"mag|liebe|hasse|bevorzug\w+|immer|entschieden|brauch\w*|muss|aime|déteste|préfère|toujours|décidé|besoin|"
    r"gusta|prefiero|siempre|decid\w+)\b|"
    r"喜欢|爱|讨厌|偏好|过敏|总是|决定|需要|必须|负责|只|好き|嫌い|苦手|アレルギー|決め|必要|いつも|担当|좋아|싫어|결정",
    re.IGNORECASE,
)
_COMMITMENT = re.compile(
    r"\b(?:i(?:'ve| have) (?:booked|reserved|sent|created|updated|scheduled|added|set|filed|opened|ordered|"
    r"cancelled|canceled|moved|changed|fixed|deployed|saved|"
    r"recorded|noted)|(?:is|was|has been|have been|are) (?:booked|reserved|confirmed|scheduled|created|sent|"
    r"deployed|shipped|assigned|approved|rejected)|"
    r"confirmation|reference|we (?:decided|agreed)|habe .{1,40}(?:gebucht|reserviert|angelegt|erstellt|"
    r"gesendet)|j'ai (?:réservé|créé|envoyé|ajouté))\b|"
    r"已(?:经)?(?:预订|创建|发送|更新|安排|确认|预约)|予約しました|作成しました|送信しました|確認しました",
    re.IGNORECASE,
)
_TROUBLE = re.compile(
    r"\b(?:error|failed|failure|exception|traceback|warning|denied|timeout|timed out|refused|not found|fatal|"
    r"fehler|erreur)\b|错误|失败|エラー|失敗",
    re.IGNORECASE,
)
_ADVICE = re.compile(
    r"^(?:consider|try|use|make sure|ensure|be sure|avoid|look for|check|choose|keep|start|aim|opt|take|add|set|"
    r"create|practice|don't|"
    r"you (?:can|could|may|might|should)|it's (?:important|essential|best|a good idea)|this (?:will|can|could)|"
    r"these|they|if you|when|some|many)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to say a statement: all of it, or the part around its facts."""

    statement: Statement
    text: str
    units: tuple[tuple[str, float], ...]  # what it tells, each with its worth
    cost: float  # tokens, estimated

    @property
    def worth(self) -> float:
        return sum(worth for _, worth in self.units)


def options(statements: Sequence[Statement], changed: Changes) -> list[Option]:
    """Every way to say every statement, with what it is worth alone."""
    rarity = _rarity(statements)
    found: list[Option] = []
    for statement in statements:
        tone = tone_of(statement)
        if (statement.index, "") in changed:
            tone *= 0.1
        dead = {value for _, value in statement.facts if (statement.index, value) in changed}
        texts = [statement.text]
        if short := core(statement):
            texts.append(short)
        found.extend(
            Option(statement, text, tuple(_units(statement, text, tone, rarity, dead)), cost_of(text)) for text in texts
        )
    return found


def _rarity(statements: Sequence[Statement]) -> dict[str, float]:
    turns: dict[str, set[int]] = defaultdict(set)
    for statement in statements:
        for word in content_words(statement.text):
            turns[stem(word)].add(statement.turn)
    total = 1 + max((statement.turn for statement in statements), default=0)
    top = math.log(1 + total)
    return {word: (math.log((1 + total) / len(where)) / top if total > 1 else 1.0) for word, where in turns.items()}


def tone_of(statement: Statement) -> float:
    """How a statement speaks: of the speaker, of what is wanted or not, or in general."""
    text = statement.text
    tone = 1.0
    if statement.kind == "question":
        tone *= 0.35
    elif statement.kind == "code":
        tone *= 0.4
    elif statement.kind == "heading":
        tone *= 0.9
    if statement.role in ("user", "summary", "system") and statement.kind != "code":
        if _FIRST_PERSON.search(text):
            tone *= 1.4
        if _STANCE.search(text):
            tone *= 1.25
        if _NEGATION.search(text):
            tone *= 1.2
    elif statement.role == "assistant":
        if _COMMITMENT.search(text):
            tone *= 3.0
        elif _ADVICE.match(text):
            tone *= 0.5
    elif statement.role == "tool" and _TROUBLE.search(text):
        tone *= 1.6
    return tone


def _units(
    statement: Statement, text: str, tone: float, rarity: dict[str, float], dead: set[str]
) -> Iterable[tuple[str, float]]:
    role = statement.role
    seen: set[str] = set()
    for kind, value in statement.facts:
        if value not in text:
            continue
        key = normalise(value)
        if key not in seen:
            seen.add(key)
            weight = KIND_WEIGHT[kind] * FACT_OF_ROLE[role] * max(tone, 0.5)
            if kind in _IDENTIFYING and role in ("assistant", "tool", "call") and statement.kind != "code":
                weight *= 1.8
            yield key, 0.2 * weight if value in dead else weight
    for word in content_words(text):
        key = stem(word)
        if key not in seen:
            seen.add(key)
            plain = 0.25 if word in CHAT_WORDS else 1.0
            size = 0.6 if is_cjk(word) else 1.0
            yield key, WORD_OF_ROLE[role] * tone * plain * size * (0.25 + 0.75 * rarity.get(key, 1.0))


def core(statement: Statement) -> str | None:
    """The part of a long statement around its facts, or None where there is nothing to gain."""
    words = statement.text.split(" ")
    if len(words) < 8 or not statement.facts or statement.kind in ("field", "code"):
        return None
    starts, ends = [], []
    for _, value in statement.facts:
        at = statement.text.find(value)
        if at >= 0:
            first = statement.text.count(" ", 0, at)
            starts.append(first)
            ends.append(first + value.count(" "))
    if not starts:
        return None
    first, last = max(0, min(starts) - 4), min(len(words), max(ends) + 3)
    if last - first > 0.7 * len(words):
        return None
    return " ".join(words[first:last]).strip(" ,;:-")


def cost_of(text: str) -> float:
    """Tokens of a text, roughly: scaled to the real count afterwards."""
    cost = 1.0  # what joins it to its neighbour
    for word in text.split():
        wide = sum(1 for char in word if ord(char) > 0x2E7F)
        narrow = len(word) - wide
        odd = sum(1 for char in word if not char.isalpha()) - 0
        cost += wide * 0.9 + (max(1.0, (narrow - odd) / 5.0) + 0.6 * odd if narrow else 0)
    return cost
