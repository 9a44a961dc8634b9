"""Dates, times, amounts of money, measures and numbers in a text, Western and Chinese / Japanese. Only patterns."""

from __future__ import annotations

import re

from compression.words import NUMBER_WORDS

NUM = r"\d+(?:[.,'’\u00a0\u202f]\d+)*"
_HAN_NUM = r"[〇零一二两三四五六七八九十百千万亿億兆]{1,20}"
_HAN_DAY = r"(?:\d{1,2}|[一二三四五六七八九十]{1,3})"
_MONTH = (
    r"(?:jan(?:uary|uar|vier)?|feb(?:ruary|ruar)?|fév(?:rier)?|mar(?:ch|s|zo)?|mär(?:z)?|apr(?:il)?|avr(?:il)?|may|mai|"
    r"mayo|jun[ei]?|juin|jul[yi]?|juillet|juli|aug(?:ust)?|août|sept?(?:ember|embre)?|o[ck]t(?:ober|obre)?|"
    r"nov(?:ember|embre)?|de[cz](?:ember)?|déc(?:embre)?|enero|febrero|abril|junio|julio|agosto|septiembre|octubre|"
    r"noviembre|diciembre)\.?"
)
_DAY = (
    r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)days?|(?:mon|diens|donners|frei|sams|sonn)tags?|mittwochs?|"
    r"(?:lun|mar|mercre|jeu|vendre|same)dis?|dimanches?|lunes|martes|miércoles|jueves|viernes|sábados?|domingos?)"
)
_BEFORE_DAY = r"(?:next|last|this|every|every other|nächsten?|letzten?|jeden|prochain)"
_L, _R = r"(?<![A-Za-z0-9_])", r"(?![A-Za-z0-9_])"
_UNIT = (
    r"(?:%|‰|°\s?[CF]?|km/h|mph|k?[mg]?[bB]ps|[kKMGT]i?B|bytes?|tokens?|[kcmµn]?m²?|m³|k?g|mg|lbs?|pounds?|oz|ml|cl|"
    r"l|litres?|liters?|k?Wh?|k?V|m?A|Hz|[kMG]Hz|px|dpi|ms|s|secs?|seconds?|min|mins|minutes?|h|hrs?|hours?|days?|"
    r"nights?|weeks?|months?|years?|yrs?|miles?|feet|foot|ft|inch(?:es)?|meters?|metres?|kilometers?|kilos?|"
    r"percent|people|persons?|guests?|times|Tage?n?|Stunden?|Minuten?|Wochen?|Monate?n?|Jahre?n?|Uhr|Prozent|Personen|"
    r"jours?|heures?|semaines?|mois|ans|années?|días?|horas?|semanas?|meses|años?)"
)
_CJK_UNIT = (
    r"(?:个月|ヶ月|か月|年间|年間|块钱|美元|欧元|万円|个|個|位|名|人|张|張|本|台|辆|輛|只|隻|条|條|件|间|間|岁|歳|次|天|日間|小时|"
    r"時間|分钟|分鐘|分間|周|週間|元|块|円|ドル|ユーロ|公里|公斤|キロ|米|メートル|度|号|號|番|階|楼|层|点|枚|匹|冊|杯|回|つ|箱|"
    r"瓶|顆|颗|份|種|种)"
)

