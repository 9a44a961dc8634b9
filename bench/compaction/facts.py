"""Facts lost: conversations with planted facts compacted by ours and by others, at equal kept tokens.

Ours sets the pace: whenever it compacts, the others do, and may keep as many tokens as ours kept (the more of its two
rows). A method that keeps less than it may has chosen so.

    conversations "extracted"   many, no model: ours by extraction, and the others that ask no model
    conversations "held out"    the same on topics that extraction was never tuned on
    conversations "modelled"    few: the real model writes summaries for all methods that want them
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.compaction import figures, longmemeval
from bench.compaction.chat import read_dialogues
from bench.compaction.context import Context, Sizer, Write
from bench.compaction.figures import EXTRACTED, OURS, Look, Seen
from bench.compaction.generate import Conversation, Fact, Topics, generate
from bench.compaction.held_out import HELD_RULED, HELD_UNRULED
from bench.compaction.langchain_peer import LangChain, Summarization, TrimMessages, interpreter, langchain
from bench.compaction.ours import Ours
from bench.compaction.peers import Article, DropOldest, Full, HeadTail, Method, Oracle, Rolling
from bench.compaction.render import Family, failures, families, orphans
from bench.compaction.score import Kept
from bench.compaction.writer import Writer, writer
from bench.processes import ROOT
from compression.budget import Policy
from gateway.sessions.tokens import ModelTokens

TEMPLATES = ROOT / "tests" / "fixtures" / "templates"
DIALOGUES = Path("mtbench101") / "mtbench101.jsonl"
Dialogues = list[list[tuple[str, str]]] | None
HELD_OUT_SEED = 201
HELD = (5, 10)  # compactions after which ours is held against the others


@dataclass(frozen=True, slots=True)
class Shape:
    """What is run. Tokens are the demonstration model's."""

    window: int = 4096
    reserve: int = 256
    turns: int = 260
    density: float = 0.6  # facts a turn, as long as there are topics
    points: tuple[int, ...] = (1, 5, 10)  # compactions after which contexts are looked at
    extracted: int = 8  # conversations
    held_out: int = 4
    longmemeval: int | None = None  # compactions; None: the whole history
    modelled: int = 2
    modelled_points: tuple[int, ...] = (1, 5, 10)
    modelled_window: int = 4096
    summary_tokens: int = 256  # of a summary of LangChain's or a rolling one
    reader_questions: int = 12  # for each context
    reader_points: tuple[int, ...] = (5, 10)
    deadline_s: float = 2400.0  # another conversation that asks the model is not begun after that
    reader_deadline_s: float = 3600.0  # nor is the reader asked
    slice_deadline_s: float = 7200.0  # and LongMemEval ends where it is


QUICK = Shape(
    extracted=2,
    held_out=1,
    longmemeval=5,
    modelled=1,
    modelled_points=(1,),
    modelled_window=2048,
    summary_tokens=64,
    reader_questions=4,
    reader_points=(1,),
    deadline_s=150.0,
    reader_deadline_s=200.0,
    slice_deadline_s=240.0,
)
LEAST_SLICE_S = 15.0  # LongMemEval gets so long even where the rest took all of the time


@dataclass(frozen=True, slots=True)
class Moment:
    turns: int
    budget: int  # tokens that every method may keep


