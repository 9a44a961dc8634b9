"""From running text to clauses worth keeping: sentences, clauses, and what can be cut from their ends.

Only whole words at the ends and known empty phrases go; the inside of a clause stays as it was said, so that a value
of several words ("under my bed") survives letter by letter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from compression.words import CHAT_WORDS, content_words, is_cjk, words

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
_FENCE = re.compile(r"^\s*(?:```|~~~)")

_CUT = re.compile(
    r"\s*;\s+|\s+[—–]\s+|\s+-\s+|"
    r",\s+(?=(?:but|so|because|and|although|though|while|whereas|since|unless|however|yet|or)\s(?:i|we|you|he|"
    r"she|it|they|my|our|"
    r"the|his|her|their|its|this|that|there|please|can|could|what|how|is|are|do|does|if)\b)|"
    r",\s+(?=(?:can|could|would|will|please|do)\s(?:you|me|we)\b|(?:aber|denn|weil|und\s(?:ich|wir|er|sie|das|"
    r"die|der|mein)|doch|"
    r"sondern|mais|car|et\s(?:je|nous|il|elle|mon|ma|le|la)|parce|pero|porque|y\s(?:yo|mi|el|la)|ma|perché|"
    r"e\s(?:io|il|la|mio))\b)|"
    r"\s+(?=(?:but|because)\s(?:i|we|my|our|he|she|it|they|the|this|that)\b)|"
    r"[，；]\s*",
    re.IGNORECASE,
)
_ANAPHOR = re.compile(
    r"^(?:(?:and|but|so|or|also|und|aber|et|mais|y|pero)\s+)?(?:it|its|they|them|their|this|that|these|those|he|"
    r"she|his|her|which|who|there|"
    r"es|er|sie|das|dies|il|elle|ils|elles|cela|ça|ce|ella|ellos|eso|它|他|她|他们|这|那|それ|これ|彼|彼女)\b",
    re.IGNORECASE,
)

_LEAD = re.compile(
    r"^(?:[\s,.:;!?…\-–—*]+|(?:"
    r"oh|ah|um|uh|hmm+|well|so|and|also|but|anyway|anyways|okay|ok|alright|yeah|yes|yep|sure|right|hey|hi|hello|"
    r"hi there|good (?:morning|"
    r"evening|afternoon)|dear [a-z]+|thanks(?: so much| a lot| again)?|thank you(?: so much| very much| again)?|"
    r"great|perfect|awesome|cool|nice|"
    r"sorry|please|actually|basically|honestly|frankly|obviously|of course|in fact|"
    r"to be honest|as i said|as you know|as mentioned(?: before| earlier)?|as i mentioned(?: before| earlier)?|"
    r"by the way|btw|fyi|for (?:your|the) (?:information|record)|"
    r"just so you know|just to let you know|just to be clear|you know|i mean|i guess|i suppose|"
    r"(?:one|another) (?:more )?thing(?: is(?: that)?| to (?:note|know)(?: is(?: that)?)?)?|"
    r"i should (?:also )?(?:mention|say|add|note)(?: that)?|i forgot to (?:mention|say|tell you)(?: that)?|"
    r"i(?:'d| would) (?:also )?like to (?:mention|add|say|note)(?: that)?|i (?:just )?want(?:ed)? to (?:mention|"
    r"let you know|say|add|tell you)(?: that)?|"
    r"let me (?:also )?(?:mention|add|tell you)(?: that)?|(?:please )?(?:note|remember|keep in mind|"
    r"bear in mind|be aware|don't forget)(?: that)?(?=\s|:|,)|"
    r"it(?:'s| is) (?:worth|important) (?:noting|mentioning|to note|to mention|to remember)(?: that)?|"
    r"in (?:summary|conclusion|addition|general)|"
    r"(?:first|second|third|final|last)ly|additionally|furthermore|moreover|overall|however|therefore|then|"
    r"besides|meanwhile|"
    r"übrigens|also|ja|nein,? also|na ja|naja|ach|hallo|danke|vielen dank|eigentlich|ehrlich gesagt|"
    r"nur zur info|zur info|wie gesagt|"
    r"ich wollte (?:noch )?sagen,? dass|ach ja|und|aber|bitte|au fait|en fait|bon|alors|ah oui|bonjour|"
    r"merci(?: beaucoup)?|d'ailleurs|pour info|"
    r"je voulais (?:aussi )?(?:dire|préciser) que|et|mais|por cierto|bueno|pues|hola|gracias|además|y|pero|"
    r"allora|comunque|tra l'altro|ciao|grazie"
    r")(?=[\s,.:;!?…\-–—]|$)[\s,.:;!?…\-–—]*)",
    re.IGNORECASE,
)
_LEAD_CJK = re.compile(
    r"^(?:[\s，,、。！!：:]+|顺便(?:说一下|说一句|提一下|一提)?|对了|另外|其次|首先|还有|那么|嗯+|哦+|啊+|好的|好吧|谢谢(?:你|您)?|你好|您好|请注意|请记住|"
    r"需要说明的是|值得一提的是|总之|因此|所以|而且|并且|但是|不过|然后|ちなみに|ところで|あの+|えっと|えーと|そういえば|それから|また|まず|次に|"
    r"こんにちは|ありがとう(?:ございます)?|はい|なお|そして|でも|だから|では|じゃあ|그런데|그리고|참고로|안녕하세요|감사합니다)"
)
_REQUEST = re.compile(
    r"^(?:(?:can|could|would|will) you (?:please |kindly |maybe |possibly |also )*|please |i(?:'d|"
    r" would) (?:like|love) (?:you )?(?:to )?|i need (?:you )?to |"
    r"i(?:'m| am) (?:looking for|wondering(?: if| whether)?)\s?|i was (?:wondering|hoping)(?: if| whether)?\s?|"
    r"i want (?:you )?to know |do you (?:know|have)(?: of| any)*\s|"
    r"kannst du (?:mir )?(?:bitte )?|können sie (?:mir )?(?:bitte )?|könntest du (?:mir )?(?:bitte )?|peux-tu |"
    r"pouvez-vous |pourriez-vous |est-ce que (?:tu peux|vous pouvez) |"
    r"puedes |podrías |puoi |potresti )"
    r"(?:(?:please |me |us |mir |m')*(?:suggest|recommend|tell|give|explain|help(?: me| us)?(?: with| to)?|show|"
    r"provide|share|describe|list|write|make|find|know|"
    r"erklären|sagen|helfen|zeigen|expliquer|dire|aider|donner|decirme|ayudarme|explicar)\s+)?(?:(?:me|us|mir|"
    r"moi)\s+)?(?:(?:with|about)\s+)?(?:(?:some|any|a few|more|the best way to)\s+)*",
    re.IGNORECASE,
)
_TAIL = re.compile(
    r"(?:[\s,;:，、；：\-–—]+|(?:,?\s+(?:please|thanks|thank you|by the way|btw|you know|i guess|i think|i suppose|"
    r"if (?:that|it) (?:helps|matters|makes sense|is possible|'s possible)|"
    r"if possible|as well|too|though|in case (?:that|it) (?:helps|matters)|for (?:your|the) (?:information|"
    r"record)|just so you know|fyi|lol|haha|bitte|danke|übrigens|"
    r"merci|s'il (?:te|vous) plaît|svp|por favor|gracias|per favore|grazie|right|okay|ok|so (?:please )?(?:keep|"
    r"bear) (?:that|it|this) in mind))"
    r"|(?:谢谢|吧|呢|啊|哦|呀|よね|ね))[\s.!。！]*$",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"\s(?:kind of|sort of|more or less|you know|i mean|i guess|i suppose|like i said|as i said|to be honest|"
    r"if you will|so to speak)(?=[\s,])(?:,)?|"
    r",\s(?:of course|actually|honestly|basically|however|for example|for instance|though|you know|by the way)(?=,)|"
    r"(?<=[\s])(?:really|basically|actually|literally|honestly|quite|simply|definitely|absolutely|"
    r"totally)\s(?=[a-z])",
    re.IGNORECASE,
)
_EMPTY = re.compile(
    r"^(?:(?:you're|you are) (?:very )?welcome|(?:i'm|i am) (?:glad|happy|here|excited|thrilled|sorry to hear|"
    r"always here)\b(?!.*\d).*|(?:i'd|i would|i'll) be (?:happy|glad|delighted) to\b(?!.*\d).*|let me know\b.*|"
    r"feel free to\b.*|(?:i )?hope (?:this|that|it|you|these)\b.*|(?:that|it|this)(?:'s| is| sounds|"
    r" looks)? (?:a )?(?:really )?(?:great|good|nice|wonderful|helpful|fantastic|excellent|amazing|awesome|"
    r"perfect|interesting)\b(?:\W+\w+){0,4}\W*|"
    r"(?:that|it|this) (?:really )?(?:helps?|makes sense|works)\b(?:\W+\w+){0,4}\W*|(?:what|how) (?:a |"
    r"an )?(?:great|good|lovely|wonderful|fantastic|excellent|exciting|interesting)\b.{0,60}|(?:great|good|"
    r"excellent|interesting) (?:question|idea|choice|point|job|luck)\b.{0,40}|"
    r"congratulations\b.{0,60}|here (?:are|is|'s)\b.{0,120}:|here are (?:some|a few)\b.*|sounds (?:great|good|"
    r"like a plan)\b.{0,30}|no (?:problem|worries)\b.{0,20}|got it\b.{0,20}|i (?:see|understand|"
    r"appreciate\b.{0,60})|"
    r"(?:as an ai|i'm just an ai)\b.*|(?:do you have|are there|is there) any(?:thing)? (?:other|else|more)\b.*|"
    r"(?:would you like|do you want|want me|shall i) (?:me )?to\b.{0,100}\?|is there anything\b.*|"
    r"what do you think\W*|"
    r"good (?:morning|evening|afternoon|night|day)\W*|how are you\b.{0,30}|(?:have|enjoy) (?:a|your)\b.{0,40}|"
    r"remember to\b.{0,20}|"
    r"(?:noted|understood|will do|done|okay|ok|sure|yes|no|verstanden|notiert|compris|noté|entendido)\W*|"
    r"gern(?:e)? geschehen.*|gute frage.*|ich hoffe,? .*|lass(?:en sie)? (?:es )?mich wissen.*|ich helfe (?:dir|"
    r"ihnen) gern.*|das (?:klingt|ist) (?:gut|toll|super)\W*|"
    r"bonne question.*|j'espère que.*|n'hésite[zs]? pas.*|avec plaisir.*|je suis (?:ravi|heureux).*|"
    r"¡?buena pregunta.*|espero que.*|no dudes.*|con gusto.*|"
    r".{0,6}(?:希望.{0,12}(?:帮助|有用|帮到)|如果.{0,8}(?:问题|需要).{0,20}(?:告诉|随时|联系).*|很高兴.{0,12}|不客气|好问题|当然可以|没问题|祝你.*|"
    r"以下是.{0,30}|明白了|好的|谢谢.{0,8})\W*|"
    r".{0,4}(?:お役に立て.*|ご質問.*お気軽に.*|どういたしまして|わかりました|承知.*しました|もちろんです|かしこまりました|よろしくお願い.*|以下の.{0,20}です)\W*)$",
    re.IGNORECASE | re.DOTALL,
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
        if line.strip():
            yield line


def _of_line(line: str) -> Iterator[Clause]:
    listed = _LIST_MARK.match(line) is not None or _LIST_NUMBER.match(line) is not None
    line = _LIST_MARK.sub("", line).strip(" |\t")
    bold = re.match(r"(?:\d{1,3}[.)]\s+)?\*\*", line) is not None
    headed = _HEADED.match(line) if listed or bold else None
    if headed and (headed["mark"] or headed["head"].endswith(":**") or not headed["body"]):
        head = _EMPHASIS.sub("", headed["head"]).strip(" :-–—")
        yield Clause(head, "heading", False)
        line = headed["body"]
        if not line.strip():
            return
        line = _LIST_MARK.sub("", line)
    for sentence in sentences(_EMPHASIS.sub("", line)):
        yield from _of_sentence(sentence)


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
    if _EMPTY.match(sentence):
        return
    pieces = _pieces(sentence)
    for index, piece in enumerate(pieces):
        last = index == len(pieces) - 1
        text = trim(piece)
        if not text or _EMPTY.match(text) or not says_something(text):
            continue
        question = asked and (last or len(pieces) == 1)
        if question:
            text = _REQUEST.sub("", text, count=1).rstrip("?？ ") + "?"
            if not says_something(text):
                continue
        yield Clause(text, "question" if question else "statement", index > 0)


def _pieces(sentence: str) -> list[str]:
    """A sentence cut where a new clause begins; pieces too short to stand alone stay with their neighbour."""
    if len(sentence) < 24 and not is_cjk(sentence):
        return [sentence]
    pieces: list[str] = []
    for piece in _CUT.split(sentence):
        if not piece or not piece.strip():
            continue
        least = 4 if is_cjk(piece) else 12
        if pieces and (len(piece) < least or len(pieces[-1]) < least or _ANAPHOR.match(piece)):
            joint = "，" if is_cjk(piece) else ", "
            pieces[-1] = pieces[-1].rstrip(" ,;") + joint + piece
        else:
            pieces.append(piece)
    return pieces or [sentence]


def trim(clause: str) -> str:
    """A clause without opening fillers, closing politeness and hedges."""
    text = " ".join(clause.split())
    text = text.rstrip(' .!。！…"”»').lstrip('"“«') if text.count('"') % 2 else text.rstrip(" .!。！…")
    lead, tail = (_LEAD_CJK, _TAIL) if is_cjk(text) else (_LEAD, _TAIL)
    for _ in range(6):
        shorter = lead.sub("", text, count=1)
        if shorter == text:
            break
        text = shorter
    for _ in range(3):
        shorter = tail.sub("", text)
        if shorter == text:
            break
        text = shorter
    return _HEDGE.sub("", text).strip()


def says_something(text: str) -> bool:
    """At least one word that is neither a function word nor a word of chat."""
    return len(text) > 60 or any(word not in CHAT_WORDS for word in content_words(text)) or any(map(str.isdigit, text))


def depends_on_before(clause: str) -> bool:
    """Whether the clause begins with a pronoun that only the clause before it explains."""
    return _ANAPHOR.match(clause) is not None


def num_words(text: str) -> int:
    return len(words(text))
