"""The runs behind `bench.shift`: chats cut, shifted in several ways through the engine's pages, and computed anew."""

from __future__ import annotations

import re
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.real_chats import Chat, Message, chats, rendered
from engines.contract import EMPTY_DIGEST, Base, Sampling, Shift, chain_digest
from engines.local.config import EngineConfig
from engines.local.engine import LocalEngine
from engines.local.model import LoadedModel, load_model
from engines.local.rope import Rotation
from engines.local.sequence import CoreRequest

KEPT_SHARE = 0.4  # of the old prompt's tokens, at least
TAIL = 128  # tokens, at least, that follow the kept turns
SUMMARY_CHARS = 1000
CHUNK = 512  # tokens of a forward
POOL_BYTES = 400 << 20
DEFAULT = "recompute_64"


@dataclass(frozen=True, slots=True)
class Cut:
    """One chat before and after. `old` and `new` are ids; the tail follows the kept turns to the end of `new`."""

    set: str
    old: list[int]
    new: list[int]
    source_start: int
    dest_start: int
    length: int

    @property
    def tail_start(self) -> int:
        return self.dest_start + self.length

    @property
    def moved_by(self) -> int:
        return self.dest_start - self.source_start

    @property
    def common(self) -> int:
        """Ids that both begin with: they need no shift."""
        return next(at for at, (one, other) in enumerate(zip(self.old, self.new, strict=False)) if one != other)


@dataclass(frozen=True, slots=True)
class Variant:
    recompute: int = 0  # kept tokens that are computed
    turned: bool = True  # keys go to their new positions
    gap: bool = False  # what follows goes on at the old positions, and none are used in between


VARIANTS = {  # the one that computes more, and so publishes more, comes last
    "plain": Variant(),
    "without_rotation": Variant(turned=False),
    "old_positions": Variant(turned=False, gap=True),
    "recompute_64": Variant(recompute=64),
}


