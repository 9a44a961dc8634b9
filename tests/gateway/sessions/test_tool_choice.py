"""The grammars for tool_choice, run by the library that the engine runs them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.errors import BadRequest
from gateway.sessions.answer import AnswerParser
from gateway.sessions.template import Rendered
from gateway.sessions.tokens import ModelTokens
from gateway.sessions.tool_choice import tool_grammar
from tests.gateway.sessions.families import TOOL, Loader, build

llguidance = pytest.importorskip("llguidance", reason="the engine's grammar library is not installed")
OTHER = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["n"]}}}
NAMED = {"type": "function", "function": {"name": "look_up"}}
ARGUMENTS = '{"q": "a😀"}'
HERMES = f'<tool_call>\n{{"name": "look_up", "arguments": {ARGUMENTS}}}\n</tool_call>'
HARMONY = f"<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
ACCEPTED = [
    ("qwen2.5", HERMES),
    ("qwen2.5", f"{HERMES}\n{HERMES}"),
    ("qwen3", f"<think>\nHm <b>?\n</think>\n\n{HERMES}"),
    ("qwen3", HERMES),
    ("llama3.1", f'{{"name": "look_up", "parameters": {ARGUMENTS}}}'),
    ("mistral-nemo", f'[TOOL_CALLS][{{"name": "look_up", "arguments": {ARGUMENTS}}}]'),
    ("gpt-oss", HARMONY),
    ("gpt-oss", ANALYSIS + HARMONY),
]


TOKENIZERS: dict[str, Any] = {}


def engine_tokenizer(name: str, folder: Path, end: int) -> Any:
    if name not in TOKENIZERS:
        TOKENIZERS[name] = llguidance.LLTokenizer((folder / "tokenizer.json").read_text(), eos_token=end)
    return TOKENIZERS[name]


def accepts(tokens: ModelTokens, folder: Path, grammar: object, text: str) -> bool:
    """Whether the whole text, as the model's ids, is an answer by the grammar."""
    kind, body = grammar.kind, grammar.text  # type: ignore[attr-defined]
    matcher_of = llguidance.LLMatcher
    compiled = matcher_of.grammar_from_lark(body) if kind == "lark" else matcher_of.grammar_from_json_schema(body)
    matcher = matcher_of(engine_tokenizer(folder.name, folder, tokens.stop_ids[0]), compiled)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens.vocabulary.encode(Rendered(text), first=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(("name", "text"), ACCEPTED)
def test_the_models_own_format_is_accepted_and_then_parsed(
    name: str, text: str, load: Loader, model_dir: Path, tmp_path: Path
) -> None:
    tokens = load(name)
    folder = build(name, model_dir, tmp_path / name)
    grammar = tool_grammar(tokens, [TOOL, OTHER], "required")
    assert accepts(tokens, folder, grammar, text)
    assert not accepts(tokens, folder, grammar, "Hello")
    assert not accepts(tokens, folder, grammar, text.replace("look_up", "rm"))
    parser = AnswerParser(tokens, prompt=b"", tools=[TOOL, OTHER])
    pieces = parser.push(tokens.vocabulary.encode(Rendered(text), first=False)) + parser.finish()
    calls = [piece for piece in pieces if piece.kind == "tool_call"]
    assert {(call.name, call.arguments) for call in calls} == {("look_up", ARGUMENTS)}


def test_a_named_function_is_the_only_one(load: Loader, model_dir: Path, tmp_path: Path) -> None:
    tokens = load("qwen2.5")
    folder = build("qwen2.5", model_dir, tmp_path / "qwen2.5")
    grammar = tool_grammar(tokens, [TOOL, OTHER], NAMED)
    assert accepts(tokens, folder, grammar, HERMES)
    assert not accepts(tokens, folder, grammar, '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>')
    assert not accepts(tokens, folder, grammar, f"{HERMES}\n{HERMES}")


def test_a_prompt_that_opened_the_think_block_goes_on_in_it(load: Loader, model_dir: Path, tmp_path: Path) -> None:
    tokens = load("qwen3")
    grammar = tool_grammar(tokens, [TOOL], "required", opened=True)
    assert accepts(tokens, build("qwen3", model_dir, tmp_path / "qwen3"), grammar, f"Hm.\n</think>\n\n{HERMES}")


def test_auto_and_none_ask_for_nothing(load: Loader) -> None:
    tokens = load("qwen2.5")
    assert [tool_grammar(tokens, [TOOL], choice) for choice in (None, "auto", "none")] == [None] * 3


def test_a_function_that_is_no_tool_is_refused(load: Loader) -> None:
    with pytest.raises(BadRequest, match="names 'look_up', which is none of the tools"):
        tool_grammar(load("qwen2.5"), [OTHER], NAMED)


def test_a_model_without_a_known_format_of_calls_is_refused(load: Loader) -> None:
    with pytest.raises(BadRequest, match="cannot be made to call a tool"):
        tool_grammar(load("gemma3"), [TOOL], "required")
