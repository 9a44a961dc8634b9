"""How a statement speaks: of its speaker, of what is preferred, decided or denied, of the moment, or in general.

Tables of words in several languages, matched against lower case. A tone is a number by which the worth of a statement
is multiplied; a plain statement of a user has 1.0.
"""

from __future__ import annotations

import re

from compression.change import changes
from compression.statements import Statement

QUESTION, CODE, HEADING = 0.34, 0.4, 0.8  # tone of a clause by its kind; a plain statement has 1.0
OWN, STANCE, NEGATION, CHANGING = 1.35, 1.1, 1.6, 1.6  # times: on oneself; a preference or decision; "not"; a change
FLEETING = 0.4  # times: says little outside its moment
COMMENT, PASSING = 0.5, 0.6  # times: on what was just said; a wish that its answer settles
SHORT_COMMENT = 3  # words besides those of chat: more of them tell something of their own
PASTED = 0.4  # times, in text that is quoted at length and not about oneself
TROUBLE, NOISE = 1.6, 0.3  # times, for a tool: an error; a field about the call itself
NAMED = 2.5  # times, for an assistant: what it proposes by name
COMMITTED, ADVICE = 6.0, 0.5  # times, for an assistant: what it did; what one might do

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
    r"usually|must|ha(?:s|ve|d) to|only|want\w*|need\w*|decided?|"
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
    r"^(?:somebody|someone|some people|everyone|everybody)\b|\b(?:told|recommended|said) (?:me|"
    r"us)? ?(?:this|that|it|the opposite)\b|"
    r"今天|昨天|刚才|今日|昨日|さっき"
)
_STANDING = re.compile(r"(?:never|always|do not|don't|from now on|nie|niemals|ne |jamais|不要|别|決して)\b")
_NOISE = re.compile(
    r"(?:^|[ .,])(?:\w*_ms|node|trace\w*|request_id|etag|cursor|request|\w+_at|next_page|page|limit|offset|took|"
    r"elapsed|cached|"
    r"hash|checksum|"
    r"created_at|updated_at|timestamp|success|ok|href|self|_\w+|version): ",
)
_LOGGED = re.compile(r"\[?(?:info|debug|trace|notice)\b")
_TROUBLE = re.compile(
    r"\b(?:error|failed|failure|exception|traceback|warning|denied|timeout|timed out|refused|not found|fatal|"
    r"fehler|erreur)\b|错误|失败|エラー|失敗",
)
_NAMED = re.compile(  # what an assistant proposes by name, or says of the user's own affairs
    r"\bi(?:'d| would)? (?:also |highly |personally )?(?:recommend|suggest|choose|pick|go (?:with|for))\b|"
    r"^your \w+(?: \w+)? (?:is|are|was|were|has|will)\b|\bha(?:s|ve) \w+ your\b|"
    r"\b(?:my (?:recommendation|suggestion|pick)|the (?:best|right|correct) \w+ (?:is|would be)|the answer is)\b|"
    r"\bich (?:empfehle|würde)\b|\bje (?:recommande|conseille|suggère)\b|我(?:推荐|建议)|おすすめは",
)
_ADVICE = re.compile(
    r"^(?:consider|try|use|make sure|ensure|be sure|avoid|look for|check|choose|keep|start|aim|opt|take|add|set|"
    r"create|practice|don't|"
    r"you (?:can|could|may|might|should)|it's (?:important|essential|best|a good idea)|this (?:will|can|could)|"
    r"these|they|if you|when|some|many)\b",
)


def tone_of(statement: Statement) -> float:
    """How a statement speaks: of the speaker, of what is wanted or not, or in general."""
    text, role = statement.text.lower(), statement.role
    tone = {"question": QUESTION, "code": CODE, "heading": HEADING}.get(statement.kind, 1.0)
    if role == "tool":
        if _LOGGED.match(text):
            tone *= NOISE
        return tone * (TROUBLE if _TROUBLE.search(text) else 1.0) * (NOISE if _NOISE.search(text) else 1.0)
    if role == "assistant":
        if _COMMITMENT.search(text):
            return tone * COMMITTED
        if statement.facts and _NAMED.search(text):
            return tone * NAMED
        return tone * (ADVICE if not statement.chosen and _ADVICE.match(text) else 1.0)
    if role in ("call", "reasoning") or statement.kind == "code":
        return tone
    if statement.kind == "heading":
        tone *= 0.5
    if statement.pasted and not _FIRST_PERSON.search(text):
        return tone * PASTED
    if _COMMENT.match(text) and not statement.facts and sum(not term.chat for term in statement.terms) <= SHORT_COMMENT:
        tone *= COMMENT
    elif _PASSING.match(text):
        tone *= PASSING
    elif _FIRST_PERSON.search(text):
        tone *= OWN
    if _FLEETING.search(text) and not _STANDING.match(text):
        tone *= FLEETING
    if _STANCE.search(text):
        tone *= STANCE
    if _NEGATION.search(text):
        tone *= NEGATION
    if changes(text):
        tone *= CHANGING
    return tone


def turns_round(text: str) -> bool:
    """Whether a text says "not" or "failed" in some way: a clause without it would say something else."""
    return _NEGATION.search(text.lower()) is not None or _TROUBLE.search(text.lower()) is not None


def is_noise(statement: Statement) -> bool:
    """Whether a field of a tool's output is about the call, not about what was asked."""
    return statement.kind == "field" and _NOISE.search(statement.text.lower()) is not None
