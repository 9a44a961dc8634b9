"""The events of llama.cpp's native /completion, read into Deltas.

    {"content", "tokens": [id], "tokens_predicted", "tokens_evaluated", "stop": false} … {"stop": true, "stop_type", …}

There is no `[DONE]`. Two things that its documentation does not say: of a character that takes several tokens, only
the last one's id is told (`tokens_predicted` shows the gap: `missing`), and an event of progress holds an id that was
never generated. Fields that are not known are passed over; an event that contradicts the protocol raises ValueError.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from engines.contract import Delta, FinishReason, TokenLogprob, Usage
from engines.remote.replies import natural, text_of, usage_of
from engines.remote.stops import StopWatch

_FINISH: Mapping[str, FinishReason] = {"eos": "stop", "word": "stop", "limit": "length"}


class CompletionReader:
    """Reads the events of one answer in order. Stop strings and ids are watched for here, not by the server: while it
    holds text back it cannot be seen which ids are missing, and it takes no stop ids."""

    def __init__(
        self, *, stops: Sequence[str] = (), stop_ids: Collection[int] = (), logprobs: int | None = None
    ) -> None:
        self._watch = StopWatch(stops)
        self._stop_ids = stop_ids
        self._logprobs = logprobs
        self._predicted = 0
        self._timings: Mapping[str, Any] = {}
        self._over = False  # a stop id came: the server may know that it is one, else the next event shows

    def missing(self, event: Mapping[str, Any]) -> int:
        """How many ids were generated before this event's own and not told."""
        if event["stop"] or _is_progress(event):
            return 0
        ids = event["tokens"]
        gap = int(event.get("tokens_predicted", self._predicted + len(ids))) - self._predicted - len(ids)
        if gap < 0:
            raise ValueError(f"{len(ids)} ids after {self._predicted} make no {event['tokens_predicted']}")
        return gap

    def read(self, event: Mapping[str, Any], ids: Sequence[int]) -> Delta | None:
        """What the event adds, its ids made complete; None where it adds nothing. The last one has `finish`."""
        self._timings = event.get("timings") or self._timings
        if event["stop"]:
            return self._last(event)
        if _is_progress(event):
            return None
        if self._over:
            return Delta(finish="stop", usage=self._usage(event))
        self._predicted += len(ids)
        over = next((place for place, id in enumerate(ids) if id in self._stop_ids), None)
        self._over = over is not None
        text = "" if self._over else self._watch.push(text_of(event["content"]))
        probabilities = _read_probabilities(event.get("completion_probabilities") or (), self._logprobs)
        if self._watch.matched is not None:
            stop = self._watch.matched
            return Delta(text, tuple(ids), logprobs=probabilities, finish="stop", stop=stop, usage=self._usage(event))
        return Delta(text, tuple(ids), logprobs=probabilities) if text or ids else None

    def _last(self, event: Mapping[str, Any]) -> Delta:
        kind = event.get("stop_type")
        if kind is None:  # releases before December 2024
            kind = next((k for k in _FINISH if event.get(f"stopped_{k}")), "none")
        if kind == "none" and event.get("truncated"):
            kind = "limit"
        finish: FinishReason = "stop" if self._over else _FINISH[kind]
        self._predicted = int(event.get("tokens_predicted", self._predicted))
        return Delta(self._watch.rest(), finish=finish, usage=self._usage(event))

    def _usage(self, event: Mapping[str, Any]) -> Usage | None:
        prompt, cached = natural(event.get("tokens_evaluated") or 0), self._timings.get("cache_n")
        if cached is None and prompt and (computed := natural(self._timings.get("prompt_n"))) is not None:
            cached = max(0, prompt - computed)
        return usage_of(prompt, self._predicted, cached)


def _is_progress(event: Mapping[str, Any]) -> bool:
    return "prompt_progress" in event and not event.get("tokens_predicted")


def _read_probabilities(entries: Sequence[Mapping[str, Any]], wanted: int | None) -> tuple[TokenLogprob, ...]:
    if wanted is None:
        return ()
    return tuple(
        TokenLogprob(
            int(entry["id"]),
            entry["token"],
            float(entry["logprob"]),
            tuple((int(t["id"]), t["token"], float(t["logprob"])) for t in entry.get("top_logprobs") or ())[:wanted],
        )
        for entry in entries
    )
