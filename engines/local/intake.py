"""From a request to a Sequence: the session's path, the base it goes on from, what may be shifted, and every refusal.

Knows no pool and no tensors; changes nothing.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from engines.blocks import ids_from_bytes
from engines.contract import EMPTY_DIGEST, ContextOverflow, RequestRefused, chain_digest
from engines.local.kv.session_cache import SessionCache, SessionPath, grown_marks, session_tag
from engines.local.kv.shift import Moved, refuse_shift
from engines.local.sequence import CoreRequest, Sequence

ID_BYTES = 4  # u32
MAX_SCORED = 256  # tokens of one request: 50 MB of log-probabilities for a vocabulary of 49,152


@dataclass(frozen=True, slots=True)
class Intake:
    """What requests are held against. `window` in tokens; ids are below `vocab`; `shifts`: K/V can be moved."""

    sessions: SessionCache
    window: int
    vocab: int
    shifts: bool

    def sequence(self, request: CoreRequest, *, arrival: int, now_s: float) -> Sequence:
        """Raises UnknownBase, ContextOverflow, RequestRefused.

        The cost of a base is one copy of its ids; nothing of it is hashed or looked up again.
        """
        try:
            delta = ids_from_bytes(request.delta)
        except ValueError as error:
            raise RequestRefused("the delta is no list of 4-byte token ids", param="delta") from error
        base = request.base if request.base is not None and request.base.length else None
        path = self._path(request)
        tokens = path.ids[: base.length] + delta if path is not None and base is not None else delta
        generated = request.generated.ids if request.generated is not None else 0
        if generated > len(delta):
            raise RequestRefused(f"{generated} ids are said to be generated, {len(delta)} came", param="generated")
        prompt_len = len(tokens) - generated
        if request.score_from is not None and not 0 < prompt_len - request.score_from <= MAX_SCORED:
            raise RequestRefused(
                f"score_from must be one of the last {MAX_SCORED} of {prompt_len} prompt tokens", param="score_from"
            )
        self._refuse_ids(delta, prompt_len, request.sampling.max_tokens)
        seq = Sequence(
            request_id=request.request_id,
            tokens=tokens,
            prompt_len=prompt_len,
            sampling=request.sampling,
            salt=request.salt,
            priority=request.priority,
            arrival=arrival,
            submitted_s=now_s,
            session=request.session,
            moved=self._moved(request, path, tokens),
            pinned=request.pinned,
            min_bits=request.min_bits,
            system_tokens=request.system_tokens or (path.system_tokens if path is not None and base is not None else 0),
            recent_from=request.recent_from,
            score_from=request.score_from,
        )
        if request.session is not None:
            seq.tag = session_tag(request.session, request.salt)
            before = base.digest if base is not None else EMPTY_DIGEST
            asked = request.delta[: ID_BYTES * (len(delta) - generated)]
            digest = chain_digest(before, asked) if asked else before
            seq.marks = grown_marks(path, base, prompt_len, digest)
        if path is not None:
            seq.hint = path.blocks
            seq.hint_len = common_prefix(path.ids, tokens, base.length if base is not None else 0)
        return seq

    def _path(self, request: CoreRequest) -> SessionPath | None:
        base = request.base
        if request.session is None:
            if base is not None and base.length:
                raise RequestRefused("a base needs the session it belongs to", param="base")
            return None
        if base is not None and base.length:
            return self.sessions.find(request.session, request.salt, base)
        return self.sessions.get(request.session, request.salt)

    def _moved(self, request: CoreRequest, path: SessionPath | None, tokens: array[int]) -> Moved | None:
        shift = request.shift
        if shift is None:
            return None
        refuse_shift(shift, len(tokens), request.session)
        if path is None or not path.mark(shift.base) or not self.shifts:
            return None  # all is computed, exactly
        source, dest = shift.source_start, shift.dest_start
        if path.ids[source : source + shift.length] != tokens[dest : dest + shift.length]:
            raise RequestRefused(
                f"the {shift.length} ids at {source} of the path are not those at {dest} of the prompt", param="shift"
            )
        return Moved(path.blocks, source, dest, shift.length, shift.recompute)

    def _refuse_ids(self, delta: array[int], prompt_len: int, max_tokens: int) -> None:
        if not prompt_len:
            raise RequestRefused("the prompt is empty", param="prompt")
        if prompt_len + max_tokens > self.window:
            raise ContextOverflow(
                f"{prompt_len} prompt tokens and max_tokens {max_tokens} exceed the window of {self.window}",
                limit=self.window,
                requested=prompt_len + max_tokens,
            )
        if len(delta) and (largest := max(delta)) >= self.vocab:
            raise RequestRefused(f"token id {largest} is not in the vocabulary of {self.vocab}", param="prompt")


def common_prefix(one: array[int], other: array[int], known: int) -> int:
    """How many ids both begin with, `known` of them for sure."""
    least = min(len(one), len(other))
    same = np.frombuffer(one, np.uint32, least)[known:] == np.frombuffer(other, np.uint32, least)[known:]
    return least if bool(same.all()) else known + int(same.argmin())
