"""Answers of every family into content, reasoning and tool calls, whatever the slices."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.sessions.answer import AnswerFormat, AnswerParser, AnswerPiece
from gateway.sessions.template import Rendered
from gateway.sessions.tokens import ModelTokens
from tests.gateway.sessions.families import TOOL, Loader, build

TOOLS = [TOOL]


@dataclass
class Answer:
    """What came out, joined."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, pieces: Sequence[AnswerPiece]) -> Answer:
        calls = [piece for piece in pieces if piece.kind == "tool_call"]
        assert [piece.index for piece in calls] == list(range(len(calls)))
        return cls(
            "".join(piece.text for piece in pieces if piece.kind == "content"),
            "".join(piece.text for piece in pieces if piece.kind == "reasoning"),
            tuple((piece.name or "", piece.arguments) for piece in calls),
        )


def ids_of(tokens: ModelTokens, text: str) -> list[int]:
    """Ids as a model writes them: control tokens are control tokens."""
    return tokens.vocabulary.encode(Rendered(text), first=False)


def parse(
    tokens: ModelTokens, slices: Sequence[Sequence[int]], *, tools: Sequence[Any] = TOOLS, prompt: bytes | None = None
) -> Answer:
    if prompt is None:
        prompt = tokens.render([{"role": "user", "content": "x"}], tools=tools if tokens.takes_tools else ())
    parser = AnswerParser(tokens, prompt=prompt, tools=tools)
    pieces = [piece for part in slices for piece in parser.push(part)]
    return Answer.of([*pieces, *parser.finish()])


THOUGHT = "<think>\nHm, 日本.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"q":  "a\\n😀"}}\n</tool_call>'
ARGUMENTS = '{"q":  "a\\n😀"}'
LIST = f'[TOOL_CALLS][{{"name": "look_up", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}]</s>'
LLAMA = f'{{"name": "look_up", "parameters": {ARGUMENTS}}}'
HARMONY_CALL = f"<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm, 日本.<|end|><|start|>assistant"
GEMMA_CALL = '<start_function_call>call:look_up{q:<escape>a "b" 😀<escape>,n:3}<end_function_call>'
GEMMA_ARGUMENTS = '{"q": "a \\"b\\" 😀", "n": 3}'
CASES = [
    ("smollm2", " Hi 👩‍👩‍👧!\n<|im_end|>", Answer(" Hi 👩‍👩‍👧!\n")),
    ("smollm2", "<tool_call>no tools here</tool_call><|im_end|>", Answer("<tool_call>no tools here</tool_call>")),
    ("qwen2.5", "Hi.\n<|im_end|>", Answer("Hi.\n")),
    ("qwen2.5", f"{CALL}<|im_end|>", Answer(calls=(("look_up", ARGUMENTS),))),
    ("qwen2.5", f"Wait.\n{CALL}\n{CALL}<|im_end|>", Answer("Wait.", calls=(("look_up", ARGUMENTS),) * 2)),
    ("qwen2.5", CALL.removesuffix("</tool_call>"), Answer(calls=(("look_up", ARGUMENTS),))),
    ("qwen2.5", "a <tool_call>\n{broken</tool_call> b<|im_end|>", Answer("a <tool_call>\n{broken</tool_call> b")),
    ("qwen2.5", 'a <tool_call>\n{"name": "look', Answer('a <tool_call>\n{"name": "look')),
    ("qwen3", f"{THOUGHT}Hi.<|im_end|>", Answer("Hi.", "Hm, 日本.")),
    ("qwen3", f"{THOUGHT}{CALL}<|im_end|>", Answer("", "Hm, 日本.", (("look_up", ARGUMENTS),))),
    ("qwen3", "<think>\nCut of", Answer("", "Cut of")),
    ("smollm3", f"{THOUGHT}Hi.<|im_end|>", Answer("Hi.", "Hm, 日本.")),
    ("llama3.1", "Hi {}.<|eot_id|>", Answer("Hi {}.")),
    ("llama3.1", f"{LLAMA}<|eot_id|>", Answer(calls=(("look_up", ARGUMENTS),))),
    ("llama3.2", f"<|python_tag|>{LLAMA}; {LLAMA}<|eom_id|>", Answer(calls=(("look_up", ARGUMENTS),) * 2)),
    ("llama3.1", '{"name": "Bob", "parameters": {}}<|eot_id|>', Answer('{"name": "Bob", "parameters": {}}')),
    ("llama3.1", f"{LLAMA[:-3]}", Answer(LLAMA[:-3])),
    ("llama3.1", '{"n": 1}<|eot_id|>', Answer('{"n": 1}')),
    ("mistral-nemo", "Hi.</s>", Answer("Hi.")),
    ("mistral-nemo", LIST, Answer(calls=(("look_up", ARGUMENTS),))),
    ("mistral-v3", f"[TOOL_CALLS]look_up[ARGS]{ARGUMENTS}</s>", Answer(calls=(("look_up", ARGUMENTS),))),
    ("mistral-nemo", "[TOOL_CALLS][{]</s>", Answer("[TOOL_CALLS][{]")),
    ("gemma3", "Hi.<end_of_turn>", Answer("Hi.")),
    ("function-gemma", "Hi.<end_of_turn>", Answer("Hi.")),
    ("function-gemma", f"{GEMMA_CALL}{GEMMA_CALL}", Answer(calls=(("look_up", GEMMA_ARGUMENTS),) * 2)),
    ("gpt-oss", f"{ANALYSIS}<|channel|>final<|message|>Hi.<|return|>", Answer("Hi.", "Hm, 日本.")),
    ("gpt-oss", f"{ANALYSIS}{HARMONY_CALL}", Answer("", "Hm, 日本.", (("look_up", ARGUMENTS),))),
    ("gpt-oss", HARMONY_CALL.replace('"}', ""), Answer(HARMONY_CALL.replace('"}', "").removesuffix("<|call|>"))),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_an_answer_is_told_apart_the_same_way_however_it_is_sliced(
    name: str, text: str, expected: Answer, load: Loader
) -> None:
    tokens = load(name)
    ids = ids_of(tokens, text)
    assert parse(tokens, [ids]) == expected
    assert parse(tokens, [[id] for id in ids]) == expected
    for cut in range(1, len(ids)):
        assert parse(tokens, [ids[:cut], ids[cut:]]) == expected


def test_a_prompt_that_opens_the_think_block_starts_within_it(load: Loader) -> None:
    tokens = load("qwen3")
    prompt = tokens.render([{"role": "user", "content": "x"}]) + b"".join(
        id.to_bytes(4, "little") for id in ids_of(tokens, "<think>\n")
    )
    ids = ids_of(tokens, "Hm.\n</think>\n\nHi.<|im_end|>")
    assert parse(tokens, [ids], prompt=prompt) == Answer("Hi.", "Hm.")


def test_a_prompt_with_a_closed_think_block_starts_with_content(load: Loader) -> None:
    tokens = load("qwen3")
    prompt = tokens.render([{"role": "user", "content": "x"}], options={"enable_thinking": False})
    assert parse(tokens, [ids_of(tokens, "Hi.<|im_end|>")], prompt=prompt) == Answer("Hi.")


def test_text_that_the_engine_cut_at_a_stop_string_is_cut_here(load: Loader) -> None:
    tokens = load("smollm2")
    parser = AnswerParser(tokens, prompt=tokens.render([{"role": "user", "content": "x"}]))
    ids = ids_of(tokens, "One two STOP three")
    given = ["One", "", " two", " "]  # what the engine let out, step by step
    pieces = [
        piece for id, text in zip(ids, [*given, "", "", "", ""], strict=False) for piece in parser.push([id], text)
    ]
    assert Answer.of([*pieces, *parser.finish(cut=True)]) == Answer("One two ")


def test_half_a_character_waits_for_its_other_half(load: Loader) -> None:
    tokens = load("smollm2")
    parser = AnswerParser(tokens, prompt=b"")
    texts = [piece.text for id in ids_of(tokens, "a😀b") for piece in parser.push([id])]
    assert "\ufffd" not in "".join(texts)
    assert "".join(texts) == "a😀b"


def test_half_a_character_at_the_end_is_not_lost(load: Loader) -> None:
    tokens = load("smollm2")
    parser = AnswerParser(tokens, prompt=b"")
    pieces = parser.push(ids_of(tokens, "a😀")[:-1])
    assert Answer.of([*pieces, *parser.finish()]) == Answer("a\ufffd")


DECLARED = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"close": "<|im_end|>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


@pytest.fixture(scope="module")
def declared(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelTokens:
    folder = build("qwen3", model_dir, tmp_path_factory.mktemp("declared"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"response_template": DECLARED}))
    return ModelTokens.load(folder, name="declared")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}Hi.<|im_end|>", Answer("Hi.", "Hm, 日本.")),
        (f"Wait.\n{CALL}<|im_end|>", Answer("Wait.", "", (("look_up", '{"q": "a\\n😀"}'),))),
        ("a <tool_call>{broken</tool_call>", Answer("a<tool_call>{broken</tool_call>")),
    ],
)
def test_a_declared_format_is_read_by_transformers(declared: ModelTokens, text: str, expected: Answer) -> None:
    assert AnswerFormat.of(declared).kind == "declared"
    ids = ids_of(declared, text)
    for cut in range(len(ids)):
        assert parse(declared, [ids[:cut], ids[cut:]]) == expected
    assert parse(declared, [[id] for id in ids]) == expected


