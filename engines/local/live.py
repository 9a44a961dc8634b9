"""A request between submit and its last output: its sequence, how tokens are chosen for it, and what it reads as."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from engines.contract import EngineError, FinishReason, Generated, TokenLogprob, Usage
from engines.local.sampler import Board, Choice, Failed, TokenChooser
from engines.local.sequence import Sequence
from engines.output import TextStream


@dataclass(slots=True)
class Taken:
    """What one step gave a request: ids, of which all but the last were run already; or why it failed after them."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    failed: str | None = None
    again: bool = False  # the draft may have spoilt the step: run it once more, without one

    def written(self, undrafted: int) -> int:
        """Of the row's tokens, `undrafted` and a draft, those whose K/V counts."""
        return 0 if self.again else undrafted + max(len(self.ids) - 1, 0)


@dataclass(slots=True, eq=False)
class Live:
    seq: Sequence
    chooser: TokenChooser
    text: TextStream
    stop_ids: frozenset[int]
    keep: bool = True  # its path becomes the session's when it ends
    scores: dict[int, Tensor] = field(default_factory=dict)  # by position, log-probabilities [vocab]

    @property
    def finish(self) -> FinishReason | None:
        """How the ids so far end the answer; None where it goes on."""
        mask = self.chooser.mask
        if self.seq.tokens[-1] in self.stop_ids or self.text.met is not None or (mask is not None and mask.finished):
            return "stop"
        return "length" if self.seq.num_output >= self.seq.sampling.max_tokens else None

    def take(self, board: Board, at: int, draft: array[int], spell: Callable[[int], str]) -> Taken:
        """Choose from rows `at` ... of `board`: the next token, and one more for each token of `draft` that was right
        and did not end the answer."""
        if draft and not board.is_finite(at):
            return Taken(again=True)
        taken = Taken()
        for number in range(len(draft) + 1):
            choice = board.choose(at + number, self.chooser)
            if isinstance(choice, Failed):
                if not number:  # else the next step comes to the same place, without the draft
                    taken.failed = choice.reason
                break
            try:
                self.chooser.accept(choice.id)
            except EngineError as error:
                taken.failed = str(error)
                break
            self._add(taken, choice, spell)
            taken.finish = self.finish
            if taken.finish is not None or number == len(draft) or choice.id != draft[number]:
                break
        return taken

    def _add(self, taken: Taken, choice: Choice, spell: Callable[[int], str]) -> None:
        self.seq.tokens.append(choice.id)
        taken.ids.append(choice.id)
        if choice.logprob is not None:
            top = tuple((token, spell(token), logprob) for token, logprob in choice.top)
            taken.logprobs += (TokenLogprob(choice.id, spell(choice.id), choice.logprob, top),)
        if choice.id not in self.stop_ids:
            taken.text += self.text.push(choice.id).text

    def take_up(self, generated: Generated) -> None:
        """Bring the request to where the one stood that generated its ids: one random number went for each of them."""
        ids = self.seq.tokens[self.seq.prompt_len :].tolist()
        for token_id in ids:
            self.chooser.accept(token_id)
            self.chooser.rng.random()
        self.text.resume([i for i in ids if i not in self.stop_ids], generated.chars)

    @property
    def usage(self) -> Usage:
        seq = self.seq
        cached = min(seq.cached_tokens or 0, seq.prompt_len)  # generated ids that were found cached are no prompt
        host = min(seq.host_tokens, cached)
        disk = min(seq.disk_tokens, cached - host)
        bits = int(seq.lineage)
        return Usage(seq.prompt_len, seq.num_output, cached, seq.shifted_tokens, host, disk, prefix_bits=bits)
