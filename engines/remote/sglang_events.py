"""The events of SGLang's native /generate, read into Deltas.

    {"text", "output_ids", "meta_info": {"finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", …}}

By default each event holds the whole answer so far; with `--incremental-streaming-output` (older: `--stream-output`,
ids only) what the step added. Of the ids the counts tell which, of the text the server's arguments do. Fields that are
not known are passed over; an event that contradicts the protocol raises ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engines.contract import Delta, FinishReason, TokenLogprob
from engines.remote.replies import natural, text_of, token_ids, usage_of
from engines.remote.stops import StopWatch

_FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}


class Aborted(Exception):
    """The server gave the request up. `status`: what it would have answered with, where it says."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


class GenerateReader:
    """Reads the events of one answer in order. `text_in_steps` None: not known, so taken for what it looks like."""

    def __init__(self, stops: Sequence[str] = (), *, text_in_steps: bool | None = None) -> None:
        self._watch = StopWatch(stops)
        self._text_in_steps = text_in_steps
        self._text = ""  # as told so far
        self._num_ids = 0
        self._num_logprobs = 0
        self._incremental: bool | None = None  # not told before the second event

    def read(self, event: Mapping[str, Any]) -> Delta | None:
        """What the event adds; None where it adds nothing. The last one has the finish reason and the usage."""
        meta = event["meta_info"]
        reason = meta.get("finish_reason")
        if isinstance(reason, str):
            reason = {"type": reason}
        if reason and reason["type"] == "abort":
            raise Aborted(str(reason.get("message") or "aborted"), _status(reason.get("status_code")))
        if (count := natural(meta.get("completion_tokens") or 0)) is None:
            raise ValueError("the number of completion tokens is none")
        ids = self._new_ids(token_ids(event["output_ids"]), count)
        told = text_of(event.get("text"))
        text = self._watch.push(self._new_text(told))
        logprobs = self._new_logprobs(meta)
        if not reason:
            return Delta(text, ids, logprobs=logprobs) if text or ids or logprobs else None
        if reason["type"] not in _FINISH:
            raise ValueError(f"unknown finish reason {reason['type']!r}")
        matched = reason.get("matched")
        stop = matched if isinstance(matched, str) else self._watch.matched
        text += self._watch.rest() if stop is None else self._watch.rest_before(stop)
        usage = usage_of(meta.get("prompt_tokens") or 0, count, meta.get("cached_tokens"))
        return Delta(text, ids, logprobs=logprobs, finish=_FINISH[reason["type"]], stop=stop, usage=usage)

    def _new_ids(self, ids: Sequence[int], count: int) -> tuple[int, ...]:
        before = self._num_ids
        if len(ids) == count:
            new = ids[before:]
            if before and ids:
                self._incremental = False
        elif before + len(ids) == count:
            new = ids
            self._incremental = True
        else:
            raise ValueError(f"{len(ids)} ids after {before} make no {count} completion tokens")
        self._num_ids = count
        return tuple(new)

    def _new_text(self, text: str) -> str:
        in_steps = self._text_in_steps
        if in_steps is None:
            in_steps = bool(self._incremental) and not text.startswith(self._text)
        if in_steps:
            new = text
            self._text += text
        else:
            if not text.startswith(self._text) and not self._text.startswith(text):
                raise ValueError("the text so far has changed")
            new = text[len(self._text) :]
            self._text = max(self._text, text, key=len)
        return new

    def _new_logprobs(self, meta: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
        told = meta.get("output_token_logprobs") or ()
        tops = meta.get("output_top_logprobs") or ()
        start = 0 if self._incremental else self._num_logprobs
        self._num_logprobs = self._num_logprobs + len(told) if self._incremental else max(self._num_logprobs, len(told))
        return tuple(
            TokenLogprob(
                int(token),
                text or "",
                float(value),
                tuple((int(i), t or "", float(v)) for v, i, t in (tops[place] or ())) if place < len(tops) else (),
            )
            for place, (value, token, text) in enumerate(told)
            if place >= start
        )


def _status(code: Any) -> int | None:
    return int(code) if isinstance(code, int) and not isinstance(code, bool) else None
