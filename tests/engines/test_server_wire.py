"""The gateway's door as bytes: what is written is read back, and every field has its bounds."""

from __future__ import annotations

import struct
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.contract import Base, Generated, Grammar, RequestRefused, Sampling, Shift, TokenLogprob, Usage
from engines.local import checks, frames, wire

VOCAB = 1000
FULL = wire.WireRequest(
    request_id="r-1",
    model="a/model",
    delta=checks.u32_bytes([1, 2, 999]),
    session="s 1",
    base=Base(7, bytes(range(32))),
    salt="abc_-",
    priority=-3,
    shift=Shift(Base(7, bytes(range(32))), 2, 1, 5, 0),
    generated=Generated(2, 0),
    min_bits=8,
    system_tokens=300,
    recent_from=700,
    score_from=4,
    sampling=Sampling(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        seed=-1,
        stop=("a", "b\n"),
        stop_token_ids=(2,),
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        logit_bias={3: -100.0},
        logprobs=0,
        grammar=Grammar("regex", "a+"),
        ignore_eos=True,
    ),
)


SHIFT = {
    "base": {"length": 7, "digest": "0" * 64},
    "source_start": 2,
    "dest_start": 1,
    "length": 5,
    "recompute": 64,
}


def body(header: dict[str, Any], delta: bytes = b"\1\0\0\0") -> bytes:
    head = orjson.dumps(header)
    return struct.pack("<I", len(head)) + head + delta


def header(**changes: Any) -> dict[str, Any]:
    return {"request_id": "r", "model": "m", "sampling": {"max_tokens": 1}} | changes


@pytest.mark.parametrize("request_", [FULL, wire.WireRequest("r", "m", b"\1\0\0\0", Sampling(max_tokens=1))])
def test_a_request_is_read_back_as_it_was_written(request_: wire.WireRequest) -> None:
    assert wire.decode_generate(wire.encode_generate(request_), VOCAB) == request_


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("request_id", {"request_id": None}),
        ("request_id", {"request_id": "with space"}),
        ("model", {"model": 3}),
        ("session", {"session": "a\nb"}),
        ("cache_salt", {"cache_salt": "a b"}),
        ("priority", {"priority": True}),
        ("surprise", {"surprise": 1}),
        ("base", {"base": {"length": 1}}),
        ("length", {"base": {"length": -1, "digest": "0" * 64}}),
        ("digest", {"base": {"length": 1, "digest": "0" * 63}}),
        ("base.extra", {"base": {"length": 1, "digest": "0" * 64, "extra": 1}}),
        ("shift", {"shift": SHIFT | {"base": None}}),
        ("shift", {"shift": {name: value for name, value in SHIFT.items() if name != "length"}}),
        ("shift.base", {"shift": SHIFT | {"base": {"length": 1}}}),
        ("shift.extra", {"shift": SHIFT | {"extra": 1}}),
        ("dest_start", {"shift": SHIFT | {"dest_start": -1}}),
        ("generated", {"generated": {"ids": 1}}),
        ("ids", {"generated": {"ids": 0, "chars": 0}}),
        ("ids", {"generated": {"ids": 2, "chars": 0}}),
        ("chars", {"generated": {"ids": 1, "chars": -1}}),
        ("delta", {"generated": {"ids": 1, "chars": 0}}),
        ("sampling", {"sampling": []}),
        ("max_tokens", {"sampling": {}}),
        *((name, {"sampling": {"max_tokens": 1} | {name: value}}) for name, value in [
            ("max_tokens", 0), ("max_tokens", True), ("max_tokens", "5"), ("max_tokens", 10**9), ("max_tokens", 1.0),
            ("temperature", -0.1), ("temperature", "1"), ("temperature", False), ("temperature", 11),
            ("top_p", 0), ("top_p", 1.1), ("top_k", -1), ("min_p", 2), ("seed", 1.5), ("seed", 2**63),
            ("stop", [""]), ("stop", ["x"] * 17), ("stop", "x" * 257), ("stop", [1]), ("stop", {}),
            ("stop_token_ids", [VOCAB]), ("stop_token_ids", [True]), ("stop_token_ids", 5),
            ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0),
            ("logit_bias", {"1000": 1}), ("logit_bias", {"x": 1}), ("logit_bias", [1]),
            ("logprobs", 21), ("logprobs", -1), ("ignore_eos", 1), ("grammar", "a+"),
        ]),
        ("grammar.kind", {"sampling": {"max_tokens": 1, "grammar": {"kind": "bnf"}}}),
        ("grammar.text", {"sampling": {"max_tokens": 1, "grammar": {"kind": "lark", "text": "x" * 70_000}}}),
        ("7", {"sampling": {"max_tokens": 1, "logit_bias": {"7": 101}}}),
        ("sampling.n", {"sampling": {"max_tokens": 1, "n": 2}}),
    ],
)  # fmt: skip
def test_a_field_out_of_bounds_is_refused_by_name(param: str, changes: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as refused:
        wire.decode_generate(body(header(**changes)), VOCAB)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xff\xff\xff{}",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 5) + b'"\xff"{}',
        body(header(), b""),
        body(header(), b"\1\0\0"),
        body(header(), struct.pack("<I", VOCAB)),
        struct.pack("<I", 14) + b'{"sampling":N}',
        body({"model": "m", "sampling": {"grammar": {"x": [[]] * 2}}}).replace(b"[[],[]]", b"[" * 3 + b"]" * 3 + b" "),
    ],
)
def test_bytes_that_are_no_request_are_refused(raw: bytes) -> None:
    with pytest.raises(RequestRefused):
        wire.decode_generate(raw, VOCAB)


