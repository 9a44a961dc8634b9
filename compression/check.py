"""Whether a model's answer may stand as a summary: what is cut from it, and what refuses it.

Everything here was seen in the field: error sentences stored as the summary, reasoning cut off in the middle, answers
longer than their source, in another language, in a loop, or going on with the conversation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compression.clauses import sentences
from compression.conversation import Turn
from compression.guard import Haystack
from compression.patterns import FactKind, spans
from compression.words import content_words, language_of, languages, normalise, scripts, words

__all__ = ["Checked", "check", "cut_to"]

Count = Callable[[str], int]
OVER_BUDGET = 1.5  # times the budget that is still cut at a sentence; past it the answer ignored its limit
FAR_OVER_BUDGET_CHARS = 40  # for each token of the budget: so long a text needs no look
LOOP_WORDS = 6  # length of the run of words that is counted
LOOP_SHARE = 0.3  # of all such runs that may be repetitions
INVENTED_SHARE = 0.34  # of the sentences that may name what the source does not hold
COUNTED = 12  # up to so many a summary may count by itself ("three options")
FOREIGN_SHARE = 0.25  # of the source's letters, for a script to count as one of its own


@dataclass(frozen=True, slots=True)
class Checked:
    """`text` is None where the answer is refused. `problems` says what was found, cut or refused, one word first."""

    text: str | None
    problems: tuple[str, ...]


_REASONING = re.compile(r"<(?P<closes>/?)(?P<name>think|thinking|reasoning|analysis)>", re.IGNORECASE)
_CONTROL = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|<｜[^｜\n]{1,40}｜>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|<(?:bos|eos|pad|unk)>"
)
_ROLE_LINE = re.compile(
    r"^[^\S\n]*(?:#+[^\S\n]*)?(?:\*\*)?(?:user|human|assistant|system|ai)(?:\*\*)?\s*:",
    re.IGNORECASE | re.MULTILINE,
)
_ERROR = re.compile(
    r"^\W*(?:(?:an )?error\b.{0,40}(?:generating|occurred|processing|creating|while)|error generating|error:|"
    r"(?:internal|unexpected) (?:server )?error|failed to (?:generate|create|summari[sz]e)|"
    r"(?:an|some) (?:unexpected )?error (?:has )?occurred|something went wrong|(?:request|connection|"
    r"read) timed? ?out|timeout\b|rate limit|too many requests|"
    r"(?:service|model) (?:is )?(?:temporarily )?(?:unavailable|overloaded)|bad gateway|traceback \(most recent|"
    r"\d{3} (?:internal|bad|service|gateway|too many|unauthorized|forbidden|not found)|"
    r"no summary(?: available| generated)?\W*$|summary (?:unavailable|not available|generation failed)|none\W*$|"
    r"null\W*$|undefined\W*$|n/?a\W*$|fehler (?:beim|bei)|erreur (?:lors|de)|生成.{0,6}(?:失败|出错)|エラー)",
    re.IGNORECASE,
)
_REFUSAL = re.compile(
    r"^\W*(?:(?:i'?m|i am) (?:sorry|afraid|unable|not able)|sorry,|i apologi[sz]e|my apologies|i (?:can'?t|"
    r"cannot|can not|won'?t|do not|don'?t) (?:help|assist|provide|summari[sz]e|do that|comply|fulfil|"
    r"have (?:access|enough|the))|"
    r"as an ai\b|(?:unfortunately|regrettably),? (?:i|we)\b|es tut mir leid|ich kann (?:das|dabei|ihnen|"
    r"dir) (?:leider )?nicht|leider kann ich|je suis désolé|désolé,|je ne peux pas|lo siento|no puedo (?:ayudar|"
    r"resumir)|"
    r"抱歉|很抱歉|对不起|我无法|申し訳(?:ありません|ございません)|すみません|죄송)",
    re.IGNORECASE,
)
_MARKUP = re.compile(
    r"^\s*(?:<!doctype|<html|<\?xml|<head|<body|\{\s*\"(?:error|detail|message|code|object|status)\"|"
    r"\[\s*\{\s*\"(?:error|message)\")",
    re.IGNORECASE,
)
_INTRODUCTION = re.compile(
    r"^\W*(?:(?:sure|certainly|of course|okay|ok|absolutely)[!,.]?\s*)?(?:here(?:'s| is) (?:a |the |my |"
    r"your )?(?:brief |concise |short )?summary[^:\n]{0,60}:|"
    r"(?:the )?summary(?: of (?:the )?conversation)?:|zusammenfassung:|hier ist (?:die|"
    r"eine) zusammenfassung[^:\n]{0,40}:|(?:voici (?:le|un) )?résumé[^:\n]{0,40}:|"
    r"resumen:|总结[：:]|摘要[：:]|要約[：:])\s*",
    re.IGNORECASE,
)
_PARROT = re.compile(
    r"summari[sz]e one part of our conversation|your summary will replace|whatever it leaves out is lost|"
    r"answer with the summary alone|keep exactly as written|"
    r"\b(?:the )?(?:\d+|one) (?:quoted )?turns?\b.{0,12}\bfrom [\"“]|"
    r"===== quoted conversation|material to summari[sz]e",
    re.IGNORECASE,
)
_CHAT = re.compile(
    r"^\W*(?:sure|certainly|of course|absolutely|great question|good question|thanks?(?: you)?|you'?re welcome|"
    r"hello|hi there|hey|i'?d be happy to|i'?m happy to|"
    r"gerne|natürlich|bien sûr|avec plaisir|claro|por supuesto|当然|好的|もちろん)\b",
    re.IGNORECASE,
)
_OFFER = re.compile(
    r"let me know|would you like|do you want|shall i|can i help|feel free|is there anything", re.IGNORECASE
)
_CLAIMS: frozenset[FactKind] = frozenset(
    ("identifier", "url", "email", "path", "phone", "version", "money", "number", "measure", "date", "time")
)


def check(answer: str, turns: Sequence[Turn], *, budget_tokens: int, count: Count, finished: bool) -> Checked:
    """The answer as it may be stored, or the reasons why not. `finished` is False where the model was cut off.

    A checked text checked again comes back unchanged.
    """
    problems: list[str] = []
    source = "\n".join(item.text for turn in turns for item in turn.items)
    text = _without_reasoning(answer, problems)
    if text is None:
        return Checked(None, tuple(problems))
    if (plain := _INTRODUCTION.sub("", text, count=1)) != text:
        text = plain
    text = text.strip()
    if len(text) > FAR_OVER_BUDGET_CHARS * max(1, budget_tokens):
        return Checked(None, (*problems, f"long: {len(text)} characters for a budget of {budget_tokens} tokens"))
    for name, refuse in _REFUSALS:
        if refuse(text):
            return Checked(None, (*problems, name))
    text = _without_markers(text, problems)
    if not finished:
        problems.append("unfinished: the model was cut off")
        text = _whole_sentences(text)
    if problem := _wrong_language(text, turns):
        return Checked(None, (*problems, problem))
    text = _without_invented(text, source, problems)
    if not text or not content_words(text):
        return Checked(None, (*problems, "empty"))
    if _loops(text):
        return Checked(None, (*problems, "loop: the same words again and again"))
    size = count(text)
    if size > OVER_BUDGET * budget_tokens:
        return Checked(None, (*problems, f"long: {size} tokens for a budget of {budget_tokens}"))
    if size >= count(source):
        return Checked(None, (*problems, f"long: {size} tokens, not less than its source"))
    if size > budget_tokens:
        problems.append(f"cut: {size} tokens for a budget of {budget_tokens}")
        text = cut_to(text, budget_tokens, count)
        if not text:
            return Checked(None, (*problems, "long: no sentence fits the budget"))
    return Checked(text, tuple(problems))


def _without_reasoning(answer: str, problems: list[str]) -> str | None:
    """The answer after its last stretch of reasoning, and what stood between two; None where one does not end."""
    kept: list[str] = []
    opened: str | None = None
    at = 0
    for tag in _REASONING.finditer(answer):
        name = tag["name"].lower()
        if opened is None and not tag["closes"]:
            kept.append(answer[at : tag.start()])
            opened = name
        elif opened in (None, name) and tag["closes"]:
            if opened is None:  # it began in the prompt
                kept.clear()
            opened, at = None, tag.end()
    if opened is not None:
        problems.append("reasoning: does not end")
        return None
    if at:
        problems.append("reasoning: cut out")
    return "".join((*kept, answer[at:]))


def _parrots(text: str) -> bool:
    return _PARROT.search(text) is not None


def _chats(text: str) -> bool:
    if text.rstrip(" \"'*)").endswith(("?", "？")) or _CHAT.match(text) is not None:
        return True
    ended = text.rstrip().rstrip(".?!")
    return _OFFER.search(ended, 1 + max(map(ended.rfind, ".?!\n"))) is not None


_REFUSALS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("empty", lambda text: not text),
    ("error: the text is an error message", lambda text: _ERROR.match(text) is not None),
    ("markup: the text is an error page or object", lambda text: _MARKUP.match(text) is not None),
    ("refusal: the model declined", lambda text: _REFUSAL.match(text) is not None),
    ("parrot: the text repeats its instruction", _parrots),
    ("chat: the text goes on with the conversation", _chats),
)


def _without_markers(text: str, problems: list[str]) -> str:
    """Nothing after a control token or a second speaker's line: there the model began to play the conversation."""
    ends = [match.start() for match in _CONTROL.finditer(text)]
    if len(roles := list(_ROLE_LINE.finditer(text))) and roles[0].start() > 0:
        ends.append(roles[0].start())
    elif roles:
        ends.append(0)
    if not ends:
        return text
    problems.append("markers: cut at a control token or a speaker's line")
    return text[: min(ends)].strip()


