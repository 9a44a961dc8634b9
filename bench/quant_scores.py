"""What an engine says of a window of text with its cache full, and sealed: over HTTP, or in this process.

score   log-probabilities after each of the last tokens, their K/V computed now, what is before them reused
run     the same beginning as a session, which the engine may seal behind it
settle  wait until so many units are sealed
"""

from __future__ import annotations

import json
import time
import urllib.request
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engines.contract import Sampling
from engines.local.wire import CONTENT_TYPE, WireRequest, encode_generate

Floats = NDArray[np.float32]
ONE = Sampling(max_tokens=1, temperature=0.0)
SETTLING_S = 60.0
PATIENCE_S = 900.0
FULL_ITEMSIZE = 4  # bytes of an element of a full page: float32 on a CPU


@dataclass(frozen=True, slots=True)
class Room:
    """What the pool takes, bytes."""

    page_bytes: int  # of a full page
    block_size: int  # tokens
    sealed_bytes: int
    sealed_units: int

    @property
    def bytes_16_bit(self) -> float:
        """Of one token's K/V in 16 bits."""
        return self.page_bytes / self.block_size / FULL_ITEMSIZE * 2


class Scorer(Protocol):
    def score(self, session: str, ids: Sequence[int], start: int, min_bits: int) -> Floats:
        """[len(ids) - start, vocab]: log-probabilities after each token from `start` on."""
        ...

    def run(self, session: str, ids: Sequence[int], min_bits: int) -> None: ...

    def settle(self, units: int) -> None: ...

    def room(self) -> Room: ...

    def forget(self, session: str) -> None: ...


class OverHttp:
    """A running `turnkeep engine` at `url` that serves `model`."""

    def __init__(self, url: str, model: str, vocab: int) -> None:
        self._url, self._model, self._vocab = url, model, vocab
        self._number = 0

    def score(self, session: str, ids: Sequence[int], start: int, min_bits: int) -> Floats:
        body = self._ask("/turnkeep/v1/score", session, ids, min_bits, start)
        return np.frombuffer(body, np.float32).reshape(len(ids) - start, self._vocab)

    def run(self, session: str, ids: Sequence[int], min_bits: int) -> None:
        self._ask("/turnkeep/v1/generate", session, ids, min_bits, None)

    def settle(self, units: int) -> None:
        """Raises TimeoutError."""
        until = time.monotonic() + SETTLING_S
        while (sealed := self.room().sealed_units) != units:
            if time.monotonic() > until:
                raise TimeoutError(f"{sealed} units are sealed, {units} were expected")
            time.sleep(0.1)

    def room(self) -> Room:
        while not (health := json.loads(self._read("/health")))["pool"]["total"]:
            time.sleep(0.1)  # it is ready, and has not said yet how full it is
        pool = health["pool"]
        sealed = sum(pool["sealed_units"].values())
        return Room(pool["bytes"] // pool["total"], health["block_size"], pool["sealed_bytes"], sealed)

    def forget(self, session: str) -> None:
        self._read(f"/turnkeep/v1/sessions/{session}", method="DELETE")

    def _ask(self, path: str, session: str, ids: Sequence[int], min_bits: int, start: int | None) -> bytes:
        self._number += 1
        delta = array("I", ids).tobytes()
        name = f"quant-{self._number}"
        request = WireRequest(name, self._model, delta, ONE, session, min_bits=min_bits, score_from=start)
        return self._read(path, encode_generate(request), method="POST")

    def _read(self, path: str, body: bytes | None = None, *, method: str = "GET") -> bytes:
        asked = urllib.request.Request(self._url + path, body, {"Content-Type": CONTENT_TYPE}, method=method)
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            return bytes(answer.read())


class InProcess:
    """`core` (engines.local.engine.LocalEngine) in this process; `request` makes what it takes (CoreRequest)."""

    def __init__(self, core: Any, request: Callable[..., Any]) -> None:
        self.core, self._request = core, request
        self._number = 0

    def score(self, session: str, ids: Sequence[int], start: int, min_bits: int) -> Floats:
        scores = np.frombuffer(self._run(session, ids, min_bits, start), np.float32)
        return scores.reshape(len(ids) - start, -1)

    def run(self, session: str, ids: Sequence[int], min_bits: int) -> None:
        self._run(session, ids, min_bits, None)

    def settle(self, units: int) -> None:
        """Nothing is left to seal when a run returns."""

    def room(self) -> Room:
        stats = self.core.stats()
        page_bytes = stats.pool_bytes // stats.blocks_total
        return Room(page_bytes, self.core.config.block_size, stats.sealed_bytes, sum(stats.sealed.values()))

    def forget(self, session: str) -> None:
        self.core.forget(session, "")

    def _run(self, session: str, ids: Sequence[int], min_bits: int, start: int | None) -> bytes:
        """To the end, sealing included."""
        self._number += 1
        body = array("I", ids).tobytes()
        self.core.submit(
            self._request(f"{self._number}", body, None, session, "", 0, ONE, min_bits=min_bits, score_from=start)
        )
        scores = b""
        while self.core.has_work():
            for output in self.core.step():
                assert output.error is None, output.error
                scores += output.scores
        return scores
