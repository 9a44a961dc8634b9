"""Which conversation a chat request goes on with: by its session key, or by the history it resends.

    off      stateless                           match    the longest known chain of this tenant and end user
    append   the new messages of a keyed session replace  a keyed session whose whole history came along

Decisions are plain functions; only `find_chain` reads the store.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from compression.conversation import Item
from gateway.errors import BadRequest
from gateway.sessions.items import meaning, root_meaning
from gateway.store.records import TurnRecord
from gateway.store.sessions import Store

Mode = Literal["off", "match", "append", "replace"]

SESSION_KEY = re.compile(r"[A-Za-z0-9_.:@/+=-]{1,128}")
# Headers that agents and gateways already send with a conversation, most telling first.
KEY_HEADERS = (
    "x-claude-code-session-id",
    "session-id",
    "thread-id",
    "x-litellm-session-id",
    "x-dynamo-session-id",
    "x-smg-routing-key",
)
# Front ends ask for titles, tags and follow-up questions in a request of their own: not part of a conversation.
SIDE_TASKS = frozenset(
    {"title_generation", "tags_generation", "follow_up_generation", "emoji_generation", "query_generation"}
)
SIDE_TASK_OPENING = "### Task:"


def session_key(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """The first session key that the request carries. Raises BadRequest for one that cannot be an id."""
    metadata = body.get("metadata")
    candidates: list[tuple[str, Any]] = [
        ("X-Session-Id", headers.get("x-session-id")),
        ("metadata.session_id", metadata.get("session_id") if isinstance(metadata, Mapping) else None),
        ("session_id", body.get("session_id")),
        *((name, headers.get(name)) for name in KEY_HEADERS),
    ]
    for name, value in candidates:
        if value in (None, ""):
            continue
        if not isinstance(value, str) or not SESSION_KEY.fullmatch(value):
            raise BadRequest(
                f"{name}: a session key is 1 to 128 of A-Z a-z 0-9 _.:@/+=-",
                code="invalid_session_key",
                param=name,
            )
        return value
    return None


def is_side_task(body: Mapping[str, Any], items: Sequence[Item]) -> bool:
    metadata = body.get("metadata")
    if isinstance(metadata, Mapping) and metadata.get("task") in SIDE_TASKS:
        return True
    users = [item for item in items if item.role == "user"]
    return bool(users) and users[-1].text.startswith(SIDE_TASK_OPENING)


def history_mode(asked: str, *, key: str | None, items: Sequence[Item], store: bool, side_task: bool) -> Mode:
    """What becomes of the history; `asked` is auto, off, match, append or replace. Raises BadRequest."""
    if asked == "off" or not store or side_task:
        return "off"
    if asked in ("append", "replace") and key is None:
        raise BadRequest(f"history mode {asked} needs a session key, e.g. the header X-Session-Id", param="history")
    for mode in ("append", "replace", "match"):
        if asked == mode:
            return mode
    if key is None:
        return "match"
    answered = any(item.type == "message" and item.role == "assistant" for item in items)
    return "replace" if answered else "append"


@dataclass(frozen=True, slots=True)
class Chain:
    """A known turn whose path means the first `length` items of what was sent."""

    session_id: str
    turn_id: str
    origin_matched: bool  # the session itself was made by matching
    length: int


def prefixes(system: str | None, items: Sequence[Item]) -> list[tuple[bytes, int]]:
    """(meaning, length) of each prefix that ends with an answer, shortest first; the whole is none of them."""
    found: list[tuple[bytes, int]] = []
    digest = root_meaning(system)
    for i, item in enumerate(items):
        digest = meaning(digest, (item,))
        answered = _is_answer(item) and i + 1 < len(items) and not _is_answer(items[i + 1])
        if answered:
            found.append((digest, i + 1))
    return found


def _is_answer(item: Item) -> bool:
    return item.type in ("function_call", "reasoning") or (item.type == "message" and item.role == "assistant")


def chain_to(
    last: TurnRecord, system: str | None, items: Sequence[Item], *, origin_matched: bool = False
) -> Chain | None:
    """The chain that ends with `last`, where that is the longest prefix of `items` that could be known."""
    known = prefixes(system, items)
    if not known or last.meaning != known[-1][0]:
        return None
    return Chain(last.session_id, last.turn.id, origin_matched, known[-1][1])


async def find_chain(
    store: Store,
    tenant_id: str,
    user_ref: str | None,
    system: str | None,
    items: Sequence[Item],
    *,
    session_id: str | None = None,
) -> Chain | None:
    """The longest prefix of `items` that is a known path: of this end user, or of one session where it is named."""
    known = prefixes(system, items)
    if not known:
        return None
    digests = [digest for digest, _ in known]
    if session_id is not None:
        record = await store.find_meaning_in(tenant_id, session_id, digests)
    else:
        record = await store.find_meaning(tenant_id, user_ref, digests)
    if record is None or record.meaning is None:
        return None
    length = dict(known)[record.meaning]
    session = await store.get_session(tenant_id, record.session_id)
    if session is None:
        return None
    return Chain(record.session_id, record.turn.id, session.origin == "matched", length)