DATE = re.compile(  # needs a digit or a Han numeral
    r"(?<!\d)\d{4}-\d{1,2}-\d{1,2}(?:[T ]\d{1,2}:\d{2}(?::\d{2})?(?:\.\d+)?(?:Z|[+-]\d{2}:?\d{2})?)?(?!\d)|"
    r"(?<![\d./])\d{1,2}[./]\d{1,2}[./](?:\d{4}|\d{2})(?![\d./])|(?<![\d./])\d{1,2}\.\d{1,2}\.(?![\d./])|"
    + _L + r"\d{1,2}(?:st|nd|rd|th|\.|er)?\s(?:of\s|de\s)?" + _MONTH + r"(?:,?\s(?:de\s)?\d{4})?" + _R + "|"
    + _L + _MONTH + r"\s\d{1,2}(?:st|nd|rd|th)?(?!\d)(?:,?\s\d{4})?" + _R + "|" + _L + _MONTH + r"\s\d{4}" + _R + "|"
    + r"(?<![A-Za-z0-9_\-/#.])(?:19|20)\d{2}" + _R,
    re.IGNORECASE,
)  # fmt: skip
WEEKDAY = re.compile(_L + r"(?:" + _BEFORE_DAY + r"\s)?" + _DAY + _R, re.IGNORECASE)
MAYBE_WEEKDAY = re.compile(r"day|tag|woch|di|lunes|martes|oles|jueves|viernes|bado|mingo")
CJK_DATE = re.compile(
    r"(?<!\d)(?:\d{2,4}|[〇零一二三四五六七八九]{2,4})年(?:" + _HAN_DAY + r"月)?(?:" + _HAN_DAY + r"[日号號])?|"
    + _HAN_DAY + r"月" + _HAN_DAY + r"[日号號]|\d{1,2}월\s?\d{1,2}일|(?:下|上|这|這|本|来週|先週|今週)?(?:个|個)?"
    r"(?:周|星期|礼拜|禮拜)[一二三四五六日天]|(?:来週|先週|今週)?の?[月火水木金土日]曜日?"
)  # fmt: skip
TIME = re.compile(
    r"(?<![\d:.])\d{1,2}[:h]\d{2}(?::\d{2})?(?:\s?[ap]\.?m\.?(?![a-z]))?(?![\d:])|"
    r"(?<![\d:.])\d{1,2}\s?[ap]\.?m\.?(?![a-z])|(?<!\d)\d{1,2}(?:[.:]\d{2})?\sUhr|(?<!\d)\d{1,2}\s?h(?![a-z0-9])",
    re.IGNORECASE,
)
CJK_TIME = re.compile(
    r"(?:上午|下午|早上|晚上|中午|凌晨|午前|午後)?(?:\d{1,2}|[一二两三四五六七八九十]{1,3})[点點時时]"
    r"(?:半|" + _HAN_DAY + r"分|钟)?(?!間|间)"
)
PHONE = re.compile(r"(?<![\w+])(?:\+\d{1,3}[\s\-.]?)?(?:\(\d{1,4}\)[\s\-.]?)?\d{2,4}(?:[\s\-.]\d{2,4}){2,4}(?![\w])")
MONEY = re.compile(
    r"(?:[$€£¥₹₩]|US\$|CHF\s?|EUR\s?|USD\s?|GBP\s?)\s?" + NUM
    + r"(?:\s?(?:k|K|M|bn|million|billion|thousand|Mio\.?|万|億|亿))?(?![\d])|(?<![\d.,])" + NUM
    + r"\s?(?:[$€£¥₹]|(?:EUR|USD|GBP|CHF|JPY|CNY|RMB|euros?|dollars?|bucks|pounds|cents?|francs?|yen|yuan|rupees|pesos)"
    r"(?![A-Za-z]))"
)  # fmt: skip
CJK_MONEY = re.compile(
    r"(?:" + NUM + r"|" + _HAN_NUM + r")(?:\s?[万千百]\d{0,8}){0,4}\s?"
    r"(?:元|块钱|块|美元|欧元|人民币|円|万円|ドル|ユーロ|ウォン|원)"
)
MEASURE = re.compile(
    r"(?<![\w.,])[-+±~≈]?" + NUM + r"(?:\s?(?:-|–|to|bis|à|x|×)\s?" + NUM + r")?[\s\-]?" + _UNIT + r"(?![A-Za-z0-9])"
)
CJK_MEASURE = re.compile(r"(?:\d+(?:\.\d+)?|" + _HAN_NUM + r"|数)\s?" + _CJK_UNIT)
NUMBER = re.compile(r"(?<![\w.,])[-+]?" + NUM + r"(?![A-Za-z_])")
CJK_NUMBER = re.compile(r"(?<![A-Za-z0-9_.,])" + NUM + r"(?![A-Za-z_])|[一二两三四五六七八九十百千万亿]{2,}")
NUMBER_NAMES = frozenset((*NUMBER_WORDS, *(f"{word}." for word in NUMBER_WORDS)))
NUMBER_WORD = re.compile(
    r"(?<![\w'-])(?:" + "|".join(sorted(NUMBER_WORDS, key=len, reverse=True)) + r")(?![\w'-])", re.IGNORECASE
)