def _whole_sentences(text: str) -> str:
    """The text up to its last sentence end or line end."""
    ends = list(re.finditer(r"[.!?。！？](?=[\s\"'”」)]|$)|[。！？]|\n", text))
    return text[: ends[-1].end()].strip() if ends else ""


def _without_invented(text: str, source: str, problems: list[str]) -> str:
    """Without the sentences that name a number or identifier that the source does not hold; "" where they are many."""
    there = Haystack(source)
    kept: list[str] = []
    dropped = total = 0
    for line in text.splitlines():
        good: list[str] = []
        for sentence in sentences(line):
            total += 1
            invented = [
                span.value for span in spans(sentence) if span.kind in _CLAIMS and not _holds(there, span.value)
            ]
            if invented:
                dropped += 1
                problems.append(f"invented: {invented[0][:60]}")
            else:
                good.append(sentence)
        kept.append(" ".join(good))
    if dropped == 0:
        return text
    if dropped > INVENTED_SHARE * total and dropped > 1:
        return ""
    return "\n".join(line for line in kept if line).strip()


def _holds(there: Haystack, value: str) -> bool:
    value = normalise(value)
    if there.has(value) or (value.isdecimal() and int(value) <= COUNTED):
        return True
    digits = re.findall(r"\d+(?:[.,]\d+)*", value)
    if digits and not re.search(r"[a-z_]\d|\d[a-z_]", value):
        return all(there.has(number) for number in digits)
    return not any(map(str.isdigit, value)) and all(there.has(part) for part in re.findall(r"\w+", value))


