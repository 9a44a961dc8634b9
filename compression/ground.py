"""What a plan is made on: the sizes of a path in its prompt, who must be kept, and in which units the rest goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from compression.budget import Policy
from compression.segments import Segment
from compression.view import Cut, Part, held, layout, units

FRAME_TOKENS = 48  # around the segments of one summary message: heading, ending, roles, what is said to it
LEAST_SEGMENT = 24  # tokens; a shorter summary says nothing
MARKER_TOKENS = 12  # "[n earlier turns were removed]"


@dataclass(frozen=True, slots=True)
class SizedPart:
    """One item of a turn as it stands in the prompt now. `kind` None: nothing that is ever cut out, or is cut already.
    `stays_tokens`: what a cut leaves of it beside its marker, as the text that stands with an image."""

    part: Part
    index: int
    tokens: int
    kind: Cut | None = None
    stays_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SizedTurn:
    """`tokens`: of the whole turn as it is rendered raw, less what elisions took. `open_calls`: tool calls that are
    unanswered at its end, so that the next turn belongs to it."""

    id: str
    tokens: int
    pinned: bool = False
    open_calls: bool = False
    parts: tuple[SizedPart, ...] = ()


Unit = tuple[SizedTurn, ...]  # goes as a whole


@dataclass(frozen=True)
class Ground:
    """A path as its prompt stands now. `sizes`, where asked for: of turns that a plan makes shorter than they are."""

    turns: tuple[SizedTurn, ...]
    segments: tuple[Segment, ...]
    window: int
    overhead: int
    policy: Policy
    frame: int = FRAME_TOKENS
    block_size: int = 32

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(turn.id for turn in self.turns)

    @cached_property
    def size(self) -> dict[str, int]:
        return {turn.id: turn.tokens for turn in self.turns}

    @cached_property
    def pinned(self) -> frozenset[str]:
        return frozenset(turn.id for turn in self.turns if turn.pinned)

    @cached_property
    def waiting(self) -> frozenset[str]:
        return frozenset(turn.id for turn in self.turns if turn.open_calls)

    @cached_property
    def held(self) -> frozenset[str]:
        return held(self.ids, self.pinned, self.waiting)

    @cached_property
    def kept(self) -> frozenset[str]:
        """Turns that no plan replaces, and whose parts are cut only where nothing else helps. Those that are bound to
        them by tool calls are not replaced either; their parts may be cut."""
        first, last = max(0, self.policy.keep_first), max(1, self.policy.keep_last)
        return self.pinned.union(self.ids[:first], self.ids[-last:])

    @cached_property
    def before(self) -> int:
        return self.tokens(self.segments, {})

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Units that may be replaced, oldest first."""
        stays = self.kept | self.covered(self.segments)
        turn = {turn.id: turn for turn in self.turns}
        free = (unit for unit in units(self.ids, self.waiting) if stays.isdisjoint(unit))
        return tuple(tuple(turn[id] for id in unit) for unit in free)

    def covered(self, segments: Sequence[Segment]) -> frozenset[str]:
        """Turns that are not seen, as these segments stand for them."""
        return frozenset(self.ids).difference(entry for entry in self.layout(segments) if isinstance(entry, str))

    def layout(self, segments: Sequence[Segment]) -> list[str | Segment]:
        return layout(self.ids, segments, self.held)

    def tokens(self, segments: Sequence[Segment], sizes: Mapping[str, int]) -> int:
        """Of the whole prompt, with these segments."""
        total, in_run = self.overhead, False
        for entry in self.layout(segments):
            if isinstance(entry, Segment):
                total += entry.tokens + (0 if in_run else self.frame)
                in_run = True
            else:
                total += sizes.get(entry, self.size[entry])
                in_run = False
        return total

    def first_changed(self, segments: Sequence[Segment], sizes: Mapping[str, int]) -> int:
        """Tokens of the prompt as it is that the prompt with these segments begins with, at least.

        Overhead is counted as standing in front; of a summary message that grows, what stands before its segments is
        not counted, and of a turn that is cut, nothing.
        """
        total, frame = self.overhead, 0
        for old, new in zip(self.layout(self.segments), self.layout(segments), strict=False):
            if isinstance(old, Segment) and old is new:
                total, frame = total + old.tokens, self.frame
                continue
            if isinstance(old, Segment) or isinstance(new, Segment):
                return total
            total, frame = total + frame, 0
            if old in sizes:
                return total
            total += self.size[old]
        return total + frame
