"""How much of the next prompt stands before anything new: a session's path as it is shown now.

last turn | ids of the path as that turn was sent and answered      valid as long as nothing is shown otherwise
anew      | the whole path rendered and counted                     after a compaction, its revert, a pin, a PATCH of
                                                                    model, system prompt or tools, an import
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.errors import BadRequest
from gateway.sessions.command import Ask
from gateway.sessions.counting import count_chat
from gateway.sessions.history import History
from gateway.sessions.items import messages_from_items
from gateway.sessions.prompt import ID_BYTES, aside, chat_messages, fingerprint_of, system_message
from gateway.sessions.tokens import ModelTokens


@dataclass(frozen=True, slots=True)
class Shown:
    """`model` None: the path goes by chat messages. `load_ids` None: nobody here knows its ids."""

    tokens: int
    model: ModelTokens | None = None
    load_ids: Callable[[], Awaitable[bytes]] | None = None


async def shown(model: ModelTokens | None, ask: Ask, history: History) -> Shown:
    """`ask`: the session as its turns ask it, with nothing new; `model`: its tokenizer and template, where known."""
    head = history.head
    if head.turn_id is None:
        return Shown(0, model)
    if model is not None and head.tokens is not None:
        if head.tokens.fingerprint == fingerprint_of(model, ask, ask.template_options, head.view):
            return Shown(head.tokens.path_tokens, model, head.load_ids)
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


async def _anew(model: ModelTokens, ask: Ask, history: History) -> Shown:
    folded = await history.head.load_items(model.placement, ask.old_reasoning)
    messages = system_message(ask.system, folded) + messages_from_items(folded.items)
    ids = await aside(lambda: model.render(messages, tools=ask.tools), messages)

    async def load() -> bytes:
        return ids

    return Shown(len(ids) // ID_BYTES, model, load)
