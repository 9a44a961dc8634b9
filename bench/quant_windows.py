"""Windows of text over a session's sealed past, turn by turn, against the same over a full one.

    window | past: computed in full, then sealed | turn 1 | turn 2 | ... |       each turn scored, then sealed as well

Turn 1 is scored over a past that was exact until it was sealed; a later turn over one whose own K/V was computed over
sealed pages: what drifts would show there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from bench.quant_scores import Floats, Scorer
from bench.quant_texts import Window
from engines.local.kv.quant import UNIT

Floats64 = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Shape:
    past: int = 2048
    each: int = 256  # scored tokens of a turn
    turns: int = 10
    windows: int = 8
    session_turns: int = 8  # after so many turns a session's bytes are counted: 4,096 tokens

    @property
    def tokens(self) -> int:
        return self.past + self.each * self.turns + 1  # the last id is only ever predicted


@dataclass(frozen=True, slots=True)
class Turn:
    """Of one turn's scored tokens, sealed against full."""

    kl: float  # mean, nats a token
    kl_p99: float
    top1: float
    nll_change: float  # of the text's own next tokens


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one window."""

    text: str
    turns: tuple[Turn, ...]
    bytes_ratio: float  # of sealed units over the same tokens in 16 bits
    session_ratio: float  # of the session after `session_turns`, full tokens counted with 16 bits
    session_ratio_held: float  # the same as it lies: on a CPU full pages are float32
    session_tokens: int
    kl_plain: float | None = None  # of turn 1 under the plain scheme

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Seen:
        return cls(**{**told, "turns": tuple(Turn(**turn) for turn in told["turns"])})


@dataclass(frozen=True, slots=True)
class Reference:
    """Log-probabilities [tokens, vocab] over full pages, made ready to compare with."""

    logs: Floats
    p: Floats64 = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", np.exp(self.logs.astype(np.float64)))

    def compare(self, sealed: Floats, following: Sequence[int]) -> Turn:
        """`following`: the ids that really came next."""
        lost = self.logs.astype(np.float64) - sealed
        kl = (self.p * lost).sum(-1)
        same = self.logs.argmax(-1) == sealed.argmax(-1)
        at = (np.arange(len(following)), np.array(following))
        return Turn(float(kl.mean()), float(np.quantile(kl, 0.99)), float(same.mean()), float(lost[at].mean()))


@dataclass(slots=True)
class Session:
    """A window's session at one scorer."""

    scorer: Scorer
    name: str
    before: int = 0  # sealed units of the scorer before it began
    before_bytes: int = 0

    def begin(self, ids: Sequence[int]) -> None:
        """Compute these in full, then let them be sealed."""
        room = self.scorer.room()
        self.before, self.before_bytes = room.sealed_units, room.sealed_bytes
        self.scorer.run(self.name, ids, 16)
        self.scorer.run(self.name, ids, 0)

    def settled(self, tokens: int) -> None:
        """Wait until all of a path of so many tokens is sealed that will be."""
        self.scorer.settle(self.before + expected_units(tokens))

    def ratios(self, tokens: int) -> tuple[float, float, float]:
        """bytes_ratio, session_ratio, session_ratio_held of a path of so many tokens."""
        room = self.scorer.room()
        units = room.sealed_units - self.before
        if units != expected_units(tokens):
            raise RuntimeError(f"{units} units of {tokens} tokens were sealed")
        nbytes, sealed = room.sealed_bytes - self.before_bytes, units * UNIT
        full, whole = tokens - sealed, tokens * room.bytes_16_bit
        held = nbytes + full * room.page_bytes / room.block_size
        return nbytes / (sealed * room.bytes_16_bit), (nbytes + full * room.bytes_16_bit) / whole, held / whole