class Recorder(nn.Module):
    """The model as the engine runs it; keeps the logits of every position from `first` on, in order.

    From `first` on it tells the model positions that are `gap` further."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.first = 0
        self.gap = 0
        self.rows: list[Tensor] = []

    def forward(self, *, position_ids: Tensor, logits_to_keep: Tensor, **given: Any) -> SimpleNamespace:
        late = position_ids[0] >= self.first
        wanted = late.nonzero().flatten()
        keep = torch.cat((wanted, logits_to_keep))
        told = position_ids + self.gap * late
        logits = self.inner(position_ids=told, logits_to_keep=keep, **given).logits
        self.rows.append(logits[0, : len(wanted)].float())
        return SimpleNamespace(logits=logits[:, len(wanted) :])


@dataclass(frozen=True, slots=True)
class Run:
    logits: Tensor  # [tail, vocab], float32
    shifted_tokens: int


@dataclass(slots=True)
class Desk:
    """An engine whose model is watched. One request at a time."""

    engine: LocalEngine
    recorder: Recorder

    @classmethod
    def of(cls, model: LoadedModel) -> Desk:
        recorder = Recorder(model.module)
        # variants run as background work, which leaves the session's path as it was
        config = EngineConfig(pool_bytes=POOL_BYTES, max_batch_tokens=CHUNK, background_chunk=CHUNK)
        return cls(LocalEngine(replace(model, module=recorder), config, time.monotonic), recorder)

    def talk(self, cut: Cut, session: str) -> Base:
        """The chat before the cut: its path stays with the session."""
        self.recorder.first = len(cut.old)
        ids, _ = self._ask(CoreRequest("old", packed(cut.old), None, session, session, 0, Sampling(1)))
        digest = chain_digest(chain_digest(EMPTY_DIGEST, packed(cut.old)), packed(ids))
        return Base(len(cut.old) + len(ids), digest)

    def run(self, cut: Cut, session: str, shift: Shift | None = None, *, gap: int = 0) -> Run:
        self.recorder.first, self.recorder.gap, self.recorder.rows = cut.tail_start, gap, []
        request = CoreRequest("new", packed(cut.new), None, session, session, 1, Sampling(1), shift)
        _, usage = self._ask(request)
        self.recorder.gap = 0
        logits = torch.cat(self.recorder.rows)
        assert len(logits) == len(cut.new) - cut.tail_start
        return Run(logits, usage.shifted_tokens)

    def _ask(self, request: CoreRequest) -> tuple[list[int], Any]:
        self.engine.submit(request)
        ids: list[int] = []
        usage = None
        while self.engine.has_work():
            for output in self.engine.step():
                ids += output.ids
                usage = output.usage or usage
                assert output.error is None, output.error
        self.engine.check()
        return ids, usage


@dataclass(slots=True)
class Seen:
    """Of one variant, over all chats."""

    kl: list[float] = field(default_factory=list)  # nats, one a position
    same: list[bool] = field(default_factory=list)
    shifted: list[int] = field(default_factory=list)

    def add(self, run: Run, exact: Run) -> None:
        right = exact.logits.log_softmax(-1)
        self.kl += F.kl_div(run.logits.log_softmax(-1), right, reduction="none", log_target=True).sum(-1).tolist()
        self.same += (run.logits.argmax(-1) == right.argmax(-1)).tolist()
        self.shifted.append(run.shifted_tokens)

    def figures(self) -> dict[str, Any]:
        return {
            "kl_mean": round(statistics.fmean(self.kl), 5),
            "kl_p95": round(sorted(self.kl)[min(int(0.95 * len(self.kl)), len(self.kl) - 1)], 5),
            "top1_agreement": round(statistics.fmean(self.same), 4),
            "shifted_tokens": round(statistics.fmean(self.shifted), 1),
        }


def packed(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def summary_of(messages: Sequence[Message]) -> Message:
    """The first sentences of what the user said: what stands where the middle stood."""
    said = [re.split(r"(?<=[.?!])\s", message["content"])[0] for message in messages if message["role"] == "user"]
    return {"role": "user", "content": "Summary of the conversation so far: " + " ".join(said)[:SUMMARY_CHARS]}


def cut_of(chat: Chat, tokenizer: Any) -> Cut | None:
    """system, turn 1 | middle -> summary | kept | tail; None where that leaves no middle, or the template does not
    join cleanly."""
    messages = chat.messages
    lengths = [len(rendered(tokenizer, messages[:at])) for at in range(1, len(messages) + 1)]
    length = dict(enumerate(lengths, 1))  # of the first so many messages
    total = lengths[-1]
    end = max((at for at in length if total - length[at] >= TAIL), default=0)
    start = max((at for at in length if at <= end and length[end] - length[at] >= KEPT_SHARE * total), default=0)
    if start <= 2:
        return None
    head = [*messages[:2], summary_of(messages[2:start])]
    old, opening = rendered(tokenizer, messages[:end]), rendered(tokenizer, head)
    new = rendered(tokenizer, [*head, *messages[start:]])
    moving = old[length[start] :]
    clean = (
        old[: length[start]] == rendered(tokenizer, messages[:start])
        and new[: len(opening)] == opening
        and new[len(opening) : len(opening) + len(moving)] == moving
    )
    return Cut(chat.set, old, new, length[start], len(opening), len(moving)) if clean else None


def measure(folder: Path, data: Path, *, count: int, at_least: int, threads: int | None) -> dict[str, Any]:
    if threads:
        torch.set_num_threads(threads)
    model = load_model(folder)
    if model.no_shift is not None:
        raise SystemExit(f"this model's keys cannot be moved: {model.no_shift}")
    still = {
        layer: None if turn is None else Rotation(torch.zeros_like(turn.inv_freq), turn.neighbours)
        for layer, turn in model.rotations.items()
    }
    turned, unturned = Desk.of(model), Desk.of(replace(model, rotations=still))
    seen = {name: Seen() for name in VARIANTS}
    by_set: dict[str, Seen] = {}
    done: list[Cut] = []
    for chat in chats(data, model.tokenizer, at_least):
        cut = cut_of(chat, model.tokenizer)
        if cut is None:
            print(f"a chat of {chat.set} left out: it cannot be cut", file=sys.stderr, flush=True)
            continue
        session = f"chat-{len(done)}"
        bases = {id(desk): desk.talk(cut, session) for desk in (turned, unturned)}
        runs: dict[str, Run] = {}
        for way, variant in VARIANTS.items():
            desk = turned if variant.turned else unturned
            shift = Shift(bases[id(desk)], cut.source_start, cut.dest_start, cut.length, variant.recompute)
            runs[way] = desk.run(cut, session, shift, gap=-cut.moved_by if variant.gap else 0)
            assert runs[way].shifted_tokens == cut.length - variant.recompute, runs[way].shifted_tokens
        exact = unturned.run(cut, session)
        for way, run in runs.items():
            seen[way].add(run, exact)
        by_set.setdefault(cut.set, Seen()).add(runs[DEFAULT], exact)
        done.append(cut)
        kl = ", ".join(f"{way} {statistics.fmean(one.kl[-len(exact.logits) :]):.4f}" for way, one in seen.items())
        sizes = f"{len(cut.old)} -> {len(cut.new)} tokens, {cut.length} kept, {len(exact.logits)} compared"
        print(f"{cut.set}: {sizes}; KL {kl}", file=sys.stderr, flush=True)
        if len(done) == count:
            break
    if not done:
        raise SystemExit("no chat could be cut")
    return report(seen, by_set, done)


def report(seen: dict[str, Seen], by_set: dict[str, Seen], cuts: Sequence[Cut]) -> dict[str, Any]:
    variants = {name: one.figures() for name, one in seen.items()}
    rest = [1 - shifted / (len(cut.new) - cut.common) for shifted, cut in zip(seen[DEFAULT].shifted, cuts, strict=True)]
    return {
        "kl_mean": variants[DEFAULT]["kl_mean"],
        "top1_agreement": variants[DEFAULT]["top1_agreement"],
        "variants": variants,
        "by_set": {name: one.figures() for name, one in by_set.items()},
        "computed_share": round(statistics.fmean(rest), 3),
        "chats": len(cuts),
        "positions": len(seen[DEFAULT].kl),
        "tokens_before": round(statistics.fmean(len(cut.old) for cut in cuts), 1),
        "tokens_after": round(statistics.fmean(len(cut.new) for cut in cuts), 1),
        "kept_tokens": round(statistics.fmean(cut.length for cut in cuts), 1),
        "moved_by": round(statistics.fmean(cut.moved_by for cut in cuts), 1),
    }
