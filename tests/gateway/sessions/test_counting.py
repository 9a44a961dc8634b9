"""Counting without the served model's tokenizer, and without a network."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gateway.sessions.counting import MissingEncoding, cached_file, encoding_by_name, estimate, openai_encoding


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a network connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    encoding_by_name.cache_clear()


def test_gpt_4_is_counted_from_the_packaged_file() -> None:
    assert openai_encoding("gpt-4").encode_ordinary("tiktoken is great!") == [83, 1609, 5963, 374, 2294, 0]


def test_a_missing_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(MissingEncoding, match=str(cached_file("o200k_base"))):
        openai_encoding("gpt-4o")


def test_a_file_with_another_content_is_refused_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    cached_file("o200k_base").write_bytes(b"no")
    with pytest.raises(MissingEncoding, match="SHA-256"):
        openai_encoding("gpt-4o")
    assert cached_file("o200k_base").read_bytes() == b"no"


def test_o200k_comes_from_tiktokens_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Path(os.environ.get("TURNKEEP_DATA", Path(__file__).parents[4] / "shared" / "data"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(data / "tokenizers"))
    if not cached_file("o200k_base").is_file():
        pytest.skip(f"no o200k file in {data / 'tokenizers'}")
    assert openai_encoding("gpt-4o").decode(openai_encoding("gpt-4o").encode_ordinary("Grüße")) == "Grüße"


def test_an_estimate_says_that_it_is_one_and_lies_above_the_count() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20
    counted = estimate(text, messages=2)
    assert counted.tokens > len(openai_encoding("gpt-4").encode_ordinary(text))
    assert counted.method.startswith("estimate")