def expected_units(tokens: int) -> int:
    """Of a path of so many tokens: all but the first unit, and those that reach into the last 64 tokens."""
    return max((tokens - UNIT) // UNIT - 1, 0)


def look(
    number: int, window: Window, shape: Shape, full: Scorer, sealing: Mapping[str, Scorer], plain: Mapping[str, Scorer]
) -> dict[str, Seen]:
    """Score one window at each of the `sealing` scorers, and its first turn at the `plain` ones."""
    name, ids = f"window-{number}", window.ids
    full.run(name, ids[: shape.past], 16)
    sessions = {policy: Session(scorer, name) for policy, scorer in sealing.items()}
    for session in sessions.values():
        session.begin(ids[: shape.past])
        session.settled(shape.past + 1)  # with the one that it generated
    turns: dict[str, list[Turn]] = {policy: [] for policy in sealing}
    ratios: dict[str, tuple[float, float, float]] = {}
    counted, plainly = min(shape.session_turns, shape.turns), {}
    for turn in range(shape.turns):
        start, stop = shape.past + turn * shape.each, shape.past + (turn + 1) * shape.each
        reference = Reference(full.score(name, ids[:stop], start, 16))
        following = ids[start + 1 : stop + 1]
        for policy, session in sessions.items():
            turns[policy].append(reference.compare(session.scorer.score(name, ids[:stop], start, 0), following))
            session.settled(stop + 1)
            if turn + 1 == counted:
                ratios[policy] = session.ratios(stop + 1)
        if turn == 0:
            for policy, scorer in plain.items():
                scorer.run(name, ids[: shape.past], 16)
                scorer.run(name, ids[: shape.past], 0)
                plainly[policy] = reference.compare(scorer.score(name, ids[:stop], start, 0), following).kl
                scorer.forget(name)
    for scorer in (full, *sealing.values()):
        scorer.forget(name)
    tokens = shape.past + counted * shape.each + 1
    return {
        policy: Seen(window.text, tuple(turns[policy]), *ratios[policy], tokens, plainly.get(policy))
        for policy in sealing
    }


def figures(seen: Sequence[Seen]) -> dict[str, Any]:
    """Over all windows: see docs/bench.md."""
    turns = [turn for one in seen for turn in one.turns]

    def mean(name: str, of: Sequence[Turn]) -> float:
        return float(np.mean([getattr(turn, name) for turn in of]))

    first = [one.turns[0] for one in seen]
    plain = [one.kl_plain for one in seen if one.kl_plain is not None]
    kl_plain = float(np.mean(plain)) if len(plain) == len(seen) and seen else None
    long = [one for one in seen if len(one.turns) >= 8]
    drift = mean("kl", [one.turns[7] for one in long]) / mean("kl", [one.turns[1] for one in long]) if long else None
    whole = max(one.session_tokens for one in seen)
    sessions = [one for one in seen if one.session_tokens == whole]
    return {
        "bytes_ratio": round(max(one.bytes_ratio for one in seen), 4),
        "session_bytes_ratio": round(max(one.session_ratio for one in sessions), 4),
        "session_bytes_ratio_held": round(max(one.session_ratio_held for one in sessions), 4),
        "session_tokens": whole,
        "kl": rounded(mean("kl", turns)),
        "kl_first_turn": rounded(mean("kl", first)),
        "kl_worst": rounded(max(mean("kl", one.turns) for one in seen)),
        "kl_worst_turn": rounded(max(turn.kl for turn in turns)),
        "kl_p99": rounded(mean("kl_p99", turns)),
        "top1": round(mean("top1", turns), 4),
        "nll_change": round(mean("nll_change", turns), 5),
        "by_text": {
            text: rounded(mean("kl", [turn for one in seen if one.text == text for turn in one.turns]))
            for text in sorted({one.text for one in seen})
        },
        "by_turn": [
            rounded(mean("kl", [one.turns[n] for one in seen if len(one.turns) > n]))
            for n in range(max(len(one.turns) for one in seen))
        ],
        "drift": round(drift, 3) if drift is not None else None,
        "kl_plain": rounded(kl_plain) if kl_plain is not None else None,
        "kl_over_plain": round(mean("kl", first) / kl_plain, 3) if kl_plain is not None else None,
    }


def rounded(value: float) -> float:
    return float(f"{value:.3g}")
