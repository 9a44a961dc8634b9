"""Names of people, places and things in a text: capitals in Western scripts, katakana, and cues in Chinese.

Where every noun has a capital (German), a capital alone makes no name. At the beginning of a sentence neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from compression.words import ALL_FUNCTION_WORDS, CHAT_WORDS

_CAP = r"[A-ZÀ-ÖØ-ÞĀ-ŽА-ЯΑ-Ω][\w'’&\-]*[\w]|[A-ZÀ-ÖØ-ÞА-Я]\.?(?=\s[A-ZÀ-ÖØ-ÞА-Я])"
_NAME = re.compile(
    r"(?<![\w])(?:(?:Dr|Mr|Mrs|Ms|Prof|St|Hr|Fr|Herr|Frau|Mme|Mlle|M|Sr|Sra)\.?\s)?(?:" + _CAP + r")"
    r"(?:\s(?:(?:of|de|du|des|da|do|dos|di|del|della|van|von|der|den|la|le|les|el|al|bin|ibn|y|&|the)\s){0,2}"
    r"(?:" + _CAP + r"|\d{1,4}(?![\w.,:%]))){0,5}"
)
_KATAKANA = re.compile(r"[ァ-ヴー][ァ-ヴー・＝]{2,}")
_SURNAMES = (
    "王李张刘陈杨赵黄周吴徐孙胡朱高林何郭马罗梁宋郑谢韩唐冯于董萧程曹袁邓许傅沈曾彭吕苏卢蒋蔡贾丁魏薛叶阎余潘杜戴夏钟汪田任姜范方石"
    "姚谭廖邹熊金陆郝孔白崔康毛邱秦江史顾侯邵孟龙万段雷钱汤尹黎易常武乔贺赖龚文"
)
_CJK_NAME = re.compile(
    r"(?:老|小)?[" + _SURNAMES + r"][\u4e00-\u9fff]{0,2}?"
    r"(?=先生|女士|老师|经理|总监|医生|教授|同学|小姐|阿姨|叔叔|师傅|主任|律师)|"
    r"(?:(?![我你他她是的在和与跟请问有给对])[々\u4e00-\u9fff]){1,4}"
    r"(?=さん|様|氏|先生|ちゃん|くん|先輩|部長|社長|課長)|"
    r"(?:叫|名叫|姓名是|名字是|名字叫|联系人是|经理是|老板是)([\u4e00-\u9fff]{2,4})(?=[，。,.！!、；\s]|$)|"
    r"(?:住在|位于|搬到|去|来自|在)"
    r"([\u4e00-\u9fff]{2,6}?(?:市|省|县|区|路|街|镇|村|大学|公司|医院|酒店|机场|车站))|"
    r"[\uac00-\ud7a3]{2,4}(?=씨|님)"
)
_NOT_NAMES_TABLE = """ok okay yes no hi hello hey thanks thank dear please sure great sorry well also however
    additionally furthermore moreover overall finally first second third next then note important here there what when
    where why how who which i i'm i've i'd i'll tip step example steps tips summary conclusion introduction pros cons q
    a ps pm am user assistant tool system call asked info error warn warning
    debug fatal none null true false failures failed passed"""
_NOT_NAMES = frozenset(_NOT_NAMES_TABLE.split())
_SENTENCE_START = re.compile(
    r"(?:^|[.!?:;…。！？]\s*[\"'“”)\]]*\s*|\n\s*(?:[-*•+]\s+|\d+[.)]\s+|#+\s+)?|^\s*(?:[-*•+]\s+|\d+[.)]\s+)|"
    r"[\"“«(]|\*\*)$"
)
_CONNECTED = re.compile(r"\s[a-zäöü]+\s|^[a-zäöü]+\s")
_GERMAN_BEFORE = re.compile(
    r"(?:Herrn?|Frau|Dr\.?|heißt|heiße|namens|nach|aus|Familie|"
    r"Stadt|Firma|in)\s$"
)


def names(text: str, *, german: bool, cjk: bool) -> Iterator[tuple[int, int]]:
    """Where names stand in the text."""
    for match in _NAME.finditer(text):
        if span := _named(text, *match.span(), german=german):
            yield span
    if cjk:
        for pattern in (_KATAKANA, _CJK_NAME):
            for match in pattern.finditer(text):
                yield match.span(match.lastindex or 0)


def _named(text: str, start: int, end: int, *, german: bool) -> tuple[int, int] | None:
    first, _, rest = text[start:end].partition(" ")
    at_start = _SENTENCE_START.search(text[max(0, start - 8) : start]) is not None
    if _is_common(first):
        if not rest or rest.casefold() in _NOT_NAMES:
            return None
        start += len(first) + 1
        at_start = False
        first, _, rest = rest.partition(" ")
    while rest and _is_common(rest.rpartition(" ")[2]):
        end -= len(rest.rpartition(" ")[2]) + 1
        rest = rest.rpartition(" ")[0]
    if end - start < 2:
        return None
    if german and _CONNECTED.search(rest):
        rest = ""
    if rest or (len(first) > 1 and first.isupper()):
        return start, end
    if at_start or (german and not _GERMAN_BEFORE.search(text[max(0, start - 10) : start])):
        return None
    return start, end


def _is_common(word: str) -> bool:
    plain = word.casefold()
    return plain in ALL_FUNCTION_WORDS or plain in CHAT_WORDS or plain in _NOT_NAMES
