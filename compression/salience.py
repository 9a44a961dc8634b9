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

from compression.change import Changes, changes
from compression.guard import KIND_WEIGHT, FactKind
from compression.statements import Role, Statement
from compression.words import ALL_FUNCTION_WORDS, Term, Vocabulary, normalise

WORD = 0.7  # worth of a rare word in a user's statement; facts count as in the guard's table
FACT = 0.9
FACT_TONE = 0.55  # a fact counts at least so, however it is said
QUESTION, COMMENT, PASSING, OWN, STANCE, NEGATION = 0.3, 0.35, 0.55, 1.4, 1.2, 1.2
COMMITTED, ADVICE = (
    6.0,
    0.5,
)  # Weights were set by how many planted facts survive in conversations of several kinds (docs/log.md).
POINT = 12.0  # worth of a user's statement as such: one proposition, however long
ENOUGH = 4.0  # words and facts that make a whole proposition; fewer are worth less
WORD = 0.7  # worth of a rare word in it
FACT = 0.9  # times the guard's weight: worth of a fact in it
WIDE = 0.65  # times, for a pair of Chinese, Japanese or Korean characters
FACT_TONE = 0.55  # a fact counts at least so, however it is said
IDENTIFYING = 3.5  # worth of each token of an identifier that is named in prose: it is dear, and cannot be guessed
IDENTIFYING_ELSEWHERE = 0.8  # of one in code, in a tool's prose, in reasoning
RETURNED = 2.0  # of one that is a field of a tool's output
LONGEST = 80  # characters of one that are paid for
QUESTION, CODE, HEADING = 0.34, 0.4, 0.8  # tone of a clause by its kind; a plain statement has 1.0
OWN, STANCE, NEGATION, CHANGING = 1.35, 1.1, 1.6, 1.6  # times: on oneself; a preference or decision; "not"; a change
FLEETING = 0.4  # times: says little outside its moment
COMMENT, PASSING = 0.5, 0.6  # times: on what was just said; a wish that its answer settles
PASTED = 0.4  # times, in text that is quoted at length and not about oneself
COMMITTED, ADVICE = 6.0, 0.5  # times, for an assistant: what it did; what one might do
WORD_OF_ROLE: dict[Role, float] = {
    "user": 1.0,
    "summary": 1.0,
    "system": 0.7,
    "tool": 0.85,
    "call": 0.25,
    "assistant": 0.13,
    "reasoning": 0.03,
}
FACT_OF_ROLE: dict[Role, float] = {
    "user": 1.0,
    "summary": 1.0,
    "system": 0.8,
    "tool": 0.7,
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

_ODD = re.compile(r"[^A-Za-z\s]")

_FIRST_PERSON = re.compile(
    r"\b(?:i|i'm|i've|i'd|i'll|my|me|mine|we|we're|we've|our|us|ich|mein\w*|mir|mich|wir|unser\w*|uns|je|j'|mon|"
    r"ma|mes|moi|nous|notre|nos|yo|mi|mis|"
    r"nuestr\w+|io|mio|mia|noi|eu|meu|minha|ik|mijn|wij|ons)\b|我|咱|私|僕|俺|うち|저|나|우리|제",
)
_NEGATION = re.compile(
    r"\b(?:not|never|no|none|nothing|without|cannot|\w+n't|avoid|except|nicht|nie|kein\w*|ohne|ne|n'|pas|jamais|"
    r"sans|aucun\w*|nunca|sin|ningun\w*|"
    r"non|mai|senza|não)\b|不|没|別|别|未|无|無|ない|ません|なし|ず|안|없|못",
)
_STANCE = re.compile(
    r"\b(?:prefer\w*|like[sd]?|love[sd]?|hate[sd]?|dislike\w*|enjoy\w*|favou?rite|allerg\w+|always|never|"
    r"usually|must|only|want\w*|need\w*|decided?|"
    r"agreed?|chose|chosen|going with|settled|plan\w*|promis\w+|will|should|deadline|due|owner|responsible|"
    r"in charge|called|named|lives?|works?|"
    r"mag|liebe|hasse|bevorzug\w+|immer|entschieden|brauch\w*|muss|aime|déteste|préfère|toujours|décidé|besoin|"
    r"gusta|prefiero|siempre|decid\w+)\b|"
    r"喜欢|爱|讨厌|偏好|过敏|总是|决定|需要|必须|负责|只|好き|嫌い|苦手|アレルギー|決め|必要|いつも|担当|좋아|싫어|결정",
)
_COMMITMENT = re.compile(
    r"\b(?:i(?:'ve| have) (?:booked|reserved|sent|created|updated|scheduled|added|set|filed|opened|ordered|"
    r"cancelled|canceled|moved|changed|fixed|deployed|saved|"
    r"recorded|noted)|(?:is|was|has been|have been|are) (?:booked|reserved|confirmed|scheduled|created|sent|"
    r"deployed|shipped|assigned|approved|rejected)|"
    r"confirmation|reference|we (?:decided|agreed)|habe .{1,40}(?:gebucht|reserviert|angelegt|erstellt|"
    r"gesendet)|j'ai (?:réservé|créé|envoyé|ajouté))\b|"
    r"已(?:经)?(?:预订|创建|发送|更新|安排|确认|预约)|予約しました|作成しました|送信しました|確認しました",
)
_PASSING = re.compile(  # what a user wants just now, which the answer has settled
    r"^(?:i'm|i am|i was|i've been|we're|we are) (?:also |just |really |actually )?(?:looking|trying|thinking|"
    r"hoping|considering|"
    r"curious|wondering|interested|excited|planning to|going to|not sure|sure)\b|"
    r"^i(?:'d| would) (?:also |really |definitely )?(?:like|love|appreciate|be interested)\b|^i(?:'ll|"
    r" will) (?:also |definitely |"
    r"make sure|try|check|keep|look|start|go|think|consider|give|add|take|do|be sure)\b|^i (?:also |just |"
    r"really )?(?:want|need|wanted|"
    r"think i|think it|guess|wonder|hope|feel like|was thinking)\b|^let(?:'s| me) (?!go with|use|stick|take|keep)|"
    r"^(?:write|give|tell|make|create|please|explain|show|provide|list|generate|rewrite|translate|suggest|"
    r"describe|help)\b|"
    r"^ich (?:möchte|suche|würde gern|frage mich|überlege)\b|^je (?:cherche|voudrais|me demande)\b|^我(?:想|正在找|"
    r"打算)|たいです$",
)
_COMMENT = re.compile(
    r"^(?:(?:that|this|it|they|those|these)(?:'s|'re| is| are| was| sounds?| looks?| seems?| makes?| would|"
    r" will|'ll)\b|"
    r"i (?:like|love|appreciate|agree|see|understand|get) (?:the idea|that|your|how|it|this|those|these|with)\b|"
    r"good |great |can't wait)",
)
_FLEETING = re.compile(  # of this hour, or about "it" that only the turn before explained
    r"\b(?:today|yesterday|tonight|this (?:morning|afternoon|evening)|right now|at the moment|just now|"
    r"again and again|typo\w*|"
    r"while i (?:type|typed|write|wrote|talk)|sorry|thanks|thank|heute|gestern|gerade|aujourd'hui|hier|hoy|ayer)\b|"
    r"\b(?:about|of|with|for|on|over|like|read|told me|tried|found|heard) (?:it|this|that|them|these|"
    r"those)\b(?! \w+ (?:is|was|are))|"
    r"^(?:somebody|someone|some people|everyone|everybody|people|they)\b|\b(?:told|recommended|said) (?:me|"
    r"us)? ?(?:this|that|it|the opposite)\b|"
    r"今天|昨天|刚才|今日|昨日|さっき"
)
_NOISE = re.compile(
    r"(?:^|[ .,])(?:\w*_ms|node|trace\w*|request_id|etag|cursor|request|\w+_at|next_page|page|limit|offset|took|"
    r"elapsed|cached|"
    r"hash|checksum|"
    r"created_at|updated_at|timestamp|success|ok|href|self|_\w+|version): ",
)
_TROUBLE = re.compile(
    r"\b(?:error|failed|failure|exception|traceback|warning|denied|timeout|timed out|refused|not found|fatal|"
    r"fehler|erreur)\b|错误|失败|エラー|失敗",
)
_ADVICE = re.compile(
    r"^(?:consider|try|use|make sure|ensure|be sure|avoid|look for|check|choose|keep|start|aim|opt|take|add|set|"
    r"create|practice|don't|"
    r"you (?:can|could|may|might|should)|it's (?:important|essential|best|a good idea)|this (?:will|can|could)|"
    r"these|they|if you|when|some|many)\b",
)


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
    point = POINT * role * tone * min(1.0, _substance(statement, text, terms) / ENOUGH)
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


def tone_of(statement: Statement) -> float:
    """How a statement speaks: of the speaker, of what is wanted or not, or in general."""
    text, role = statement.text.lower(), statement.role
    tone = {"question": QUESTION, "code": CODE, "heading": HEADING}.get(statement.kind, 1.0)
    if role == "tool":
        return tone * (1.6 if _TROUBLE.search(text) else 1.0) * (0.3 if _NOISE.search(text) else 1.0)
    if role == "assistant":
        if _COMMITMENT.search(text):
            return tone * COMMITTED
        return tone * (ADVICE if not statement.chosen and _ADVICE.match(text) else 1.0)
    if role in ("call", "reasoning") or statement.kind == "code":
        return tone
    if statement.kind == "heading":
        tone *= 0.5
    if statement.pasted and not _FIRST_PERSON.search(text):
        return tone * PASTED
    if _COMMENT.match(text):
        tone *= COMMENT
    elif _PASSING.match(text):
        tone *= PASSING
    elif _FIRST_PERSON.search(text):
        tone *= OWN
    if _FLEETING.search(text):
        tone *= FLEETING
    if _STANCE.search(text):
        tone *= STANCE
    if _NEGATION.search(text):
        tone *= NEGATION
    if changes(text):
        tone *= CHANGING
    return tone


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
        if kind in _IDENTIFYING and statement.kind != "code" and not _is_noise(statement):
            weight = max(weight, _price(statement, kind, value) * cost_of(value[:LONGEST]))
        yield key, 0.2 * weight if value in dead else weight
    for term in terms:
        if term.stem not in seen:
            seen.add(term.stem)
            size = (0.25 if term.chat else 1.0) * (WIDE if term.wide else 1.0)
            yield term.stem, WORD * per_word * tone * size * (0.25 + 0.75 * rarity.get(term.stem, 1.0))


def _is_noise(statement: Statement) -> bool:
    return statement.kind == "field" and _NOISE.search(statement.text) is not None


def _price(statement: Statement, kind: FactKind, value: str) -> float:
    if statement.role in ("user", "summary") or (statement.role == "assistant" and _is_given(kind, value)):
        return IDENTIFYING
    return RETURNED if statement.kind == "field" and statement.role == "tool" else IDENTIFYING_ELSEWHERE


def _is_given(kind: FactKind, value: str) -> bool:
    """Whether an assistant names something that exists elsewhere (an order, a link), not a name in code it "
    "explains."""
    return kind != "identifier" or any(map(str.isdigit, value))


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
    if end - begin > SHORT_ENOUGH * len(words):
        return None
    return " ".join(words[begin:end]).strip(" ,;:-")


def _begins(words: Sequence[str], at: int) -> bool:
    return at == 0 or words[at - 1][-1:] in ",;:" or words[at].casefold() in _OPENERS


def cost_of(text: str) -> float:
    """Tokens of a text and of what joins it to its neighbour, roughly: scaled to the real count afterwards."""
    odd = len(_ODD.findall(text))
    wide = 0 if text.isascii() else sum(1 for char in text if char > "\u2e7f")
    return 1.0 + 0.7 * wide + 0.6 * (odd - wide) + max(text.count(" ") + 1.0, (len(text) - odd) / 5.0)
