"""Structured output: what a grammar still allows, as a mask on the logits, by llguidance.

A grammar comes from outside. One that is malformed, too large or too complex is refused; it never ends the engine:
llguidance reports errors instead of raising, within the limits below, and each request has a matcher of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from engines.contract import Grammar, RequestRefused

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CHARS = 64 * 1024
# White space between JSON tokens is bounded: without a bound a small model can fill its whole answer with it.
JSON: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x09]{0,16}"}


class Grammars:
    """Compiles grammars for one model: a MaskFactory of `sampler`. Built once, in about a second."""

    def __init__(self, folder: Path, *, vocab: int, eos_ids: Sequence[int]) -> None:
        """`vocab`: columns of the logits. `eos_ids`: allowed exactly where the grammar may end."""
        text = (folder / "tokenizer.json").read_text()
        self._tokenizer = LLTokenizer(text, n_vocab=vocab, eos_token=list(eos_ids))
        # per grammar; counted in items and fuel (about 50,000 a millisecond at first, 14,000 in a step)
        self._limits = LLParserLimits(
            max_items_in_row=2_000,
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            step_max_items=50_000,
            max_lexer_states=50_000,
            max_grammar_size=500_000,
        )

    def __call__(self, grammar: Grammar) -> GrammarMask:
        """Raises RequestRefused for a grammar that cannot be followed, with llguidance's reason."""
        if len(grammar.text) > MAX_CHARS:
            raise _refused(f"has {len(grammar.text)} characters, at most {MAX_CHARS} are taken")
        try:
            spelled = _spelled(grammar)
        except ValueError as error:
            raise _refused(str(error)) from None
        matcher = LLMatcher(self._tokenizer, spelled, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return GrammarMask(matcher)


def _spelled(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises ValueError for a schema that is no JSON."""
    match grammar.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=JSON)
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults=JSON)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)


def _refused(reason: str) -> RequestRefused:
    return RequestRefused(f"grammar: {reason[:300]}", param="grammar")


class GrammarMask:
    """One request's place in its grammar: a TokenMask of `sampler`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def apply(self, logits: Tensor) -> None:
        """Forbidden tokens of `logits` [vocab] become -inf, in place. Raises RequestRefused past the limits."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())
        allowed = np.unpackbits(bits, count=min(logits.numel(), bits.size * 8), bitorder="little")
        forbidden = torch.from_numpy(allowed == 0).to(logits.device)
        logits[: forbidden.numel()].masked_fill_(forbidden, float("-inf"))
        logits[forbidden.numel() :] = float("-inf")

    def accept(self, token_id: int) -> None:
        """A token that the mask forbids, or one past the limits, is told by the next `apply`."""
        self._matcher.consume_token(token_id)

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())
