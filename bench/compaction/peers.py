"""What others keep: each is given the whole conversation and a budget of tokens, and fills the budget as well as its
own rule allows. Those with a summariser carry their summaries on from one compaction to the next.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from bench.compaction.context import Context, Sizer, Unit, Write, items_of, message, plain_messages, units
from bench.compaction.generate import Fact
from compression.conversation import Item, Turn

HEAD_SHARE = 0.25  # of a head-and-tail budget
ARTICLE_SUMMARY = 100  # tokens, of one turn
KEEP_LAST = 3  # turns
HEARD = "Here is a summary of the conversation so far:\n\n"
READ = "Understood."


class Method(Protocol):
    """`compact` is called at every compaction, with all turns so far; `budget` counts the system prompt too."""

    name: str

    @abstractmethod
    async def compact(self, turns: Sequence[Turn], budget: int) -> Context: ...


class Full:
    """Everything, whatever the budget."""

    name = "full context"

    def __init__(self, sizer: Sizer) -> None:
        self.sizer = sizer

    async def compact(self, turns: Sequence[Turn], budget: int) -> Context:
        return self.sizer.context(items_of(turns))


class Oracle:
    """Knows what will be asked, and keeps those sentences alone; the newest of them where not all fit."""

    name = "oracle"

    def __init__(self, sizer: Sizer, told: Callable[[int], Sequence[Fact]]) -> None:
        self.sizer, self.told = sizer, told

    async def compact(self, turns: Sequence[Turn], budget: int) -> Context:
        kept: list[str] = []
        best = self.sizer.context(())
        for fact in reversed(self.told(len(turns))):
            kept.insert(0, fact.statement)
            made = self.sizer.context((message("user", "\n".join(kept)), message("assistant", READ)))
            if made.tokens > budget:
                break
            best = made
        return best


class DropOldest:
    """The newest whole turns that fit."""

    name = "drop oldest"

    def __init__(self, sizer: Sizer) -> None:
        self.sizer = sizer

    async def compact(self, turns: Sequence[Turn], budget: int) -> Context:
        kept = newest(self.sizer, units(turns), budget - self.sizer.overhead)
        return self.sizer.context(item for unit in kept for item in items_of(unit))


class HeadTail:
    """The oldest turns that fit a quarter of the budget, and the newest that fit the rest."""

    name = "head and tail"

    def __init__(self, sizer: Sizer) -> None:
        self.sizer = sizer

    async def compact(self, turns: Sequence[Turn], budget: int) -> Context:
        room = budget - self.sizer.overhead
        groups = units(turns)
        head: list[Unit] = []
        used = 0
        for unit in groups:
            size = self.sizer.of(items_of(unit))
            if used + size > room * HEAD_SHARE:
                break
            head.append(unit)
            used += size
        tail = newest(self.sizer, groups[len(head) :], room - used)
        return self.sizer.context(item for unit in (*head, *tail) for item in items_of(unit))


def newest(sizer: Sizer, groups: Sequence[Unit], room: int) -> list[Unit]:
    kept: list[Unit] = []
    for unit in reversed(groups):
        room -= sizer.of(items_of(unit))
        if room < 0:
            break
        kept.insert(0, unit)
    return kept


class Article:
    """The source article's: first and last 3 turns stay, each turn between becomes a summary of at most 100 tokens,
    oldest first, until the excess is free; when all are summaries and it is still too much, the oldest go."""

    name = "source article"

    def __init__(self, sizer: Sizer, write: Write) -> None:
        self.sizer, self.write = sizer, write
        self.summaries: dict[str, Item] = {}  # of a unit's first turn
        self.gone: set[str] = set()

    async def compact(self, turns: Sequence[Turn], budget: int) -> Context:
        groups = units(turns)
        middle = groups[1:-KEEP_LAST]
        for unit in middle:
            if self._context(groups).tokens <= budget:
                break
            if unit[0].id not in self.summaries:
                await self._summarise(unit)
        for unit in middle:
            if self._context(groups).tokens <= budget:
                break
            self.gone.add(unit[0].id)
        return self._context(groups)

    def _context(self, groups: Sequence[Unit]) -> Context:
        items: list[Item] = []
        for unit in groups:
            if unit[0].id in self.gone:
                continue
            summary = self.summaries.get(unit[0].id)
            items += items_of(unit) if summary is None else (summary, message("assistant", READ))
        return self.sizer.context(items)

    async def _summarise(self, unit: Unit) -> None:
        """A turn that its summary would not shorten stays as it is."""
        said = "\n".join(f"{each['role']}: {each['content']}" for each in plain_messages(items_of(unit)))
        asked = (
            f"Summarise this exchange in at most {ARTICLE_SUMMARY} tokens. Keep facts, names, numbers and decisions."
            f"\n\n{said}"
        )
        answer = await self.write([{"role": "user", "content": asked}], ARTICLE_SUMMARY)
        summary = message("user", f"[Summary of an earlier exchange] {answer.text}")
        if self.sizer.of((summary, message("assistant", READ))) < self.sizer.of(items_of(unit)):
            self.summaries[unit[0].id] = summary


class Rolling:
    """One summary, written anew at every compaction from itself and the turns that leave; the rest is the newest turns
    that fit."""

    name = "rolling summary"

    def __init__(self, sizer: Sizer, write: Write, most_tokens: int) -> None:
        self.sizer, self.write, self.most_tokens = sizer, write, most_tokens
        self.summary = ""
        self.swallowed = 0  # turns

    async def compact(self, turns: Sequence[Turn], budget: int) -> Context:
        room = budget - self.sizer.overhead - self.most_tokens - self.sizer.of(self._said(""))
        kept = newest(self.sizer, units(turns[self.swallowed :]), room)
        start = len(turns) - sum(len(unit) for unit in kept)
        leaving = plain_messages(items_of(turns[self.swallowed : start]))
        lines = "\n".join(f"{each['role']}: {each['content']}" for each in leaving)
        asked = (
            "Progressively summarise the conversation. Add what is new to the current summary and answer with the new"
            " summary alone. Keep every fact, name, number, preference and decision.\n\n"
            f"Current summary:\n{self.summary or '(none yet)'}\n\n"
            f"New lines of the conversation:\n{lines}\n\nNew summary:"
        )
        answer = await self.write([{"role": "user", "content": asked}], self.most_tokens)
        self.summary, self.swallowed = answer.text, start
        made = [*self._said(self.summary), *(item for unit in kept for item in items_of(unit))]
        return filled_up(self.sizer, made, 2, units(turns[:start]), budget)

    def _said(self, summary: str) -> tuple[Item, Item]:
        return message("user", HEARD + summary), message("assistant", READ)


def filled_up(sizer: Sizer, items: Sequence[Item], at: int, earlier: Sequence[Unit], budget: int) -> Context:
    """The items with as many of the newest earlier turns put in at `at` as the budget still has room for: a summary
    that came out short costs its method nothing."""
    context = sizer.context(items)
    more = newest(sizer, earlier, budget - context.tokens)
    added = [item for unit in more for item in items_of(unit)]
    return sizer.context((*items[:at], *added, *items[at:]))
