"""Text to ids and back: exact, linear, and with control tokens only where the caller wants them."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gateway.sessions.bytelevel import encoding_from_tokenizer_json
from gateway.sessions.template import Rendered
from gateway.sessions.tokens import ModelTokens
from gateway.sessions.vocabulary import ControlTextRefused, Vocabulary, pack_ids, unpack_ids
from tests.gateway.sessions.families import Loader

MEGABYTE = 2**20
CORPUS = [f"The quick brown fox no. {n} jumps over the lazy dog, again and again." for n in range(200)]
UNKNOWN = re.compile("[\x04\x06\x13\x14\x16\x1d\U00040000-\U000bffff]")  # bytes that the vocabulary lacks
ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=60)


@pytest.fixture(scope="module")
def smol(model_dir: Path) -> Vocabulary:
    return Vocabulary((model_dir / "tokenizer.json").read_text(), template_text="<|im_start|><|im_end|>")


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@settings(max_examples=200, deadline=None)
@given(text=ANY_TEXT)
def test_any_text_comes_back_from_its_ids_and_has_the_tokenizers_own_ids(
    text: str, smol: Vocabulary, reference: Tokenizer
) -> None:
    ids = smol.encode_text(text)
    if not UNKNOWN.search(text):  # the tokenizer itself drops these
        assert smol.decode(ids) == text
    if not any(name in text for name in smol.controls):
        assert ids == reference.encode(text, add_special_tokens=False).ids


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.one_of(ANY_TEXT, st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>"])), max_size=8)
)
def test_a_rendering_cut_at_its_control_tokens_has_the_ids_of_the_whole(
    parts: list[str], smol: Vocabulary, reference: Tokenizer
) -> None:
    text = "".join(parts)
    assert smol.encode(Rendered(text)) == reference.encode(text, add_special_tokens=False).ids


def test_ids_pack_to_four_bytes_little_endian() -> None:
    assert pack_ids([1, 258]) == b"\1\0\0\0\2\1\0\0"
    assert unpack_ids(b"\1\0\0\0\2\1\0\0") == [1, 258]


@pytest.mark.parametrize("text", [" ", "\n", "a", "<|im_", "\u3000", "é", "0", "-"])
def test_a_megabyte_of_one_thing_costs_no_more_than_in_proportion(text: str, smol: Vocabulary) -> None:
    def seconds(size: int) -> float:
        begin = time.process_time()
        smol.encode_text(text * (size // len(text.encode())))
        return time.process_time() - begin

    assert seconds(MEGABYTE) < 5  # quadratic cost would be minutes; 1 s was seen for white space, 0.4 s for letters


def test_real_conversations_have_the_tokenizers_own_ids(load: Loader, reference: Tokenizer) -> None:
    data = Path(os.environ.get("TURNKEEP_DATA", Path(__file__).parents[4] / "shared" / "data"))
    file = data / "mtbench101" / "mtbench101.jsonl"
    if not file.is_file():
        pytest.skip(f"no {file}: TURNKEEP_DATA names the folder of real data")
    tokens = load("smollm2")
    with file.open() as lines:
        for line, _ in zip(lines, range(150), strict=False):
            messages = _messages(json.loads(line))
            text = tokens.prompt_text(messages)
            assert unpack_ids(tokens.render(messages)) == reference.encode(text, add_special_tokens=False).ids


def _messages(dialogue: Any) -> list[dict[str, str]]:
    pairs = [(turn["user"], turn["bot"]) for turn in dialogue["history"]]
    messages = [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return messages[:-1]


def trained(kind: str) -> Tokenizer:
    """A small tokenizer of another make, trained here."""
    special = ["<s>", "</s>"]
    if kind == "word":
        tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=[*special, "<unk>"]))
        return tokenizer
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=[*special, "<unk>"], unk_token="<unk>")
        tokenizer.train_from_iterator(CORPUS, trainer)
        return tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "nfc":
        tokenizer.normalizer = normalizers.NFC()
    if kind == "digits":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.mark.parametrize(("kind", "fast"), [("bpe", True), ("nfc", True), ("digits", True), ("unigram", False)])
def test_other_tokenizers_are_exact_by_pieces_and_fast_where_tiktoken_equals_them(kind: str, fast: bool) -> None:
    tokenizer = trained(kind)
    vocabulary = Vocabulary(tokenizer.to_str(), template_text="<s></s>")
    assert vocabulary.exact
    assert vocabulary.fast is fast
    for text in ("<s>The fox 12 e\u0301</s> jumps</s>\n", "The fox<s> jumps  12 34", " <s> "):
        assert vocabulary.encode(Rendered(text)) == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_piece_inside_a_prompt_gets_no_leading_space_of_its_own() -> None:
    tokenizer = trained("unigram")
    vocabulary = Vocabulary(tokenizer.to_str(), template_text="<s></s>")
    whole = tokenizer.encode("<s>fox</s>fox", add_special_tokens=False).ids
    tail = vocabulary.encode(Rendered("</s>fox"), first=False)
    assert whole[-len(tail) :] == tail


def test_a_token_that_swallows_the_space_after_it_does_so_by_pieces_too(model_dir: Path) -> None:
    declared = json.loads((model_dir / "tokenizer.json").read_text())
    flags = {"id": 49152, "content": "<|end|>", "single_word": False, "lstrip": True, "rstrip": True}
    declared["added_tokens"].append({**flags, "normalized": False, "special": True})
    vocabulary = Vocabulary(json.dumps(declared))
    whole = Tokenizer.from_str(json.dumps(declared))
    for text in ("a <|end|>\n b", "<|end|>  <|end|>x", "a\n\n<|end|>"):
        assert vocabulary.encode(Rendered(text)) == whole.encode(text, add_special_tokens=False).ids


def test_no_tiktoken_encoding_is_made_of_what_is_no_byte_level_bpe() -> None:
    assert encoding_from_tokenizer_json(json.loads(trained("word").to_str())) is None


def test_a_tokenizer_that_reads_a_name_as_its_token_even_in_plain_text_refuses_the_name(
    tmp_path: Path, model_dir: Path
) -> None:
    tokenizer = trained("word")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    vocabulary = Vocabulary(tokenizer.to_str(), template_text="<s></s>")
    assert "</s>" in vocabulary.unsafe
    with pytest.raises(ControlTextRefused):
        vocabulary.encode(Rendered("<s> a </s>", quoted=((6, 10),)))


def test_loading_twice_gives_the_same_fingerprint(model_dir: Path) -> None:
    one, other = (ModelTokens.load(model_dir, name="x") for _ in range(2))
    assert one.fingerprint() == other.fingerprint()