@pytest.mark.parametrize(
    ("name", "tools", "reasoning"),
    [
        ("smollm2", False, False),
        ("smollm3", True, True),
        ("qwen2.5", True, False),
        ("qwen3", True, True),
        ("llama3.1", True, False),
        ("mistral-nemo", True, False),
        ("gemma3", False, False),
        ("function-gemma", True, False),
        ("gpt-oss", True, True),
    ],
)
def test_what_a_format_cannot_tell_apart_is_said(name: str, tools: bool, reasoning: bool, load: Loader) -> None:
    format = AnswerFormat.of(load(name))
    assert format.supports(tools=False, reasoning=False)
    assert format.supports(tools=True, reasoning=False) is tools
    assert format.supports(tools=False, reasoning=True) is reasoning


def test_random_bytes_of_ids_never_lose_text(load: Loader) -> None:
    tokens = load("qwen3")
    chance = random.Random(7)
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>", "x", "{", "}", '"name"', ":", "\n"]
    for _ in range(300):
        text = "".join(chance.choices(marks, k=chance.randrange(12)))
        ids = ids_of(tokens, text)
        whole = parse(tokens, [ids])
        assert parse(tokens, [[id] for id in ids]) == whole
        for letter in "x{":
            assert text.count(letter) == whole.content.count(letter) + whole.reasoning.count(letter)


def test_plain_content_costs_little(load: Loader) -> None:
    tokens = load("qwen3")
    ids = ids_of(tokens, "The quick brown fox jumps over the lazy dog. " * 200)
    best = min(_seconds(tokens, ids) for _ in range(5))
    assert best / len(ids) < 100e-6  # 8 us on the machine of bench/results; a loaded one is several times slower


def _seconds(tokens: ModelTokens, ids: list[int]) -> float:
    parser = AnswerParser(tokens, prompt=b"", tools=TOOLS)
    begin = time.process_time()
    for id in ids:
        parser.push([id])
    parser.finish()
    return time.process_time() - begin
