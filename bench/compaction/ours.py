"""Ours: the planner, the fact guard and the view as the gateway runs them, on a conversation that is all there.

What the gateway does between its store and its replicas is left out; what decides is the same code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.compaction.context import Answer, Context, Sizer, Write, items_of, open_calls
from compression.budget import Policy
from compression.conversation import Turn
from compression.plan import NoPlan, Plan, Range, plan
from compression.summarize import Written, request, write_segment
from compression.view import Placement, View, fold
from gateway.sessions.redraft import redrafted
from gateway.sessions.sizing import Sizes, around, counter, sizes


@dataclass(frozen=True, slots=True)
class Moment:
    """A compaction: after so many turns, from so many tokens to so many."""

    turns: int
    tokens_before: int
    tokens_after: int


class Ours:
    """`name` says whether a model was asked. `step` is called after each turn; `compact` when others compact too."""

    def __init__(
        self, name: str, sizer: Sizer, policy: Policy, *, window: int, reserve: int, write: Write | None = None
    ) -> None:
        self.name, self.sizer, self.policy = name, sizer, policy
        self.window, self.reserve, self.write = window, reserve, write
        self.view = View()
        self.count = counter(sizer.tokens)
        self.sources: Counter[str] = Counter()
        self.merges = 0
        self.problems: Counter[str] = Counter()

    def context(self, turns: Sequence[Turn], placement: Placement = "exchange") -> Context:
        folded = fold(turns, self.view, placement=placement)
        return self.sizer.context(folded.items, folded.system)

    async def step(self, turns: Sequence[Turn]) -> Moment | None:
        """Compact if it is time."""
        used = self.context(turns).tokens + self.reserve
        if open_calls(turns[-1]) or used <= self.policy.trigger_ratio * self.window:
            return None
        made = self._planned(turns, self.policy)
        return None if isinstance(made, NoPlan) else await self._carry_out(turns, made)

    async def compact(self, turns: Sequence[Turn], budget: int) -> Context:
        """Compact now, if it is past the trigger or not: down to the policy's target, whatever `budget` others have."""
        before = self.context(turns).tokens
        share = min(self.policy.trigger_ratio, (before - 1 + self.reserve) / self.window)
        made = self._planned(turns, replace(self.policy, trigger_ratio=share))
        if isinstance(made, Plan):
            await self._carry_out(turns, made)
        return self.context(turns)

    def _planned(self, turns: Sequence[Turn], policy: Policy) -> Plan | NoPlan:
        sized = self._sizes(turns)
        return plan(
            sized.turns,
            self.view.segments,
            window=self.window,
            reserve_tokens=self.reserve,
            overhead_tokens=sized.overhead_tokens,
            policy=policy,
            frame_tokens=sized.frame_tokens,
        )

    def _sizes(self, turns: Sequence[Turn]) -> Sizes:
        return sizes(
            turns,
            self.view,
            frozenset(),
            prompt_tokens=self.context(turns).tokens,
            count=self.count,
            around=around(self.sizer.tokens),
        )

    async def _carry_out(self, turns: Sequence[Turn], made: Plan) -> Moment:
        written: dict[Range, Written] = {}
        for part in made.ranges:
            raw = [turn for turn in turns if turn.id in part.turn_ids]
            answer = await self._asked(turns, raw, part.budget_tokens) if made.way == "summarize" else None
            one = write_segment(
                answer.text if answer else None,
                raw,
                budget_tokens=part.budget_tokens,
                count=self.count,
                finished=answer.finished if answer else True,
            )
            self.sources[one.source] += 1
            self.problems.update(problem.partition(":")[0] for problem in one.problems)
            written[part] = one
        self.merges += len(made.merges)
        number = f"{len(turns)}"
        ids = iter(range(1_000_000))
        self.view = redrafted(
            self.view, made, turns, written, id=number, count=self.count, new_id=lambda: f"{number}.{next(ids)}"
        )
        return Moment(len(turns), made.tokens_before, self.context(turns).tokens)

    async def _asked(self, turns: Sequence[Turn], part: Sequence[Turn], budget: int) -> Answer | None:
        """The request as a suffix of the live prompt."""
        if self.write is None:
            return None
        asked = {"role": "user", "content": request(part, budget_tokens=budget)}
        return await self.write(self.sizer.prompt(self.context(turns), asked), budget + budget // 4)


def raw_tokens(sizer: Sizer, turns: Sequence[Turn]) -> int:
    return sizer.overhead + sizer.of(items_of(turns))
