"""Strict reading of JSON fields: a wrong type or a number out of bounds is refused, never coerced.

`True` is no integer, `"5"` is no number, NaN and infinity are no numbers. Every function takes the object, the field's
name and its bounds, returns the value or the default (a missing field or null), or raises RequestRefused naming it.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import orjson

from engines.contract import Grammar, RequestRefused, Sampling

Fields = Mapping[str, Any]
Default = TypeVar("Default")

MAX_TOKENS = 1 << 20
MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_DEPTH = 64
GRAMMARS = frozenset({"json_object", "json_schema", "lark", "regex"})
SALT = re.compile(r"[A-Za-z0-9_-]{0,64}")  # an odd salt once killed another engine (CVE-2026-105756)
PRINTABLE = re.compile(r"[^\x00-\x1f\x7f]{1,256}")


def refuse(param: str, message: str) -> RequestRefused:
    return RequestRefused(f"{param}: {message}", param=param)


def whole(fields: Fields, name: str, least: int, most: int, default: Default) -> int | Default:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise refuse(name, f"must be an integer from {least} to {most}")
    return value


def number(fields: Fields, name: str, least: float, most: float, default: float, *, above: bool = False) -> float:
    """`above`: the value must be greater than `least`."""
    value = fields.get(name)
    if value is None:
        return default
    right = type(value) in (int, float) and math.isfinite(value) and least <= value <= most
    if not right or (above and value == least):
        raise refuse(
            name, f"must be a number {'above' if above else 'from'} {least:g} {'up ' if above else ''}to {most:g}"
        )
    return float(value)


def flag(fields: Fields, name: str, default: bool = False) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise refuse(name, "must be true or false")
    return value


def text(fields: Fields, name: str, pattern: re.Pattern[str], default: Default) -> str | Default:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise refuse(name, f"must be a string of the form {pattern.pattern}")
    return value


def mapping(fields: Fields, name: str) -> Fields | None:
    value = fields.get(name)
    if value is None or isinstance(value, dict):
        return value
    raise refuse(name, "must be an object")


def stops(fields: Fields, name: str = "stop") -> tuple[str, ...]:
    value = fields.get(name)
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > MAX_STOPS:
        raise refuse(name, f"must be a string or at most {MAX_STOPS} strings")
    if not all(isinstance(item, str) and 0 < len(item) <= MAX_STOP_CHARS for item in items):
        raise refuse(name, f"each must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(items)


def stop_ids(fields: Fields, vocab: int, name: str = "stop_token_ids") -> tuple[int, ...]:
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_STOP_IDS:
        raise refuse(name, f"must be a list of at most {MAX_STOP_IDS} token ids")
    if not all(type(item) is int and 0 <= item < vocab for item in value):
        raise refuse(name, f"each must be a token id below {vocab}")
    return tuple(value)


def biases(fields: Fields, vocab: int, name: str = "logit_bias") -> dict[int, float]:
    value = mapping(fields, name)
    if not value:
        return {}
    if len(value) > MAX_BIASES:
        raise refuse(name, f"must have at most {MAX_BIASES} entries")
    if not all(key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab for key in value):
        raise refuse(name, f"each key must be a token id below {vocab}")
    return {int(key): number(value, key, -100, 100, 0.0) for key in value}


def grammar(fields: Fields, name: str = "grammar") -> Grammar | None:
    value = mapping(fields, name)
    if value is None:
        return None
    unknown(value, {"kind", "text"}, name + ".")
    kind, body = value.get("kind"), value.get("text", "")
    if kind not in GRAMMARS:
        raise refuse(f"{name}.kind", f"must be one of {', '.join(sorted(GRAMMARS))}")
    if not isinstance(body, str) or len(body) > MAX_GRAMMAR_CHARS:
        raise refuse(f"{name}.text", f"must be a string of at most {MAX_GRAMMAR_CHARS} characters")
    return Grammar(kind, body)


SAMPLING_FIELDS = frozenset(Sampling.__dataclass_fields__)


def sampling(fields: Fields, vocab: int) -> Sampling:
    """`engines.contract.Sampling` from its own field names, each within its bounds."""
    return Sampling(
        max_tokens=whole(fields, "max_tokens", 1, MAX_TOKENS, 0) or _missing("max_tokens"),
        temperature=number(fields, "temperature", 0, 10, 1.0),
        top_p=number(fields, "top_p", 0, 1, 1.0, above=True),
        top_k=whole(fields, "top_k", 0, MAX_TOKENS, 0),
        min_p=number(fields, "min_p", 0, 1, 0.0),
        seed=whole(fields, "seed", -(1 << 63), (1 << 63) - 1, None),
        stop=stops(fields),
        stop_token_ids=stop_ids(fields, vocab),
        presence_penalty=number(fields, "presence_penalty", -2, 2, 0.0),
        frequency_penalty=number(fields, "frequency_penalty", -2, 2, 0.0),
        repetition_penalty=number(fields, "repetition_penalty", 0, 10, 1.0, above=True),
        logit_bias=biases(fields, vocab),
        logprobs=whole(fields, "logprobs", 0, MAX_LOGPROBS, None),
        grammar=grammar(fields),
        ignore_eos=flag(fields, "ignore_eos"),
    )


def _missing(name: str) -> int:
    raise refuse(name, "is required")


def unknown(fields: Fields, known: Collection[str], prefix: str = "") -> None:
    """Refuse a field that would be ignored; null counts as absent."""
    for name, value in fields.items():
        if name not in known and value is not None:
            raise refuse(prefix + name[:64], "unknown field")


def json_object(body: bytes) -> dict[str, Any]:
    """A JSON object, UTF-8, at most MAX_DEPTH deep; orjson itself refuses NaN, lone surrogates and invalid UTF-8."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not valid JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise RequestRefused("the body must be a JSON object")
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise RequestRefused(f"the body is nested more than {MAX_DEPTH} deep")


def ids(value: Any, vocab: int, param: str) -> list[int]:
    """A list of token ids, each below `vocab`; at most MAX_TOKENS."""
    if not isinstance(value, list) or len(value) > MAX_TOKENS:
        raise refuse(param, "must be a list of token ids")
    if not all(type(item) is int and 0 <= item < vocab for item in value):
        raise refuse(param, f"each must be a token id below {vocab}")
    return value


def token_bytes(ids: bytes, vocab: int, param: str) -> bytes:
    """`ids` as u32 little-endian, each below `vocab`."""
    if len(ids) % 4:
        raise refuse(param, "token ids are four bytes each")
    if ids and (largest := max(u32(ids))) >= vocab:
        raise refuse(param, f"token id {largest} is not below {vocab}")
    return ids


def u32(ids: bytes) -> array[int]:
    """The ids of u32 little-endian bytes."""
    values = array("I")
    values.frombytes(ids)
    if _BIG_ENDIAN:
        values.byteswap()
    return values


def u32_bytes(ids: Collection[int]) -> bytes:
    """The inverse of `u32`; each id must fit."""
    values = array("I", ids)
    if _BIG_ENDIAN:
        values.byteswap()
    return values.tobytes()


_BIG_ENDIAN = array("I", [1]).tobytes()[0] == 0
