"""Builds the prompt of a turn: the ids that extend the session's path, or, where they cannot, the whole anew.

    parent's path                    [0 ..................... path_tokens)
    extended: sent                   [0 ..................... path_tokens) delta           base = the parent's end
    rendered anew: common prefix     [0 ......... base_tokens) new ids                     no base, a prefix report

One function builds what is sent and what `GET .../context` shows. Knows no replica and no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any, TypeVar

from compression.budget import Reasoning
from compression.view import Folded, Placement
from engines.contract import EMPTY_DIGEST, Base, IdsPrompt, chain_digest
from gateway.sessions.command import Ask
from gateway.sessions.items import messages_from_items, names_of_calls
from gateway.sessions.prefix import SHOWN_TOKENS, Cause, PrefixReport, prefix_report, shared_tokens
from gateway.sessions.shift import shift_after_cut
from gateway.sessions.tokens import ModelTokens, Tail
from gateway.store.records import TurnTokens

ID_BYTES = 4  # u32
WORTH_MARKING = 1024  # tokens; of a shorter path a replica keeps what is recent by its own rule
LONG = 16_384  # characters; rendering and encoding more takes milliseconds, and is done in a thread
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Marks:
    """What of a path a replica should keep at its best: the system prompt, and where the last turns begin.

    `turn_starts` ascending, three at most, the newest turn's last; where not all are known, an earlier one stands.
    """

    system_tokens: int = 0
    turn_starts: tuple[int, ...] = ()

    @property
    def recent_from(self) -> int:
        return self.turn_starts[0] if self.turn_starts else 0

    def grown(self, start: int) -> Marks:
        """With one more turn, which begins there."""
        return Marks(self.system_tokens, (*(self.turn_starts or (0,)), start)[-RECENT_TURNS:])

    def as_json(self) -> list[int]:
        return [self.system_tokens, *self.turn_starts]

    @classmethod
    def of_json(cls, told: Sequence[int] | None) -> Marks:
        return cls(told[0], tuple(told[1:])) if told else NO_MARKS


RECENT_TURNS = 3
NO_MARKS = Marks()


@dataclass(frozen=True, slots=True)
class Head:
    """Where a new turn goes on: the last turn's token record, and the history for when it must be read."""

    turn_id: str | None = None
    tokens: TurnTokens | None = None
    reasoning: bool = False  # an answer of this path, since it was last rendered whole, holds reasoning
    calls: tuple[Mapping[str, Any], ...] = ()  # the last answer's tool calls, in chat form
    foreign_end: bool = False  # it ended in another stop id than the template's own
    view: str = ""  # names the compaction through which this path is seen; "" where it is seen as it is
    marks: Marks = NO_MARKS
    load_items: Callable[[Placement, Reasoning], Awaitable[Folded]] = field(default=lambda *_: _nothing())
    load_ids: Callable[[], Awaitable[bytes]] = field(default=lambda: _no_ids())

    @property
    def path_tokens(self) -> int:
        return self.tokens.path_tokens if self.tokens is not None else 0


async def _nothing() -> Folded:
    return Folded(())


