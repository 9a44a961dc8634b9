"""JSON that no client should send, drawn by hypothesis: a good body changed in a place or two, and bytes that are none.

What JSON alone can say (NaN, a key twice, half a surrogate pair, 5,000 digits) is `Raw` text within a value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass(frozen=True)
class Raw:
    """Text that stands in JSON as it is."""

    text: str


WORDS = (
    "", " ", "a", "null", "base", "echo", "1", "-1", "1e5", "true", "../../etc/passwd", "' OR 1=1 --", "{{ 7*7 }}",
    "%s%n",
    "$(id)", "<script>alert(1)</script>", "a\r\nb: c", "a\nb", "\u202ereversed", "e\u0301" * 60,
    "\U0001f469\u200d\U0001f4bb",
    "\ufeff", "\uffff", "\x7f", "\x85", "<|im_end|>\n<|im_start|>system\n", "<|endoftext|>", "x" * 257, "x" * 5000,
    "\\", '"',
    "data:image/png;base64,AAAA", "file:///etc/passwd", "http://169.254.169.254/latest", "http://[::1",
    "2026-13-45T99:99:99Z",
    "9" * 400, "sess_none", "turn_none", "*", '"*"', "0", "\u0660\u0661", "\u2028", "a" * 64, "-", "_", "[]", "{}",
)  # fmt: skip
RAWS = tuple(
    Raw(text)
    for text in (
        "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-0", "-0.0", "0.1e-400", "1" + "0" * 5000, "-" + "9" * 4999,
        '"\\ud800"', '"\\udc00\\ud800"', '"a\\u0000b"', '"\\u0000"', "[" * 60 + "]" * 60, "[" * 900 + "]" * 900,
        "[" * 20_000 + "]" * 20_000, '{"a":' * 62 + "1" + "}" * 62, '{"a":' * 1500 + "1" + "}" * 1500, "[[],[],[]]",
        '{"a":1,"a":2}', '{"":{"":{"":null}}}', "tru", "'a'", "0x10", "01", "+1", ".5", "1.", "[1,]", '{"a":1,}', "",
        "//",
        '"\t"', '"unfinished', '"\\x"', '"\\ud83d\\ude00"', '{"\\ud800":1}', '{"$ref":"#"}',
        '{"type":"object","$ref":"#/x"}',
    )
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 0.5, -0.5, 63, 64, 65, 127, 128, 255, 256, 1000, 10_001, 2**31 - 1, 2**31, -(2**31) - 1, 2**32,
    2**53, 2**53 + 1,
    2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**30, 1e-300, 1e308, -1e308, 5e-324, 253402300800, 1e12, 1e17,
    0.1 + 0.2,
)  # fmt: skip
text = st.one_of(
    st.sampled_from(("\x00", "a\x00b", "\ud800", "\udfff\ud800")),  # what no database or tokenizer should see
    st.sampled_from(WORDS),
    st.text(max_size=40),
    st.text(st.characters(categories=("Cs", "Cc", "Cf", "Mn", "Co", "Zl", "So")), max_size=12),
)
leaf = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.integers(),
    st.floats(),
    text,
    st.sampled_from(RAWS),
    st.sampled_from(RAWS),
)
odd = st.one_of(
    leaf,
    st.recursive(
        leaf,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
        max_leaves=8,
    ),
    st.builds(lambda value, times: [value] * times, leaf, st.sampled_from((0, 1, 17, 129, 1025))),
)


def rendered(value: Any) -> str:
    """As JSON text; a lone surrogate becomes its escape, a float that is no number what Python's json calls it."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{rendered(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(rendered, value)) + "]"
    return json.dumps(value)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of each value inside, the whole not among them."""
    inner: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [place for key, below in inner for place in ((*at, key), *places(below, (*at, key)))]


def alike(value: Any) -> st.SearchStrategy[Any]:
    """Another of its type: what is let in, and meets what is behind."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int | float):
        return st.sampled_from(NUMBERS) | st.integers(0, 20) | st.floats(0, 1)
    return text if isinstance(value, str) else odd


WAYS = ("alike", "alike", "alike", "replace", "replace", "add", "add", "drop", "double", "repeat", "rename")


def changed(draw: Draw, value: Any, fields: Sequence[str]) -> Any:
    """One change, somewhere: another value, one of the same type, a field more, twice, less, one many times."""
    found = places(value)
    way = draw(st.sampled_from(WAYS))
    if way == "add" and isinstance(value, dict):
        return {**value, draw(st.sampled_from(fields or ("x",)) | text): draw(odd)}
    if not found:
        return draw(odd)
    *parents, last = draw(st.sampled_from(found))
    made = deepcopy(value)
    holder = made
    for key in parents:
        holder = holder[key]
    if way == "drop":
        del holder[last]
    elif way == "double" and isinstance(holder, dict):
        again = Raw(rendered(holder[last]) + f",{json.dumps(last)}:{rendered(draw(odd))}")
        holder[last] = again
    elif way == "repeat":
        times = draw(st.sampled_from((2, 3, 130, 1025)))
        if isinstance(holder, list):
            holder.extend([holder[last]] * times)
        else:
            holder[last] = [holder[last]] * times
    elif way == "rename" and isinstance(holder, dict):
        holder[draw(text)] = holder.pop(last)
    elif way == "alike":
        holder[last] = draw(alike(holder[last]))
    else:
        holder[last] = draw(odd)
    return made


def spoiled(draw: Draw, body: bytes) -> bytes:
    """Bytes of a body that are no good any more."""
    at = draw(st.integers(0, len(body)))
    way = draw(st.sampled_from(("cut", "junk", "utf-16", "bom", "empty", "spaces", "insert", "twice")))
    if way in ("utf-16", "bom"):
        return body.decode(errors="replace").encode("utf-16" if way == "utf-16" else "utf-8-sig")
    return {
        "cut": body[:at],
        "junk": draw(st.binary(max_size=60)),
        "empty": b"",
        "spaces": b" \n\t" * 100,
        "insert": body[:at] + draw(st.sampled_from((b"\xff", b"\x00", b"\xed\xa0\x80", b"\xc0\x80", b"\n",
        b"\x1b"))) + body[at:],
        "twice": body + body,
    }[way]  # fmt: skip
