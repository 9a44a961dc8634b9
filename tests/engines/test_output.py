"""Text from ids: whole characters only, stop strings held back, nothing lost."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from engines.output import IdsToText, TextStream


def of_bytes(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def streamed(ids: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    stream = TextStream(of_bytes, stops=stops)
    pieces: list[str] = []
    for token in ids:
        piece = stream.push(token)
        pieces.append(piece.text)
        if piece.stop is not None:
            return pieces, piece.stop
    last = stream.flush()
    return [*pieces, last.text], last.stop


@given(st.text(max_size=40))
def test_pieces_join_to_the_text_and_none_ends_in_half_a_character(text: str) -> None:
    pieces, _ = streamed(list(text.encode()))
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces) or "\N{REPLACEMENT CHARACTER}" in text


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    pieces, met = streamed(list(text.encode()), tuple(stops))
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
    if not ends:
        assert ("".join(pieces), met) == (text, None)
    else:
        first = min(ends.values())  # the stop string that is complete first, streamed a character at a time
        assert "".join(pieces) == min((text[: end - len(s)] for s, end in ends.items() if end == first), key=len)
        assert met is not None
        assert ends[met] == first


def test_what_may_begin_a_stop_string_is_held_back_and_then_given() -> None:
    stream = TextStream(of_bytes, stops=("END",))
    assert [stream.push(ord(c)).text for c in "xENx"] == ["x", "", "", "ENx"]
    assert stream.push(ord("E")).text == ""
    assert stream.flush().text == "E"


def test_ids_that_spell_no_character_do_not_wait_for_ever() -> None:
    text = IdsToText(of_bytes)
    assert "".join(text.push(0x80) for _ in range(40)).count("\N{REPLACEMENT CHARACTER}") >= 16


def test_special_tokens_read_as_nothing() -> None:
    assert streamed([104, 999, 105])[0] == ["h", "", "i", ""]


def test_a_half_character_at_the_end_is_shown_as_such() -> None:
    assert "".join(streamed([104, 0xE2, 0x82])[0]) == "h\N{REPLACEMENT CHARACTER}"


@given(st.text("abé", max_size=20), st.lists(st.text("ab", min_size=1, max_size=3), max_size=2), st.data())
def test_an_answer_taken_up_elsewhere_reads_as_if_it_had_never_moved(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """Whatever the first one had told: all that is certain, less, or more."""
    ids = list(text.encode())
    whole, met = streamed(ids, tuple(stops))
    cut = data.draw(st.integers(0, len(ids)))
    chars = data.draw(st.integers(0, len("".join(whole))))
    stream = TextStream(of_bytes, stops=stops)
    stream.resume(ids[:cut], chars)
    said = "" if stream.met is not None else "".join(stream.push(token).text for token in _until_met(stream, ids[cut:]))
    last = stream.flush()
    assert (said + last.text, last.stop) == ("".join(whole)[chars:], met)


def _until_met(stream: TextStream, ids: list[int]) -> Iterator[int]:
    for token in ids:
        if stream.met is not None:
            return
        yield token
