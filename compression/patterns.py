"""The kinds of facts that rules can see in a piece of text, and where. Regular expressions only, no judgement.

Boundaries are written as lookarounds over ASCII letters, not as `\\b`: between a Chinese character and a Latin letter
`\\b` sees no boundary, and an identifier inside a Chinese sentence would be missed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from compression import quantities as q
from compression.names import names
from compression.words import is_cjk, windows

FactKind = Literal[
    "identifier",
    "url",
    "email",
    "path",
    "phone",
    "version",
    "date",
    "time",
    "money",
    "measure",
    "number",
    "quoted",
    "name",
]


class Span(NamedTuple):
    kind: FactKind
    start: int
    end: int
    value: str


_L, _R = r"(?<![A-Za-z0-9_])", r"(?![A-Za-z0-9_])"
_URL = re.compile(
    r"(?:https?|ftp|ssh|s3|gs|git|file|postgres(?:ql)?|redis|mongodb)://[^\s<>\"'`)\]}，。；、」》]+|"
    r"(?<![A-Za-z0-9_])www\.[^\s<>\"'`)\]}，。]+"
)
_EMAIL = re.compile(r"[A-Za-z0-9._%+\-]+@[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)+")
_ENDINGS = (
    "py|js|ts|tsx|jsx|json|ya?ml|toml|md|txt|csv|log|sql|sh|cfg|conf|ini|env|html?|css|java|go|rs|c|h|cpp|rb|"
    "php|pdf|docx?|"
    "xlsx?|pptx?|png|jpe?g|gif|svg|zip|gz|tar|lock|xml|ipynb|parquet|db|sqlite|pem|key|bak|mp3|mp4|wav"
)
_PATH = re.compile(
    r"(?<![\w/:.])(?:~|\.{1,2})?/(?:[\w.\-@+]+/)*[\w.\-@+]*[\w](?![\w])|"
    r"(?<![\w])[A-Za-z]:\\(?:[^\\\s:*?\"<>|]+\\)*[^\\\s:*?\"<>|,;]+|"
    r"(?<![A-Za-z0-9_/.])(?:[A-Za-z0-9_.\-]+/)+[A-Za-z0-9_.\-]*\.[A-Za-z][A-Za-z0-9]{0,5}(?![A-Za-z0-9_])"
)
_FILE = re.compile(
    r"(?<![A-Za-z0-9_/.])[A-Za-z0-9_][A-Za-z0-9_\-]{0,100}(?:\.[A-Za-z0-9_\-]{1,100}){0,8}\.(?:"
    + _ENDINGS
    + r")(?![A-Za-z0-9_])"
)
_QUOTED = re.compile(
    r"“([^“”\n]{1,80})”|„([^“”„\n]{1,80})[“”]|«\s?([^«»\n]{1,80}?)\s?»|「([^「」\n]{1,60})」|『([^『』\n]{1,60})』|"
    r"《([^《》\n]{1,60})》|【([^【】\n]{1,60})】|(?<![\w\"])\"([^\"\n]{1,80})\"(?![\w\"])|"
    r"(?<![\w'’])'([^'\n]{2,60})'(?![\w'’])|(?<![\w‘])‘([^‘’\n]{2,60})’(?!\w)"
)
_QUOTES = frozenset('“„«「『《【"‘')
_TICKED = re.compile(r"`([^`\n]{1,80})`")
# A word or a key is taken whole: half of one reads as if it were one. The bounds are what a hostile text may cost.
_WORD = r"[A-Za-z_][A-Za-z0-9_]{0,200}"
_KEY = (  # an API key, a JWT: base64url, capitals and small letters and digits mixed
    r"(?<![A-Za-z0-9_\-])(?=[A-Za-z_\-]{0,64}\d)(?=[a-z0-9_\-]{0,64}[A-Z])(?=[A-Z0-9_\-]{0,64}[a-z])"
    r"[A-Za-z0-9_\-]{32,1024}(?:\.[A-Za-z0-9_\-]{16,1024}){0,4}(?![A-Za-z0-9_\-])"
)
_IDENTIFIER = re.compile(
    r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}|"  # UUID
    + _L + r"(?:\d{1,3}\.){3}\d{1,3}(?::\d{1,5}|/\d{1,2})?" + _R + "|"  # IPv4 address
    + _L + r"(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}" + _R + "|"  # MAC address
    r"(?<![\w-])--?[a-z][a-z0-9]+(?:-[a-z0-9]+)+(?![\w-])|(?<![\w-])--[a-z][a-z0-9]+(?![\w-])|"  # option
    + _KEY + "|"
    + _L + _WORD + r"(?:(?:\.|::|->)" + _WORD + r"){1,16}\(\)?|"  # member call
    + _L + r"(?=[A-Za-z0-9.]{0,200}_)" + _WORD + r"(?:\." + _WORD + "){1,16}" + _R + "|"  # dotted
    + _L + r"[A-Za-z_][A-Za-z0-9_]*\(\)|"  # call
    + _L + r"[A-Za-z0-9]+(?:_[A-Za-z0-9]+)+" + _R + "|"  # snake_case, ENV_NAME
    + _L + r"[a-z]+(?:[A-Z][a-z0-9]+)+" + _R + "|"  # camelCase
    + _L + r"(?:[A-Z][a-z0-9]+){2,}" + _R + "|"  # PascalCase
    r"[#№]\s?\d{2,}|(?<![\w.,$€£¥])\d{4,}(?:[ -]\d{2,})+(?![\w.,]\d|\w)|"  # number of an issue, an order, an account
    r"(?<![\w.,$€£¥])\d{5,}(?![\w.,]\d|\w|\s?[%€$])|"
    + _L + r"(?=[A-Za-z0-9\-/#.]{0,200}\d)(?=[A-Za-z0-9\-/#.]{0,200}[A-Za-z])"
    r"[A-Za-z0-9]+(?:[\-/#.][A-Za-z0-9]+)*" + _R + "|"  # code
    + _L + r"[a-z0-9\-]{1,63}(?:\.[a-z0-9\-]{1,63}){0,6}"
    r"\.(?:com|org|net|io|dev|internal|local|de|fr|jp|cn|uk|eu|ai|co|app)"
    r"(?::\d{2,5})?" + _R  # host
)  # fmt: skip
_MAYBE_IDENTIFIER = re.compile(r"\d|_|[a-z][A-Z]|--|-[a-z]|\(\)|::|->|[a-z]\.[a-z]|\w\(")
_NOT_CODE = re.compile(
    r"^(?:\d+(?:st|nd|rd|th|s|x|k|m|er|ème|e|h|am|pm|min|ms|kg|km|cm|mm|g|ml|l|gb|mb|kb|tb|%|d|w|px|mhz|ghz|hz|"
    r"v|kw|kwh|"
    r"ft|in|oz|lb|lbs|mg|bn|usd|eur|gbp|mah|°c)|\d+-(?:[a-z]{2,}-?)+|(?-i:[a-z]{2,}-\d{1,2})|\d+h\d+)$",
    re.IGNORECASE,
)
_VERSION = re.compile(
    r"(?<![\w.])[vV]?\d+\.\d+\.\d+(?!\.\d)(?:[-+.]?(?:alpha|beta|rc|dev|post|a|b)\.?\d*)?(?![\w])|"
    r"(?<![\w.])[vV]\d+(?:\.\d+)*(?![\w])"
)
_HAN_DIGIT = re.compile(r"[〇零一二两三四五六七八九十百千万亿億兆数0-9曜]")

_Table = tuple[tuple[FactKind, re.Pattern[str]], ...]
_WITH_DIGITS: _Table = (
    ("version", _VERSION),
    ("date", q.DATE),
    ("time", q.TIME),
    ("money", q.MONEY),
    ("phone", q.PHONE),
)
_CJK: _Table = (("date", q.CJK_DATE), ("time", q.CJK_TIME), ("money", q.CJK_MONEY))
_LAST_WITH_DIGITS: _Table = (("measure", q.MEASURE),)
_LAST_CJK: _Table = (("measure", q.CJK_MEASURE), ("number", q.CJK_NUMBER))


def spans(text: str, *, german: bool = False) -> list[Span]:
    """All facts in a piece of text, left to right, none within another; the more specific kind wins."""
    found: list[Span] = []
    for offset, piece in windows(text):
        taken = bytearray(len(piece))
        for kind, start, end in _matches(piece, german=german):
            while end > start and piece[end - 1] in ".,;:!?'’，。；" and kind != "quoted":
                end -= 1
            if end > start and not any(taken[start:end]):
                taken[start:end] = b"\x01" * (end - start)
                found.append(Span(kind, offset + start, offset + end, piece[start:end]))
    found.sort(key=lambda span: span.start)
    return found


def _matches(text: str, *, german: bool) -> Iterator[tuple[FactKind, int, int]]:
    cjk = is_cjk(text)
    counted = cjk and _HAN_DIGIT.search(text) is not None
    digit = any(map(str.isdigit, text))
    yield from _pointers(text)
    if not _QUOTES.isdisjoint(text) or " '" in text or text.startswith("'"):
        for match in _QUOTED.finditer(text):
            yield "quoted", *match.span(match.lastindex or 0)
    yield from _table(text, (*(_WITH_DIGITS if digit else ()), *(_CJK if counted else ())))
    if q.MAYBE_WEEKDAY.search(text):
        for match in q.WEEKDAY.finditer(text):
            yield "date", *match.span()
    if _MAYBE_IDENTIFIER.search(text):
        for match in _IDENTIFIER.finditer(text):
            if not _NOT_CODE.match(match.group()):
                yield "identifier", *match.span()
    yield from _table(text, (*(_LAST_WITH_DIGITS if digit else ()), *(_LAST_CJK if counted else ())))
    if digit:
        for match in q.NUMBER.finditer(text):
            yield "number", *match.span()
    if not q.NUMBER_NAMES.isdisjoint(text.lower().replace(",", " ").split()):
        for match in q.NUMBER_WORD.finditer(text):
            yield "number", *match.span()
    for start, end in names(text, german=german, cjk=cjk):
        yield "name", start, end


def _pointers(text: str) -> Iterator[tuple[FactKind, int, int]]:
    """URLs, addresses, paths and what stands in backticks."""
    if "://" in text or "www." in text:
        for match in _URL.finditer(text):
            yield "url", *match.span()
    if "@" in text:
        for match in _EMAIL.finditer(text):
            yield "email", *match.span()
    if "/" in text or "\\" in text:
        for match in _PATH.finditer(text):
            if len(match.group()) > 2:
                yield "path", *match.span()
    if "." in text:
        for match in _FILE.finditer(text):
            yield "path", *match.span()
    if "`" in text:
        for match in _TICKED.finditer(text):
            yield "identifier", *match.span(1)


def _table(text: str, table: _Table) -> Iterator[tuple[FactKind, int, int]]:
    for kind, pattern in table:
        for match in pattern.finditer(text):
            yield kind, *match.span()
