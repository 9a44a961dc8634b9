"""Generated ids into content, reasoning and tool calls, while they come.

    ids --TextStream--> text and control tokens --a Reader for the family's format--> AnswerPieces

What a family's format is, is told by the tokenizer (`response_template`, read by transformers' own parser) or seen in
the chat template. A tool call comes out whole, when it has ended; one that does not parse comes out as content, with
the marks around it, so nothing is lost. Stop strings are the engine's business: what it cut is cut here (`text`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.sessions.declared import TemplateReader
from gateway.sessions.decoding import Control, TextStream
from gateway.sessions.harmony import HarmonyReader
from gateway.sessions.readers import AnswerPiece, JsonReader, MarkedReader, PlainReader, Reader
from gateway.sessions.tokens import ModelTokens

__all__ = ["AnswerFormat", "AnswerParser", "AnswerPiece"]

Kind = Literal["declared", "harmony", "marked", "mistral", "json", "plain"]
TAIL_IDS = 48  # of a prompt, enough to see what part of the answer it opens


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers. `tools`, `reasoning`: whether they can be told from the content."""

    kind: Kind
    tools: bool
    reasoning: bool

    @classmethod
    def of(cls, tokens: ModelTokens) -> AnswerFormat:
        """The format of a model's answers, seen in its tokenizer and template."""
        source = tokens.template.source
        thinks = "<think>" in source or "<think>" in tokens.vocabulary.controls
        if tokens.response_template is not None:
            fields = set(tokens.response_template.get("fields", {}))
            return cls("declared", "tool_calls" in fields, bool(fields & TemplateReader.REASONING))
        if "<|channel|>" in source and "<|message|>" in source:
            return cls("harmony", tokens.takes_tools, True)
        if "[TOOL_CALLS]" in source and "[INST]" in source:
            return cls("mistral", tokens.takes_tools, thinks)
        if "<tool_call>" in source and '"arguments"' in source.replace('\\"', '"') and "<function=" not in source:
            return cls("marked", tokens.takes_tools, thinks)
        if "<|start_header_id|>" in source and '"parameters"' in source.replace('\\"', '"'):
            return cls("json", tokens.takes_tools, thinks)
        return cls("plain", False, thinks)

    def supports(self, *, tools: bool, reasoning: bool) -> bool:
        """Whether answers to such a request can be parsed here; otherwise chat mode is for them."""
        return (self.tools or not tools) and (self.reasoning or not reasoning)


class AnswerParser:
    """Parses one answer. `prompt`: the ids it follows (u32 little-endian; the end is enough).

    `special_in_text`: the engine's text holds special tokens (an engine told not to skip them).
    """

    def __init__(
        self,
        tokens: ModelTokens,
        *,
        prompt: bytes,
        tools: Sequence[Mapping[str, Any]] = (),
        format: AnswerFormat | None = None,
        special_in_text: bool = False,
    ) -> None:
        self._stream = TextStream(tokens.vocabulary, special_in_text=special_in_text)
        before = tokens.decode(prompt[-4 * TAIL_IDS :])
        self._reader = _reader(format or AnswerFormat.of(tokens), tokens, tools, before)
        self._names = self._reader.marks

    def push(self, ids: Sequence[int], text: str | None = None) -> list[AnswerPiece]:
        """What these ids add. `text`: what the engine let out with them (Delta.text); None: nothing is held back."""
        return self._pieces(self._stream.push(ids, text))

    def finish(self, *, cut: bool = False) -> list[AnswerPiece]:
        """The rest. `cut`: a stop string ended the answer; what the engine's text had not reached is dropped."""
        return [*self._pieces(self._stream.finish(cut=cut)), *self._reader.finish()]

    def _pieces(self, stream: Iterable[str | Control]) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        for item in stream:
            if isinstance(item, str):
                pieces += self._reader.read(item)
            elif item.name in self._names or not item.special:
                pieces += self._reader.read(item.name)
        return pieces


def _reader(format: AnswerFormat, tokens: ModelTokens, tools: Sequence[Mapping[str, Any]], before: str) -> Reader:
    names = frozenset(str(tool.get("function", tool).get("name")) for tool in tools)
    thinks = format.reasoning
    opened = thinks and before.rstrip().endswith("<think>")
    match format.kind:
        case "declared":
            assert tokens.response_template is not None
            return TemplateReader(tokens.response_template, before, tools, tokens.vocabulary.controls)
        case "harmony":
            return HarmonyReader(before)
        case "marked" if names:
            return MarkedReader(thinks=thinks, opened=opened, calls=("<tool_call>", "</tool_call>"))
        case "mistral" if names:
            return MarkedReader(thinks=thinks, opened=opened, calls=("[TOOL_CALLS]", None))
        case "json" if names:
            return JsonReader(names)
        case _ if thinks:
            return MarkedReader(thinks=True, opened=opened, calls=None)
    return PlainReader()