async def _no_ids() -> bytes:
    return b""


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt as ids, what of it the session keeps, and how it relates to the path before."""

    ids: IdsPrompt
    fingerprint: str
    base_tokens: int
    kept_ids: bytes  # u32le: what follows base_tokens in the path, ephemeral items left out
    kept_digest: bytes  # chain_digest over the kept path, end of kept_ids
    kept_tokens: int  # base_tokens and kept_ids
    report: Mapping[str, Any]  # the prefix report
    marks: Marks = NO_MARKS


async def build(
    model: ModelTokens,
    ask: Ask,
    head: Head,
    *,
    session: str | None,
    model_changed: bool = False,
    marked: bool = False,
) -> BuiltPrompt:
    """The prompt of `ask` after `head`; `session` is the name under which the replica may keep the path.

    `model_changed`: other weights than answered the path so far read it from its first token, whatever its ids are.
    `marked`: the replica wants to know what of it to keep at its best, which costs renderings where it is made anew.
    """
    options = _options(ask)
    fingerprint = fingerprint_of(model, ask, options, head.view)
    if head.tokens is not None and head.tokens.fingerprint == fingerprint and not model_changed:
        built = await _extended(model, ask, head, head.tokens, options, fingerprint, session)
        if built is not None:
            return await _with_system(model, ask, built, options) if marked else built
    built = await _rendered_anew(model, ask, head, options, fingerprint, session, model_changed)
    return await _marked(model, ask, head, built, options) if marked else built


def fingerprint_of(model: ModelTokens, ask: Ask, options: Mapping[str, Any], view: str = "") -> str:
    """What the ids of a path depend on besides its messages, in parts, so that a change can be named."""
    parts = [
        model.name,
        model.fingerprint((), {})[:16],
        model.fingerprint(ask.tools, options)[:16],
        hashlib.sha256((ask.system or "").encode()).hexdigest()[:16] if ask.system is not None else "-",
    ]
    return "|".join([*parts, view] if view else parts)


def start_of(fingerprint: str) -> str:
    """What of it says how a path begins: model, template, tools and system prompt, not the view."""
    return "|".join(fingerprint.split("|")[:4])


CHANGED: tuple[Cause, ...] = ("model_changed", "template_changed", "tools_changed", "system_changed", "compacted")


def changed_part(before: str, after: str) -> Cause:
    """The first part of a fingerprint that differs, as the prefix report names it."""
    pairs = zip_longest(CHANGED, before.split("|"), after.split("|"))
    return next((cause for cause, a, b in pairs if a != b), "template_changed")


def _options(ask: Ask) -> dict[str, Any]:
    options = dict(ask.template_options)
    if ask.reasoning_effort is not None:
        options["reasoning_effort"] = ask.reasoning_effort
    return options


async def _extended(
    model: ModelTokens,
    ask: Ask,
    head: Head,
    before: TurnTokens,
    options: Mapping[str, Any],
    fingerprint: str,
    session: str | None,
) -> BuiltPrompt | None:
    if head.reasoning and ask.old_reasoning == "strip":
        return None
    tail = Tail(
        before.path_tokens,
        before.path_digest,
        before.open_answer,
        head.reasoning and ask.old_reasoning == "template",
        bool(head.calls),
        tuple(head.calls),
        head.foreign_end,
        system=ask.system is not None,
    )
    called = {str(call["id"]): str(call["function"]["name"]) for call in head.calls}
    new = messages_from_items(ask.kept, called)
    kept = await aside(lambda: model.extend(new, after=tail, tools=ask.tools, options=options), new)
    if kept is None:
        return None
    sent = kept
    if ask.has_ephemeral or ask.instructions is not None:
        with_instructions = _with_instructions(messages_from_items(ask.sent, called), ask.instructions)
        extended = await aside(
            lambda: model.extend(with_instructions, after=tail, tools=ask.tools, options=options), with_instructions
        )
        if extended is None:
            return None
        sent = extended

    async def whole() -> bytes:
        return await head.load_ids() + sent

    num_tokens = before.path_tokens + len(sent) // ID_BYTES
    if session is None:
        ids = IdsPrompt(await whole(), num_tokens, whole)
    else:
        ids = IdsPrompt(sent, num_tokens, whole, session, Base(before.path_tokens, before.path_digest))
    marks = head.marks.grown(before.path_tokens)
    return BuiltPrompt(
        ids=with_marks(ids, marks),
        fingerprint=fingerprint,
        base_tokens=before.path_tokens,
        kept_ids=kept,
        kept_digest=chain_digest(before.path_digest, kept),
        kept_tokens=before.path_tokens + len(kept) // ID_BYTES,
        report=asdict(PrefixReport(before.path_tokens, before.path_tokens)),
        marks=marks,
    )


async def _rendered_anew(
    model: ModelTokens,
    ask: Ask,
    head: Head,
    options: Mapping[str, Any],
    fingerprint: str,
    session: str | None,
    model_changed: bool,
) -> BuiltPrompt:
    folded = await head.load_items(model.placement, ask.old_reasoning)
    history, system = folded.items, system_message(ask.system, folded)
    whole_kept = led(system + messages_from_items(history + ask.kept))
    kept = await aside(lambda: model.render(whole_kept, tools=ask.tools, options=options), whole_kept)
    sent = kept
    if ask.has_ephemeral or ask.instructions is not None:
        new = _with_instructions(messages_from_items(ask.sent, names_of_calls(history)), ask.instructions)
        whole_sent = led(system + messages_from_items(history) + new)
        sent = await aside(lambda: model.render(whole_sent, tools=ask.tools, options=options), whole_sent)
    previous = await head.load_ids()
    report = await compared(model, head, previous, kept, fingerprint)
    if model_changed and previous:
        text = model.decode(kept[: SHOWN_TOKENS * ID_BYTES]), model.decode(previous[: SHOWN_TOKENS * ID_BYTES])
        report = PrefixReport(report.previous_tokens, 0, 0, "model_changed", before_text=text[1], after_text=text[0])
    base_tokens = report.reused_tokens
    shift = None
    if ask.kv_shift and session is not None and head.tokens is not None and report.cause == "compacted":
        shift = shift_after_cut(previous, sent, Base(head.tokens.path_tokens, head.tokens.path_digest))

    async def whole() -> bytes:
        return sent

    return BuiltPrompt(
        ids=IdsPrompt(sent, len(sent) // ID_BYTES, whole, session, None, shift),
        fingerprint=fingerprint,
        base_tokens=base_tokens,
        kept_ids=kept[base_tokens * ID_BYTES :],
        kept_digest=chain_digest(EMPTY_DIGEST, kept),
        kept_tokens=len(kept) // ID_BYTES,
        report=asdict(report),
    )


async def _marked(
    model: ModelTokens, ask: Ask, head: Head, built: BuiltPrompt, options: Mapping[str, Any]
) -> BuiltPrompt:
    """The same, with its marks: where the last turns begin shows by a rendering of what is before them."""
    folded = await head.load_items(model.placement, ask.old_reasoning)
    sent = await built.ids.whole()
    turns = led(system_message(ask.system, folded) + messages_from_items(folded.items + ask.kept))
    begins = [at for at, entry in enumerate(turns) if entry["role"] == "user"]
    start = 0
    if len(sent) // ID_BYTES > WORTH_MARKING and len(begins) > RECENT_TURNS:
        before = turns[: begins[-RECENT_TURNS]]
        start = shared_tokens(sent, await aside(lambda: model.render(before, tools=ask.tools, options=options), before))
    marked = replace(built, marks=Marks(0, (start,)))
    return await _with_system(model, ask, marked, options)


async def _with_system(model: ModelTokens, ask: Ask, built: BuiltPrompt, options: Mapping[str, Any]) -> BuiltPrompt:
    """The same, with the length of the system prompt among its marks."""
    marks, system = built.marks, system_message(ask.system, Folded(()))
    if (system or ask.tools) and not marks.system_tokens:
        found = await aside(lambda: model.system_tokens(system, tools=ask.tools, options=options), system)
        marks = replace(marks, system_tokens=min(found, built.ids.num_tokens))
    return replace(built, ids=with_marks(built.ids, marks), marks=marks)


def with_marks(ids: IdsPrompt, marks: Marks) -> IdsPrompt:
    return replace(ids, system_tokens=marks.system_tokens, recent_from=marks.recent_from)


async def compared(model: ModelTokens, head: Head, previous: bytes, new: bytes, fingerprint: str) -> PrefixReport:
    """`previous`: the ids of the head's path as it was sent; `new`: as they are now, under `fingerprint`."""
    hints = _hints(head, fingerprint)
    return await asyncio.to_thread(prefix_report, previous, new, decode=model.decode, hints=hints)