def test_nan_lone_surrogates_and_deep_nesting_are_no_json_here() -> None:
    for raw in (b'{"a": NaN}', b'{"a": "\\ud800"}', b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}"):
        with pytest.raises(RequestRefused):
            checks.json_object(raw)


def test_events_carry_the_fields_of_the_page() -> None:
    started = wire.started_event(10, 8, 0.25)
    assert orjson.loads(started.data) == {"prompt_tokens": 10, "cached_tokens": 8, "queue_s": 0.25}
    token = TokenLogprob(5, "a", -0.5, ((5, "a", -0.5), (6, "b", -1.0)))
    last = wire.delta_event([5], "a", [token], finish="stop", stop="END", usage=Usage(10, 1, 8))
    assert orjson.loads(last.data) == {
        "ids": [5],
        "text": "a",
        "logprobs": [{"id": 5, "text": "a", "logprob": -0.5, "top": [[5, "a", -0.5], [6, "b", -1.0]]}],
        "finish": "stop",
        "stop": "END",
        "usage": {"prompt_tokens": 10, "cached_tokens": 8, "output_tokens": 1},
    }


def test_an_approximate_answer_says_so() -> None:
    last = wire.delta_event([5], "a", finish="stop", usage=Usage(100, 1, 20, 60))
    usage = orjson.loads(last.data)["usage"]
    assert (usage["approximate"], usage["shifted_tokens"]) == (True, 60)


def test_an_answer_says_on_how_few_bits_it_rests() -> None:
    last = wire.delta_event([5], "a", finish="stop", usage=Usage(100, 1, 20, prefix_bits=8))
    assert orjson.loads(last.data)["usage"]["prefix_bits"] == 8


@given(
    st.lists(st.tuples(st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2), st.binary(max_size=40))),
    st.integers(1, 17),
)
def test_frames_survive_any_cutting(sent: list[tuple[dict[str, int], bytes]], piece: int) -> None:
    stream = b"".join(frames.encode_frame(head, rest) for head, rest in sent)
    reader = frames.FrameReader()
    received = [frame for at in range(0, len(stream), piece) for frame in reader.feed(stream[at : at + piece])]
    assert received == sent


def test_a_frame_that_cannot_be_is_a_broken_stream() -> None:
    with pytest.raises(frames.BrokenStream):
        frames.FrameReader().feed(b"\xff" * 8)