def _loops(text: str) -> bool:
    """Runs of words that come again: more than a few, or one sentence or line three times."""
    found = words(text)
    runs = Counter(tuple(found[i : i + LOOP_WORDS]) for i in range(len(found) - LOOP_WORDS + 1))
    total = sum(runs.values())
    if total >= 8 and sum(number - 1 for number in runs.values()) > LOOP_SHARE * total:
        return True
    tail = found[-24:]
    if len(tail) >= 12 and len(set(tail)) <= 3:
        return True
    said = Counter(
        normalise(sentence) for line in text.splitlines() for sentence in sentences(line) if len(sentence) > 12
    )
    return bool(said) and max(said.values()) >= 3


def _wrong_language(text: str, turns: Sequence[Turn]) -> str | None:
    said = "\n".join(
        item.text for turn in turns for item in turn.items if item.type == "message" and item.role != "system"
    )
    if not said.strip():
        return None
    ours, theirs = scripts(text), scripts(said)
    if sum(ours.values()) < 12 or sum(theirs.values()) < 12:
        return None
    east = {"han", "kana"}
    script = ours.most_common(1)[0][0]
    share = sum(theirs[name] for name in (east if script in east else {script})) / sum(theirs.values())
    if share < FOREIGN_SHARE:
        return f"language: written in {script} script"
    if script in east and ours["kana"] * 8 > sum(ours.values()) and theirs["kana"] * 30 < sum(theirs.values()):
        return "language: Japanese for a Chinese conversation"
    if script in east and ours["kana"] == 0 and ours["han"] > 30 and theirs["kana"] * 4 > sum(theirs.values()):
        return "language: Chinese for a Japanese conversation"
    return _wrong_latin(text, said) if script == "latin" else None


def _wrong_latin(text: str, said: str) -> str | None:
    language, spoken = language_of(text), languages(said)
    here = languages(text)
    if language is None or here[language] < 5 or not spoken:
        return None
    most = spoken.most_common(1)[0]
    if most[1] >= 8 and spoken[language] * 3 < most[1] and here[most[0]] * 2 < here[language]:
        return f"language: written in {language}, the conversation is in {most[0]}"
    return None


def cut_to(text: str, budget_tokens: int, count: Count) -> str:
    """The longest beginning of whole sentences within the budget, "" where not even the first fits."""
    pieces = [
        (line_number, sentence) for line_number, line in enumerate(text.splitlines()) for sentence in sentences(line)
    ]
    low, high = 0, len(pieces)
    while low < high:
        middle = (low + high + 1) // 2
        if count(_join(pieces[:middle])) <= budget_tokens:
            low = middle
        else:
            high = middle - 1
    return _join(pieces[:low])


def _join(pieces: Sequence[tuple[int, str]]) -> str:
    lines: list[list[str]] = []
    last = -1
    for number, sentence in pieces:
        if number != last:
            lines.append([])
            last = number
        lines[-1].append(sentence)
    return "\n".join(" ".join(line) for line in lines)
