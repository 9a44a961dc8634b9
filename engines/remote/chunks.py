"""The chunks of OpenAI's streams, of /v1/completions and /v1/chat/completions, read into Deltas.

    chunk ... chunk(finish_reason) [chunk(usage)] [DONE]

The last Delta waits for the usage, which most servers send in a chunk of its own, some with the finish reason and
some never. Fields that are not known are passed over; a chunk that contradicts the protocol raises ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from engines.contract import Delta, FinishReason, TokenLogprob, ToolCallDelta, Usage
from engines.remote.replies import natural, text_of, token_ids, usage_of

NO_ID = -1  # id of a token that the server names only by its text
MAX_CALLS = 1024  # tool calls of one answer
_FINISH: Mapping[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",  # servers before they copied OpenAI
    "repetition": "stop",  # vLLM's repetition detection
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}


class ChunkReader:
    """Reads the chunks of one answer in order."""

    def __init__(self) -> None:
        self._last: Delta | None = None
        self._usage: Usage | None = None

    @property
    def finished(self) -> bool:
        """The finish reason has come; what is missing is at most the usage."""
        return self._last is not None

    def read(self, chunk: Mapping[str, Any]) -> Delta | None:
        """The Delta of a chunk, but not the last one; None where it adds nothing."""
        if (usage := chunk.get("usage")) is not None:
            self._usage = read_usage(usage)
        choices = chunk.get("choices")
        if not choices:
            return None
        choice = choices[0]
        delta = choice.get("delta")
        delta = _completion_delta(choice) if delta is None else _chat_delta(choice, delta)
        if self._last is not None:  # what some say after the end, and some say the end twice
            self._last = _joined(self._last, delta)
            return None
        if (reason := choice.get("finish_reason")) is None:
            return delta if _says_something(delta) else None
        if reason not in _FINISH:
            raise ValueError(f"unknown finish reason {reason!r}")
        stop = choice.get("stop_reason", choice.get("matched_stop"))
        self._last = Delta(
            delta.text, delta.ids, delta.reasoning, delta.tool_calls, delta.logprobs,
            finish=_FINISH[reason], stop=stop if isinstance(stop, str) and reason == "stop" else None,
        )  # fmt: skip
        return None

    def take_last(self, *, ended: bool) -> Delta | None:
        """The last Delta once finish and usage are there, or, when the stream `ended`, the finish alone."""
        if self._last is None or (self._usage is None and not ended):
            return None
        last = self._last
        return Delta(
            last.text, last.ids, last.reasoning, last.tool_calls, last.logprobs,
            finish=last.finish, stop=last.stop, usage=self._usage,
        )  # fmt: skip


def _joined(last: Delta, more: Delta) -> Delta:
    """The end of an answer with what came behind it."""
    return Delta(
        last.text + more.text, last.ids + more.ids, last.reasoning + more.reasoning, last.tool_calls + more.tool_calls,
        last.logprobs + more.logprobs, finish=last.finish, stop=last.stop,
    )  # fmt: skip


def _says_something(delta: Delta) -> bool:
    return bool(delta.text or delta.ids or delta.reasoning or delta.tool_calls or delta.logprobs)


def _completion_delta(choice: Mapping[str, Any]) -> Delta:
    ids = token_ids(choice.get("token_ids"))
    logprobs = choice.get("logprobs")
    return Delta(text_of(choice.get("text")), ids, logprobs=_completion_logprobs(logprobs, ids) if logprobs else ())


def _chat_delta(choice: Mapping[str, Any], delta: Mapping[str, Any]) -> Delta:
    ids = token_ids(choice.get("token_ids"))
    content = delta.get("content")
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    if isinstance(content, list):
        text, thought = _parts(content)
        reasoning = reasoning or thought
    else:
        text = text_of(content)
    calls = delta.get("tool_calls")
    logprobs = choice.get("logprobs")
    return Delta(
        text or text_of(delta.get("refusal")),
        ids,
        reasoning if isinstance(reasoning, str) else "",
        tuple(_tool_call(place, call) for place, call in enumerate(calls)) if calls else (),
        _chat_logprobs(logprobs.get("content") or (), ids) if logprobs else (),
    )


def _parts(content: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Text and reasoning of content that comes as parts (Mistral's own server)."""
    text, thought = "", ""
    for part in content:
        if part.get("type") == "thinking":
            thought += "".join(str(piece.get("text", "")) for piece in part.get("thinking") or ())
        else:
            text += str(part.get("text") or "")
    return text, thought


def _tool_call(place: int, call: Mapping[str, Any]) -> ToolCallDelta:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):  # some servers send the object itself, whole
        arguments = "" if arguments is None else orjson.dumps(arguments).decode()
    index = natural(place if call.get("index") is None else call["index"])
    if index is None or index >= MAX_CALLS:
        raise ValueError(f"a tool call of number {str(call['index'])[:40]}")
    return ToolCallDelta(index, text_of(call.get("id")) or None, text_of(function.get("name")) or None, arguments)


def read_usage(usage: Any) -> Usage | None:
    """Usage of OpenAI's shape; `cached_tokens` None where the server does not say. None: it is none."""
    if not isinstance(usage, Mapping):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return usage_of(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0, cached)


def _chat_logprobs(content: Iterable[Mapping[str, Any]], ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    entries = list(content)
    known = ids if len(ids) == len(entries) else ()
    return tuple(
        TokenLogprob(
            known[place] if known else NO_ID,
            entry["token"],
            float(entry["logprob"]),
            tuple((NO_ID, top["token"], float(top["logprob"])) for top in entry.get("top_logprobs") or ()),
        )
        for place, entry in enumerate(entries)
    )


def _completion_logprobs(logprobs: Mapping[str, Any], ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    tokens, values = logprobs.get("tokens") or (), logprobs.get("token_logprobs") or ()
    tops = logprobs.get("top_logprobs") or ()
    known = ids if len(ids) == len(tokens) else ()
    return tuple(
        TokenLogprob(
            known[place] if known else NO_ID,
            token,
            float(value or 0.0),
            tuple((NO_ID, text, float(other)) for text, other in (tops[place] or {}).items())
            if place < len(tops)
            else (),
        )
        for place, (token, value) in enumerate(zip(tokens, values, strict=True))
    )