class Run:
    """Looks, and what else was noticed, over all conversations."""

    def __init__(self, shape: Shape, tokens: ModelTokens, kinds: Sequence[Family], clock: float) -> None:
        self.shape, self.tokens, self.families = shape, tokens, kinds
        self.clock = clock  # when it began
        self.looks: list[Look] = []
        self.contexts: list[tuple[Look, Sizer, Context, Conversation]] = []  # of modelled conversations
        self.sources: dict[str, Counter[str]] = {OURS: Counter(), EXTRACTED: Counter()}
        self.problems: Counter[str] = Counter()
        self.orphans = 0
        self.template_failures: list[str] = []
        self.rendered = 0
        self.reduced: list[str] = []

    def late(self, after_s: float) -> bool:
        return time.monotonic() > self.clock + after_s

    async def pace(self, conversation: Conversation, ours: Ours, points: Sequence[int]) -> list[Moment]:
        """Run ours through the conversation; each context is rendered in every template."""
        moments: list[Moment] = []
        for number in range(1, len(conversation.turns) + 1):
            turns = conversation.turns[:number]
            if await ours.step(turns) is None:
                continue
            context = ours.context(turns)
            moments.append(Moment(number, context.tokens))
            self.check(ours, conversation, number)
            if len(moments) in points:
                self.look(ours.name, conversation, moments, context, ours.sizer)
            if len(moments) == max(points):
                break
        self.sources[ours.name] += ours.sources
        self.problems += ours.problems
        return moments

    def check(self, ours: Ours, conversation: Conversation, number: int) -> None:
        turns = conversation.turns[:number]
        self.orphans += orphans(ours.context(turns).items)
        for family in self.families:
            self.rendered += 1
            self.template_failures += failures(family, conversation.system, lambda place: ours.context(turns, place))

    def look(
        self, method: str, conversation: Conversation, moments: Sequence[Moment], context: Context, sizer: Sizer,
        *, modelled: bool = False,
    ) -> None:  # fmt: skip
        kept, at = Kept(context.text), moments[-1]
        seen = tuple(_seen(kept, fact, moments) for fact in conversation.told(at.turns))
        look = Look(method, conversation.seed, modelled, len(moments), at.budget, context.tokens, seen)
        self.looks.append(look)
        if modelled:
            self.contexts.append((look, sizer, context, conversation))

    async def others(
        self, conversation: Conversation, sizer: Sizer, methods: Sequence[Method], moments: Sequence[Moment],
        points: Sequence[int], *, modelled: bool = False,
    ) -> None:  # fmt: skip
        async def through(method: Method) -> None:
            for at, moment in enumerate(moments, 1):
                context = await method.compact(conversation.turns[: moment.turns], moment.budget)
                if at in points:
                    self.look(method.name, conversation, moments[:at], context, sizer, modelled=modelled)

        await asyncio.gather(*map(through, methods))


def _seen(kept: Kept, fact: Fact, moments: Sequence[Moment]) -> Seen:
    age = sum(moment.turns > fact.turn for moment in moments)
    verdict = kept.superseded(fact) if fact.old is not None else None
    return Seen(
        fact.id, fact.kind, fact.ruled, fact.identifier, age, kept.survives(fact), kept.connected(fact), verdict
    )


def plain_methods(sizer: Sizer, conversation: Conversation, trimmer: LangChain | None) -> list[Method]:
    methods: list[Method] = [Full(sizer), Oracle(sizer, conversation.told), DropOldest(sizer), HeadTail(sizer)]
    return [*methods, TrimMessages(sizer, trimmer)] if trimmer else methods


async def extracted(
    run: Run, dialogues: Dialogues, trimmer: LangChain | None, seeds: Sequence[int], **topics: Topics
) -> None:
    """The conversations without a model; every second one talks about what people talked about in MT-Bench-101."""
    shape = run.shape
    for seed in seeds:
        about = dialogues if seed % 2 == 0 else None
        conversation = generate(seed, turns=shape.turns, density=shape.density, dialogues=about, **topics)
        sizer = Sizer(run.tokens, conversation.system)
        ours = Ours(EXTRACTED, sizer, Policy(strategy="extract"), window=shape.window, reserve=shape.reserve)
        moments = await run.pace(conversation, ours, shape.points)
        await run.others(conversation, sizer, plain_methods(sizer, conversation, trimmer), moments, shape.points)
        _say(f"conversation {seed}: {len(moments)} compactions in {moments[-1].turns} turns")


async def modelled(
    run: Run, dialogues: Dialogues, trimmer: LangChain | None, python: Path | None, asked: Writer
) -> None:
    """The conversations in which the model writes. Ours with the model keeps the pace that its extraction sets, so that
    both stand beside the others at the same moments."""
    async with AsyncExitStack() as stack:
        for number in range(run.shape.modelled):
            if number and run.late(run.shape.deadline_s):  # the first is what the program is for
                run.reduced.append(f"{run.shape.modelled - number} conversations with the model: the time was up")
                break
            summariser = await stack.enter_async_context(langchain(python)) if python else None
            about = dialogues if number % 2 else None
            await _modelled(run, 101 + number, about, trimmer, summariser, asked)


