"""Chats that are answered though nothing of them can be kept, and say so.

    saved: false, unsaved: session_busy           another turn of the matched conversation runs
    saved: false, unsaved: database_unavailable   the database is away, and the settings let chats go on without it

One that brings new messages alone needs its history from the database, and one with an Idempotency-Key what became of
the key: they are refused, never answered without.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Literal

from gateway.sessions.command import TurnCommand
from gateway.sessions.room import TurnRoom
from gateway.store.records import StoreUnavailable

UNSAVED = "unsaved"  # of a turn's metadata: why nothing of it is kept
Why = Literal["session_busy", "database_unavailable"]


def marked(command: TurnCommand, why: Why) -> TurnCommand:
    return replace(command, metadata={**command.metadata, "saved": False, UNSAVED: why})


def can_go_without(room: TurnRoom, command: TurnCommand) -> bool:
    """Whether it may be answered while the database is away."""
    return room.without_database and command.whole is not None and command.idempotency_key is None


def without_database(command: TurnCommand) -> TurnCommand:
    """The same chat, answered from what the request itself brought."""
    assert command.whole is not None
    return marked(replace(command, ask=command.whole, session_id=None, create=None), "database_unavailable")


async def kept_if_possible(
    room: TurnRoom, command: TurnCommand, keep: Callable[[], Awaitable[TurnCommand]]
) -> TurnCommand:
    """What `keep` makes of it with the database; else without, where that may be. Raises StoreUnavailable."""
    if not can_go_without(room, command):
        return await keep()
    if not room.store.away:
        try:
            return await keep()
        except StoreUnavailable:
            pass  # it went away just now
    return without_database(command)
