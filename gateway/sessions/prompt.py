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
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

from compression.budget import Reasoning
from compression.view import Folded, Placement
from engines.contract import EMPTY_DIGEST, Base, IdsPrompt, chain_digest
from gateway.sessions.command import Ask
from gateway.sessions.items import messages_from_items
from gateway.sessions.prefix import Cause, PrefixReport, prefix_report
from gateway.sessions.shift import shift_after_cut
from gateway.sessions.tokens import ModelTokens, Tail
from gateway.store.records import TurnTokens

ID_BYTES = 4  # u32
LONG = 16_384  # characters; rendering and encoding more takes milliseconds, and is done in a thread
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Head:
    """Where a new turn goes on: the last turn's token record, and the history for when it must be read."""

    turn_id: str | None = None
    tokens: TurnTokens | None = None
    reasoning: bool = False  # an answer of this path, since it was last rendered whole, holds reasoning
    calls: tuple[Mapping[str, Any], ...] = ()  # the last answer's tool calls, in chat form
    foreign_end: bool = False  # it ended in another stop id than the template's own
    view: str = ""  # names the compaction through which this path is seen; "" where it is seen as it is
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


async def build(model: ModelTokens, ask: Ask, head: Head, *, session: str | None) -> BuiltPrompt:
    """The prompt of `ask` after `head`; `session` is the name under which the replica may keep the path."""
    options = _options(ask)
    fingerprint = fingerprint_of(model, ask, options, head.view)
    if head.tokens is not None and head.tokens.fingerprint == fingerprint:
        built = await _extended(model, ask, head, head.tokens, options, fingerprint, session)
        if built is not None:
            return built
    return await _rendered_anew(model, ask, head, options, fingerprint, session)


def fingerprint_of(model: ModelTokens, ask: Ask, options: Mapping[str, Any], view: str = "") -> str:
    """What the ids of a path depend on besides its messages, in parts, so that a change can be named."""
    parts = [
        model.name,
        model.fingerprint((), {})[:16],
        model.fingerprint(ask.tools, options)[:16],
        hashlib.sha256((ask.system or "").encode()).hexdigest()[:16] if ask.system is not None else "-",
    ]
    return "|".join([*parts, view] if view else parts)


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
    new = messages_from_items(ask.kept)
    kept = await aside(lambda: model.extend(new, after=tail, tools=ask.tools, options=options), new)
    if kept is None:
        return None
    sent = kept
    if ask.has_ephemeral or ask.instructions is not None:
        with_instructions = _with_instructions(messages_from_items(ask.sent), ask.instructions)
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
    return BuiltPrompt(
        ids=ids,
        fingerprint=fingerprint,
        base_tokens=before.path_tokens,
        kept_ids=kept,
        kept_digest=chain_digest(before.path_digest, kept),
        kept_tokens=before.path_tokens + len(kept) // ID_BYTES,
        report=asdict(PrefixReport(before.path_tokens, before.path_tokens)),
    )


async def _rendered_anew(
    model: ModelTokens,
    ask: Ask,
    head: Head,
    options: Mapping[str, Any],
    fingerprint: str,
    session: str | None,
) -> BuiltPrompt:
    folded = await head.load_items(model.placement, ask.old_reasoning)
    history, system = folded.items, system_message(ask.system, folded)
    whole_kept = system + messages_from_items(history + ask.kept)
    kept = await aside(lambda: model.render(whole_kept, tools=ask.tools, options=options), whole_kept)
    sent = kept
    if ask.has_ephemeral or ask.instructions is not None:
        new = _with_instructions(messages_from_items(ask.sent), ask.instructions)
        whole_sent = system + messages_from_items(history) + new
        sent = await aside(lambda: model.render(whole_sent, tools=ask.tools, options=options), whole_sent)
    previous = await head.load_ids()
    report = await aside(
        lambda: prefix_report(previous, kept, decode=model.decode, hints=_hints(head, fingerprint)), whole_kept
    )
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


def chat_messages(ask: Ask, folded: Folded) -> list[dict[str, Any]]:
    """The whole conversation as chat messages, for a replica that goes by chat."""
    new = _with_instructions(messages_from_items(ask.sent), ask.instructions)
    return system_message(ask.system, folded) + messages_from_items(folded.items) + new
