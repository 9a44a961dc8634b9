"""Which values a later statement changed: corrections, moves, "no longer", the same field with another value.

Two statements are about the same thing when they share the words that are not values. Without a word of change
("actually", "moved to") only numbers, amounts, dates and times of one and the same subject are taken to replace each
other; different identifiers or names stand for different things.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from compression.clauses import depends_on_before
from compression.patterns import FactKind
from compression.statements import Statement
from compression.words import is_cjk, is_grammatical, normalise, stem, words

Changes = dict[
    tuple[int, str], int
]  # (index of a statement, value in it or "" for all of it) -> index of the later one

_STRONG = re.compile(
    r"\b(?:actually|instead|rather than|no longer|not anymore|any ?more|changed?|changing|moved?|moving|"
    r"switch(?:ed|ing)?|resched\w+|postponed?|"
    r"pushed (?:back|to)|brought forward|correct(?:ion|ed|ing)|scratch that|i meant|i was wrong|my mistake|typo|"
    r"wrong|update[ds]?|"
    r"replac(?:e[ds]?|ing)|renamed?|upgraded?|bumped|raised|lowered|increased|reduced|revised|cancel\w*|it(?:'s|"
    r" is) now|are now|now (?:is|it)|"
    r"make (?:it|that)|used to|stopped|gave up|quit|doch (?:lieber|nicht)|stattdessen|nicht mehr|geändert|"
    r"verschoben|verlegt|korrektur|korrigier\w*|"
    r"umgezogen|ab jetzt|ich meinte|finalement|plutôt|au lieu|désormais|changé|déplacé|reporté|repoussé|"
    r"ne\s.{1,30}\splus|correction|je voulais dire|"
    r"en realidad|en lugar|en vez|cambi\w+|ahora es|ya no|corrección|invece|non più|cambiat\w|spostat\w)\b|"
    r"改成|改为|提高到|降到|降低到|增加到|减少到|改到|改在|改用|换成|換成|变成|变更|更正|不再|不是.{1,12}而是|其实|搬到|搬去|推迟|提前到|更新为|纠正|取消|調整|调整|"
    r"変更|変わりま|変わった|ではなく|じゃなくて|やっぱり|訂正|に移|引っ越|延期|もう.{1,12}ない|바뀌|변경|아니라|대신",
)
_WEAK = re.compile(
    r"\b(?:now|new|currently|these days|lately|since then|just (?:got|became|turned|finished)|already|so far|"
    r"up to|jetzt|neu\w*|inzwischen|"
    r"maintenant|nouve\w+|ahora|nuev\w+|adesso|nuov\w+)\b|现在|新的|目前|已经|今は|新しい|現在|지금",
)
_OWNED = re.compile(
    r"\b(?:my|our|the|mein\w*|unser\w*|der|die|das|mon|ma|mes|notre|le|la|les|mi|nuestr\w+|el|mio|mia)\b|我的|我们的|"
    r"私の|うちの|내|우리",
)
_CUE_WORDS = """actually instead rather longer anymore change changed moved moving move switch switched rescheduled
    postponed pushed correction meant wrong mistake update updated replaced renamed upgraded raised lowered increased
    reduced revised cancelled canceled now new currently"""
_CUE_STEMS = frozenset(map(stem, _CUE_WORDS.split()))
_QUANTITIES: frozenset[FactKind] = frozenset(("number", "money", "measure", "date", "time", "version"))
_NEAR_TURNS = 3  # how far back "make it 700" reaches when it names no subject
_COMMON = 40  # a word in more statements than this names no subject


def changes(text: str) -> bool:
    """Whether a clause says outright that something is no longer as it was."""
    return _STRONG.search(text.lower()) is not None


def superseded(statements: Sequence[Statement]) -> Changes:
    """For each changed value (and, under "", for each changed statement) the latest statement that changed it."""
    found: Changes = {}
    fields: dict[str, Statement] = {}
    posting: dict[str, list[int]] = defaultdict(list)
    said: dict[str, list[int]] = defaultdict(list)
    topics: list[frozenset[str]] = []
    values = [tuple(normalise(value) for _, value in statement.facts) for statement in statements]
    for statement in statements:
        if statement.role in ("reasoning", "call"):
            topics.append(frozenset())
            continue
        topic = _topic(statement)
        topics.append(topic)
        if statement.subject:
            before = fields.get(statement.subject)
            if before is not None and before.text != statement.text:
                _replace_field(before, statement, found)
            fields[statement.subject] = statement
            continue
        if statement.kind in ("question", "code", "heading"):
            continue
        strong = changes(statement.text)
        if strong and len(statement.facts) > 1:
            _replace_named(statement, statements, said, found)
        if strong or statement.role in ("user", "summary"):
            now = _by_kind(statement, values[statement.index])
            for earlier in _candidates(statement, topic, statements, topics, posting, strong=strong):
                changed = _changed(earlier, values[earlier.index], now, strong=strong)
                found.update(dict.fromkeys(((earlier.index, value) for value in changed), statement.index))
                more = strong and not earlier.facts and len(topics[earlier.index] & topic) >= 2
                if changed or more:
                    found[(earlier.index, "")] = statement.index
        for word in topic:
            posting[word].append(statement.index)
        for value in values[statement.index]:
            said[value].append(statement.index)
    return found


def _topic(statement: Statement) -> frozenset[str]:
    """The stems a statement is about: without its values, function words, words of chat and words of change."""
    values = {word for _, value in statement.facts for word in words(value)}
    return frozenset(
        term.stem
        for term in statement.terms
        if not (
            term.chat or term.word in values or (term.wide and is_grammatical(term.word)) or term.stem in _CUE_STEMS
        )
    )


def _candidates(
    statement: Statement,
    topic: frozenset[str],
    statements: Sequence[Statement],
    topics: Sequence[frozenset[str]],
    posting: dict[str, list[int]],
    *,
    strong: bool,
) -> list[Statement]:
    shared: dict[int, int] = defaultdict(int)
    for word in topic:
        where = posting.get(word, ())
        if len(where) <= _COMMON:
            for index in where:
                shared[index] += 1
    found = [
        statements[index]
        for index, count in shared.items()
        if _same_subject(count, len(topics[index]), len(topic), statements[index], statement, strong=strong)
    ]
    if not found and strong and (len(topic) <= 1 or depends_on_before(statement.text)):
        kinds = {kind for kind, _ in statement.facts}
        if topic and not depends_on_before(statement.text):
            kinds &= _QUANTITIES  # "the server was moved to <url>" names its own subject: another url is another thing
        for earlier in reversed(statements[: statement.index]):
            if statement.turn - earlier.turn > _NEAR_TURNS:
                break
            if earlier.role == statement.role and kinds.intersection(kind for kind, _ in earlier.facts):
                return [earlier]
    return found


def _same_subject(shared: int, mine: int, other: int, earlier: Statement, later: Statement, *, strong: bool) -> bool:
    if earlier.role != later.role and "user" not in (earlier.role, later.role):
        return False
    least, most = min(mine, other), max(mine, other)
    if strong:
        return shared / least >= (0.25 if is_cjk(later.text) else 0.5) or shared >= 3
    if not {earlier.role, later.role} <= {"user", "summary"}:
        return False
    if _WEAK.search(later.text.lower()):
        return (shared / least >= 0.6 and shared >= 2) or shared == least == most
    owned = _OWNED.search(earlier.text.lower()) is not None and _OWNED.search(later.text.lower()) is not None
    return shared / most >= 0.75 and (shared >= 2 or owned)


def _by_kind(statement: Statement, values: Sequence[str]) -> Mapping[FactKind, Collection[str]]:
    """The normalised values of a statement."""
    found: dict[FactKind, set[str]] = defaultdict(set)
    for (kind, _), value in zip(statement.facts, values, strict=True):
        found[kind].add(value)
    return dict(found)


def _changed(
    earlier: Statement, values: Sequence[str], now: Mapping[FactKind, Collection[str]], *, strong: bool
) -> list[str]:
    """The values of the earlier statement in whose place others stand now."""
    other = [
        (kind, said)
        for (kind, said), value in zip(earlier.facts, values, strict=True)
        if kind in now and value not in now[kind]
    ]
    if strong:
        return [said for _, said in other]
    last = {kind: value for (kind, _), value in zip(earlier.facts, values, strict=True) if kind not in _QUANTITIES}
    if any(kind in now and value not in now[kind] for kind, value in last.items()):
        return []  # another identifier or name: another thing
    return [said for kind, said in other if kind in _QUANTITIES]


def _replace_named(
    later: Statement, statements: Sequence[Statement], said: dict[str, list[int]], changes: Changes
) -> None:
    """ "I moved from Leeds to Aberdeen": what says no more than the older of its two values has been said anew."""
    for position, (kind, value) in enumerate(later.facts):
        if any(other == kind for other, _ in later.facts[position + 1 :]):
            for index in said.get(normalise(value), ())[-3:]:
                earlier = statements[index]
                if earlier.role == later.role and len(earlier.facts) == 1 and len(earlier.text) <= 60:
                    changes[(index, "")] = later.index


def _replace_field(earlier: Statement, later: Statement, changes: Changes) -> None:
    now = {normalise(value) for _, value in later.facts}
    for _, value in earlier.facts:
        if normalise(value) not in now:
            changes[(earlier.index, value)] = later.index
    changes[(earlier.index, "")] = later.index
