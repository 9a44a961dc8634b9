"""How much of the next prompt stands before anything new: a session's path as it is shown now.

no turn   | system prompt, tools, and what the template puts around a first message: all that its text is added to
last turn | ids of the path as that turn was sent and answered      valid as long as nothing is shown otherwise
anew      | the whole path rendered and counted                     after a compaction, its revert, a pin, a PATCH of
                                                                    model, system prompt or tools, an import
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from compression.view import Folded
from gateway.errors import BadRequest, TooLarge
from gateway.sessions.command import Ask
from gateway.sessions.counting import count_chat
from gateway.sessions.history import History
from gateway.sessions.items import messages_from_items
from gateway.sessions.messages import PROBE
from gateway.sessions.prefix import PrefixReport
from gateway.sessions.prompt import ID_BYTES, aside, chat_messages, compared, fingerprint_of, led, system_message
from gateway.sessions.tokens import ModelTokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shown:
    """`model` None: the path goes by chat messages. `load_ids` and `load_report` (how it relates to the path as it was
    sent last) None: nobody here knows its ids."""

    tokens: int
    model: ModelTokens | None = None
    load_ids: Callable[[], Awaitable[bytes]] | None = None
    load_report: Callable[[], Awaitable[PrefixReport]] | None = None


async def shown(model: ModelTokens | None, ask: Ask, history: History) -> Shown:
    """`ask`: the session as its turns ask it, with nothing new; `model`: its tokenizer and template, where known."""
    head = history.head
    if head.turn_id is None:
        return await _before_any_turn(model, ask)
    if model is not None and head.tokens is not None:
        if head.tokens.fingerprint == fingerprint_of(model, ask, ask.template_options, head.view):
            whole = PrefixReport(head.tokens.path_tokens, head.tokens.path_tokens)
            return Shown(head.tokens.path_tokens, model, head.load_ids, lambda: _at_once(whole))
        return await _anew(model, ask, history)
    if model is not None and not history.sent:
        try:
            return await _anew(model, ask, history)
        except BadRequest:  # what was imported holds an image, or roles that the template does not take
            pass
    if history.counted:
        return Shown(history.used_tokens)
    messages = chat_messages(ask, await head.load_items("exchange", ask.old_reasoning))
    return Shown((await aside(lambda: count_chat(ask.model, messages, ask.tools), messages)).tokens)


async def _before_any_turn(model: ModelTokens | None, ask: Ask) -> Shown:
    """Measured around a word, as many templates take no conversation without a user's message."""
    first = [*system_message(ask.system, Folded(())), {"role": "user", "content": PROBE}]
    if model is not None:
        try:
            rendered = await aside(lambda: model.render(first, tools=ask.tools), first)
            return Shown(len(rendered) // ID_BYTES - model.count(PROBE), model)
        except (BadRequest, TooLarge):  # no system prompt is taken, no tools, or none so long: the turn will say so
            pass
    first[-1] = {"role": "user", "content": ""}
    return Shown((await aside(lambda: count_chat(ask.model, first, ask.tools), first)).tokens)


async def _anew(model: ModelTokens, ask: Ask, history: History) -> Shown:
    folded = await history.head.load_items(model.placement, ask.old_reasoning)
    messages = led(system_message(ask.system, folded) + messages_from_items(folded.items))
    ids = await aside(lambda: model.render(messages, tools=ask.tools), messages)

    async def report() -> PrefixReport:
        fingerprint = fingerprint_of(model, ask, ask.template_options, history.head.view)
        return await compared(model, history.head, await history.head.load_ids(), ids, fingerprint)

    return Shown(len(ids) // ID_BYTES, model, lambda: _at_once(ids), report)


async def _at_once(value: T) -> T:
    return value
