"""From running text to clauses worth keeping: lines, list items, sentences, clauses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from compression.filler import asked_for, is_empty, says_something, trim
from compression.words import is_cjk, windows, words

ClauseKind = Literal["statement", "question", "heading", "code", "field"]


class Clause(NamedTuple):
    text: str
    kind: ClauseKind
    follows: bool  # continues the sentence of the clause before it


_ABBREVIATION = re.compile(
    r"(?:\b(?:Dr|Mr|Mrs|Ms|Prof|St|Sr|Jr|vs|etc|e\.g|i\.e|approx|No|Nr|Inc|Ltd|Co|bzw|z\.B|ca|ggf|d\.h|a\.m|"
    r"p\.m|M|Mme|Hr|Fr)|"
    r"(?:^|\s)[A-Z]|(?:^|\s)\d{1,2})\.$"
)
_SENTENCE_END = re.compile(r"(?:[.!?…]+[\"'”’»)\]*]*(?=\s|$)|[。！？；]+[」』”’）]*)")
_LIST_MARK = re.compile(r"^\s*(?:[-*•+▪◦·–]\s+|#{1,6}\s+|>\s+|(?=\d{1,3}[.)]\s)|\|\s*)+")
_LIST_NUMBER = re.compile(r"^\s*\d{1,3}[.)]\s+")
_HEADED = re.compile(
    r"^(?P<head>(?:\d{1,3}[.)]\s+)?(?:\*\*[^*\n]{1,80}\*\*|[^:\n!?]{2,60}?(?=:(?:\s|$))))\s*(?P<mark>:|-|–|"
    r"—)?\s*(?P<body>.*)$",
    re.DOTALL,
)
_EMPHASIS = re.compile(r"\*\*|__|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)|^#+\s*")
_APOSTROPHE = re.compile(r"(?<=\w)’(?=\w)")
_FENCE = re.compile(r"^\s*(?:```|~~~)")

SHORT_SENTENCE = 12  # words: cut only where two sentences were strung together
_LIST_CUT = re.compile(r"\s*;\s+|\s+[—–]\s+|\s+-\s+")
_CUT = re.compile(
    r"\s*;\s+|\s+[—–]\s+|\s+-\s+|"
    r",\s+(?=(?:but|so|because|and|although|though|while|whereas|since|unless|however|yet|or)\s(?:i|we|you|he|"
    r"she|it|they|my|our|"
    r"the|his|her|their|its|this|that|there|please|can|could|what|how|is|are|do|does|if)\b)|"
    r",\s+(?=(?:can|could|would|will|please|do)\s(?:you|me|we)\b|(?:aber|denn|weil|und\s(?:ich|wir|er|sie|das|"
    r"die|der|mein)|doch|"
    r"sondern|mais|car|et\s(?:je|nous|il|elle|mon|ma|le|la)|parce|pero|porque|y\s(?:yo|mi|el|la)|ma|perché|"
    r"e\s(?:io|il|la|mio))\b)|"
    r"\s+(?=(?:but|because)\s(?:i|we|my|our|he|she|it|they|the|this|that)\b)|\s+(?=and\s(?:i|we|my|our|it's|it)\b)|"
    r",\s+(?=(?:never|don't|do\snot|always|only)\s\w+\s\w+\s\w+)|"
    r"[，；]\s*",
    re.IGNORECASE,
)
_RELATIVE = re.compile(r"^(?:which|who|whom|whose|where|das|der|die|qui|que|dont)\b", re.IGNORECASE)
_TELLING = re.compile(r"\d|(?<=\s)[A-Z](?!\b)|[\"“«「《`]")
_ASKING = re.compile(
    r"^(?:what|when|where|which|who|whom|whose|why|how|is|are|was|were|do|does|did|can|could|would|will|should|"
    r"shall|has|have|"
    r"wie|was|wer|wo|wann|warum|welche\w*|ist|sind|kann|comment|pourquoi|quand|où|quel\w*|est|qué|cómo|cuándo|"
    r"dónde)\b",
    re.IGNORECASE,
)
_ANAPHOR = re.compile(
    r"^(?:(?:and|but|so|or|also|und|aber|et|mais|y|pero)\s+)?(?:it|its|they|them|their|this|that|these|those|he|"
    r"she|his|her|which|who|there|"
    r"es|er|sie|das|dies|il|elle|ils|elles|cela|ça|ce|ella|ellos|eso|它|他|她|他们|这|那|それ|これ|彼|彼女)\b",
    re.IGNORECASE,
)


def clauses_of(text: str) -> Iterator[Clause]:
    """The clauses of a message in order, trimmed; empty phrases (greetings, offers of help) are left out.

    Code inside a fence comes line by line as "code"; the bold or colon-ended head of a list item comes apart from its
    explanation, because a list is remembered by its heads.
    """
    fenced = False
    for line in _lines(text):
        if _FENCE.match(line):
            fenced = not fenced
            continue
        if fenced:
            if stripped := line.strip():
                yield Clause(stripped[:240], "code", False)
            continue
        yield from _of_line(line)


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        for _, piece in windows(line):
            if piece.strip():
                yield piece


def _of_line(line: str) -> Iterator[Clause]:
    if "’" in line:
        line = _APOSTROPHE.sub("'", line)
    listed = _LIST_MARK.match(line) is not None or _LIST_NUMBER.match(line) is not None
    line = _LIST_MARK.sub("", line).strip(" |\t")
    bold = re.match(r"(?:\d{1,3}[.)]\s+)?\*\*", line) is not None
    headed = _HEADED.match(line) if listed or bold else None
    if headed and (headed["mark"] or headed["head"].endswith(":**") or not headed["body"]):
        head = _plain(headed["head"]).strip(" :-–—")
        yield Clause(head, "heading", False)
        line = headed["body"]
        if not line.strip():
            return
        line = _LIST_MARK.sub("", line)
    for sentence in sentences(_plain(line)):
        yield from _of_sentence(sentence)


def _plain(text: str) -> str:
    return _EMPHASIS.sub("", text) if "*" in text or "_" in text or "#" in text else text


def sentences(text: str) -> Iterator[str]:
    """Sentences of one line, with their end marks. Abbreviations, initials and ordinals do not end one."""
    start = 0
    for match in _SENTENCE_END.finditer(text):
        piece = text[start : match.end()]
        if (
            match.group().startswith(".")
            and len(match.group()) == 1
            and _ABBREVIATION.search(piece[-8:])
            and match.end() < len(text)
        ):
            continue
        if piece.strip():
            yield piece.strip()
        start = match.end()
    if text[start:].strip():
        yield text[start:].strip()


def _of_sentence(sentence: str) -> Iterator[Clause]:
    asked = sentence.rstrip("\"'”’»)* ").endswith(("?", "？")) or sentence.endswith(("吗", "か。"))
    if is_empty(sentence):
        return
    pieces = _pieces(sentence)
    for index, piece in enumerate(pieces):
        last = index == len(pieces) - 1
        text = trim(piece)
        if not text or is_empty(text) or not says_something(text):
            continue
        question = asked and (last or _ASKING.match(text) is not None)
        if question:
            text = asked_for(text).rstrip("?？ ") + "?"
            if not says_something(text):
                continue
        yield Clause(text, "question" if question else "statement", index > 0)


def _pieces(sentence: str) -> list[str]:
    """A sentence cut where a new clause begins; pieces too short to stand alone stay with their neighbour."""
    if len(sentence) < 24 and not is_cjk(sentence):
        return [sentence]
    pieces: list[str] = []
    short = sentence.count(" ") < SHORT_SENTENCE and not is_cjk(sentence)
    for piece in (_LIST_CUT if short else _CUT).split(sentence):
        if not piece or not piece.strip():
            continue
        least = 4 if is_cjk(piece) else 12
        if pieces and (len(piece) < least or len(pieces[-1]) < least or _leans(piece)):
            joint = "，" if is_cjk(piece) else ", "
            pieces[-1] = pieces[-1].rstrip(" ,;") + joint + piece
        else:
            pieces.append(piece)
    return pieces or [sentence]


def _leans(piece: str) -> bool:
    """Whether a piece cannot go apart from the one before: a relative clause, or a pronoun with something to keep."""
    return _RELATIVE.match(piece) is not None or (
        _ANAPHOR.match(piece) is not None and _TELLING.search(piece[1:]) is not None
    )


def depends_on_before(clause: str) -> bool:
    """Whether the clause begins with a pronoun that only the clause before it explains."""
    return _ANAPHOR.match(clause) is not None


def num_words(text: str) -> int:
    return len(words(text))