async def _modelled(
    run: Run, seed: int, dialogues: Dialogues, trimmer: LangChain | None,
    summariser: LangChain | None, asked: Writer,
) -> None:  # fmt: skip
    shape = run.shape
    conversation = generate(seed, turns=shape.turns, density=shape.density, dialogues=dialogues)
    sizer = Sizer(run.tokens, conversation.system)
    window, reserve = shape.modelled_window, shape.reserve * shape.modelled_window // shape.window
    points = shape.modelled_points

    def ours(name: str, policy: Policy, write: Write | None) -> Ours:
        return Ours(name, sizer, policy, window=window, reserve=reserve, write=write)

    without = ours(EXTRACTED, Policy(strategy="extract"), None)
    pace: list[tuple[int, Context]] = []
    for turn in range(1, len(conversation.turns) + 1):
        if await without.step(conversation.turns[:turn]) is not None:
            pace.append((turn, without.context(conversation.turns[:turn])))
        if len(pace) == max(points):
            break
    with_model = ours(OURS, Policy(), asked.write)
    moments: list[Moment] = []
    for turn, context in pace:
        mine = await with_model.compact(conversation.turns[:turn], 0)
        moments.append(Moment(turn, max(mine.tokens, context.tokens)))
        run.check(with_model, conversation, turn)
        if len(moments) in points:
            run.look(OURS, conversation, moments, mine, sizer, modelled=True)
            run.look(EXTRACTED, conversation, moments, context, sizer, modelled=True)
        _say(f"conversation {seed}: compaction {len(moments)} by ours, {asked.calls} calls")
    run.sources[OURS] += with_model.sources
    run.problems += with_model.problems
    methods = plain_methods(sizer, conversation, trimmer)
    methods += [Rolling(sizer, asked.write, shape.summary_tokens), Article(sizer, asked.write)]
    if summariser:
        methods.append(Summarization(sizer, summariser, asked.write, shape.summary_tokens))
    await run.others(conversation, sizer, methods, moments, points, modelled=True)
    _say(f"conversation {seed}: the others are through, {asked.calls} calls")