async def aside(work: Callable[[], T], messages: Sequence[Mapping[str, Any]]) -> T:
    """`work` over these messages: here where they are short, in a thread where they are long or many."""
    return await asyncio.to_thread(work) if text_size(messages, LONG) >= LONG else work()


def text_size(value: Any, enough: int) -> int:
    """Characters of all strings within, 32 more for each value; counted no further than to `enough`."""
    size, left = 0, [value]
    while left and size < enough:
        found = left.pop()
        size += 32
        if isinstance(found, str):
            size += len(found)
        elif isinstance(found, Mapping):
            left.extend(found.values())
        elif isinstance(found, list | tuple):
            left.extend(found)
    return size


def _hints(head: Head, fingerprint: str) -> tuple[Cause, ...]:
    if head.tokens is None or head.tokens.fingerprint == fingerprint:
        return ()
    return (changed_part(head.tokens.fingerprint, fingerprint),)


def _with_instructions(messages: list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Instructions for one turn go in front of its first user message: a later prompt then differs only from there."""
    if instructions is None:
        return messages
    out = [dict(m) for m in messages]
    for msg in out:
        if msg["role"] == "user":
            text = msg["content"]
            if isinstance(text, str):
                msg["content"] = f"{instructions}\n\n{text}"
            else:
                msg["content"] = [{"type": "text", "text": instructions}, *text]
            return out
    return [{"role": "user", "content": instructions}, *out]


def system_message(system: str | None, folded: Folded) -> list[dict[str, Any]]:
    """The system prompt, and what a summary adds to it where it is placed there."""
    text = "\n\n".join(part for part in (system, folded.system) if part)
    return [{"role": "system", "content": text}] if system is not None or text else []


def led(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What system and developer messages at the front say, in one: many templates know no second one."""
    n = 0
    while n < len(messages) and messages[n]["role"] in ("system", "developer"):
        n += 1
    texts = [msg["content"] for msg in messages[:n]]
    if n < 2 or not all(isinstance(text, str) for text in texts):
        return messages
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[n:]]


def chat_messages(ask: Ask, folded: Folded) -> list[dict[str, Any]]:
    """The whole conversation as chat messages, for a replica that goes by chat."""
    new = _with_instructions(messages_from_items(ask.sent, names_of_calls(folded.items)), ask.instructions)
    return led(system_message(ask.system, folded) + messages_from_items(folded.items) + new)
