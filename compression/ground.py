"""What a plan is made on: the sizes of a path in its prompt, who must be kept, and in which units the rest goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from compression.budget import Policy
from compression.segments import Segment
from compression.view import Cut, Part, layout

FRAME_TOKENS = 48  # around the segments of one summary message: heading, ending, roles, what is said to it
LEAST_SEGMENT = 24  # tokens; a shorter summary says nothing
MARKER_TOKENS = 12  # "[n earlier turns were removed]"


@dataclass(frozen=True, slots=True)
class SizedPart:
    """One item of a turn as it stands in the prompt now. `kind` None: nothing that is ever cut out."""

    part: Part
    index: int
    tokens: int
    kind: Cut | None = None


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
    def kept(self) -> frozenset[str]:
        first, last = self.policy.keep_first, max(1, self.policy.keep_last)
        return frozenset(turn.id for turn in (*self.turns[:first], *self.turns[-last:])) | self.pinned

    @cached_property
    def before(self) -> int:
        return self.tokens(self.segments, {})

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Units that may be replaced, oldest first."""
        units: list[list[SizedTurn]] = []
        for turn in self.turns:
            if units and units[-1][-1].open_calls:
                units[-1].append(turn)
            else:
                units.append([turn])
        stays = self.kept | self.covered(self.segments)
        return tuple(tuple(unit) for unit in units if not any(turn.id in stays for turn in unit))

    def covered(self, segments: Sequence[Segment]) -> frozenset[str]:
        """Turns that these segments stand for."""
        return frozenset(turn_id for segment in segments for turn_id in segment.turn_ids) - self.pinned

    def layout(self, segments: Sequence[Segment]) -> list[str | Segment]:
        return layout(self.ids, segments, self.pinned)

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
        """Tokens of the prompt as it is that the prompt with these segments begins with."""
        total, in_run = self.overhead, False
        for old, new in zip(self.layout(self.segments), self.layout(segments), strict=False):
            if isinstance(old, Segment) or isinstance(new, Segment):
                if old is not new:
                    break
                assert isinstance(old, Segment)
                total += old.tokens + (0 if in_run else self.frame)
                in_run = True
            elif old != new or old in sizes:
                break
            else:
                total += self.size[old]
                in_run = False
        return total