def read(run: Run, model: Path, threads: int | None) -> None:
    """Ask the model about a sample of the facts, the same for every context of a conversation at one point."""
    from bench.compaction.reader import Reader

    reader = Reader(model, run.tokens, threads)
    answered: dict[int, Look] = {}
    for look, sizer, context, conversation in sorted(run.contexts, key=lambda each: -each[0].compactions):
        if look.compactions not in run.shape.reader_points:
            continue
        facts = [fact for fact in conversation.facts if any(seen.id == fact.id for seen in look.seen)]
        step = max(1, len(facts) // run.shape.reader_questions)
        sample = facts[::step][: run.shape.reader_questions]
        if context.tokens > reader.longest:
            continue  # the whole history, where it is longer than the model's window
        if run.late(run.shape.reader_deadline_s):
            run.reduced.append(f"reader: not asked about {look.method} after {look.compactions} compactions")
            continue
        right = dict(zip((fact.id for fact in sample), reader.right(sizer, context, sample), strict=True))
        answered[id(look)] = replace(look, seen=tuple(replace(one, read=right.get(one.id)) for one in look.seen))
        _say(f"reader: {look.method}, {look.compactions} compactions: {sum(right.values())} of {len(right)}")
    run.looks = [answered.get(id(look), look) for look in run.looks]


async def measure(
    shape: Shape, model: Path, threads: int | None, *, peers: Path | None = None, answers: Path | None = None
) -> dict[str, Any]:
    """`peers`: a folder that keeps LangChain's environment; `answers`: a file that keeps what the model wrote."""
    start = time.monotonic()
    tokens = ModelTokens.load(model, name="bench")
    run = Run(shape, tokens, families(TEMPLATES.glob("*.jinja")), start)
    file = longmemeval.data_folder() / DIALOGUES
    dialogues = read_dialogues(file) if file.is_file() else None
    if dialogues is None:
        run.reduced.append(f"all conversations are our own sentences: {file} is not there")
    with TemporaryDirectory() as folder:
        python, reason = await asyncio.to_thread(interpreter, peers or Path(folder))
        if reason:
            run.reduced.append(f"LangChain: {reason}")
        async with AsyncExitStack() as stack:
            trimmer = await stack.enter_async_context(langchain(python)) if python else None
            asked = None
            if shape.modelled:  # first: what asks no model takes what time is left
                asked = await stack.enter_async_context(writer(model, tokens, threads, answers))
                await modelled(run, dialogues, trimmer, python, asked)
                if run.late(shape.reader_deadline_s):
                    run.reduced.append("the reader was asked nothing: the time was up")
                elif run.contexts and shape.reader_questions:
                    await asyncio.to_thread(read, run, model, threads)
            await extracted(run, dialogues, trimmer, range(1, shape.extracted + 1))
            held = Run(shape, tokens, run.families, start)
            seeds = range(HELD_OUT_SEED, HELD_OUT_SEED + shape.held_out)
            await extracted(held, dialogues, trimmer, seeds, ruled=HELD_RULED, unruled=HELD_UNRULED)
        memory = await _slice(run)
    return {
        **result(run, held),
        "langchain": trimmer.versions if trimmer else None,
        "longmemeval": memory,
        "model_calls": asked.calls if asked else 0,
        "model_output_tokens": asked.output_tokens if asked else 0,
        "took_s": round(time.monotonic() - start),
    }


async def _slice(run: Run) -> dict[str, Any]:
    """LongMemEval, in the time that is left."""
    shape, most = run.shape, run.shape.longmemeval
    until = max(run.clock + shape.slice_deadline_s, time.monotonic() + LEAST_SLICE_S)
    memory = await longmemeval.measure(longmemeval.history(), run.tokens, most, lambda: time.monotonic() > until)
    if time.monotonic() > until:
        run.reduced.append(f"LongMemEval: ended after {memory.get('compactions', 0)} compactions: the time was up")
    _say(f"LongMemEval is through, {time.monotonic() - run.clock:.0f} s")
    return memory


def result(run: Run, held: Run) -> dict[str, Any]:
    """The last line of the program, less what it cost."""
    looks, shape = run.looks, run.shape
    without = figures.over_best_other(looks, EXTRACTED, HELD, modelled=False)
    with_model = figures.over_best_other(looks, OURS, HELD, modelled=True)
    held_out = figures.over_best_other(held.looks, EXTRACTED, HELD, modelled=False)

    def worse(group: str) -> float | None:
        both = [each[group]["worst"] for each in (without, with_model, held_out) if each[group]["worst"] is not None]
        return max(both, default=None)

    mine = [
        figures.survival(one for look in figures.of(run_looks, name, point, modelled=modelled) for one in look.seen)
        for run_looks, name, modelled in (
            (looks, EXTRACTED, False),
            (looks, OURS, True),
            (held.looks, EXTRACTED, False),
        )
        for point in HELD
    ]
    groups = {(look.method, look.modelled, look.compactions) for look in looks}
    rows = [
        figures.row([look for look in looks if (look.method, look.modelled, look.compactions) == group])
        for group in sorted(groups, key=lambda group: (group[1], group[2], group[0]))
    ]
    last = [look for look in looks if look.compactions == max(shape.points)]
    return {
        "parameters": asdict(shape),
        "rows": rows,
        "extracted": without,
        "modelled": with_model,
        "held_out": held_out,
        "by_kind": figures.by_kind(last),
        "by_age": figures.by_age(last),
        "sources": {name: dict(counter) for name, counter in run.sources.items()},
        "sources_share": {name: shares(counter) for name, counter in run.sources.items()},
        "problems": dict(run.problems.most_common(12)),
        "contexts_rendered": run.rendered + held.rendered,
        "template_failure_examples": (run.template_failures + held.template_failures)[:8],
        "reduced": run.reduced,
        "lost_over_best_other": worse("all"),
        "lost_over_best_other_ruled": worse("ruled"),
        "lost_over_best_other_unruled": worse("unruled"),
        "identifier_survival": min((kept for kept in mine if kept is not None), default=None),
        "orphans": run.orphans + held.orphans,
        "template_failures": len(run.template_failures) + len(held.template_failures),
    }


def shares(counter: Counter[str]) -> dict[str, float]:
    return {source: round(number / counter.total(), 3) for source, number in counter.items()}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
