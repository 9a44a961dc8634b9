"""The input of a response, or the items that a conversation is given, as items that turns keep.

item_reference   the item it names, wherever in this tenant's conversations it is
reasoning        with its text; sealed text is opened, where it was sealed here for this tenant
compaction       the summary in it, told as quoted history
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compression.conversation import Item
from compression.segments import READ, Segment, summary_text
from gateway.api.responses.ids import named_items, turn_of_item
from gateway.api.responses.sealed import ContentSeal
from gateway.errors import BadRequest, NotFound
from gateway.sealing import CannotOpen
from gateway.sessions.items import message, parse_items
from gateway.store.sessions import Store

REASONING, COMPACTION = "reasoning", "compaction"  # what is sealed


async def read_items(store: Store, seal: ContentSeal, tenant_id: str, value: Any, *, param: str) -> tuple[Item, ...]:
    """A user message, or a list of items. Raises BadRequest, NotFound (of a reference), naming the place."""
    if isinstance(value, str):
        return tuple(parse_items(value, param=param))
    found: list[Item] = []
    for i, entry in enumerate(value):
        where = f"{param}[{i}]"
        kind = entry.get("type", "message")
        if kind == "item_reference":
            found.append(await _referred(store, tenant_id, entry.get("id"), where))
        elif kind == COMPACTION:
            found += _summary(seal, tenant_id, entry, where)
        else:
            opened = _opened(seal, tenant_id, entry, where) if kind == REASONING else entry
            found += parse_items([opened], param=param, first=i)
    return tuple(found)


async def _referred(store: Store, tenant_id: str, item_id: Any, where: str) -> Item:
    turn_id = turn_of_item(item_id) if isinstance(item_id, str) else None
    record = await store.find_turn(tenant_id, turn_id) if turn_id is not None else None
    session = await store.get_session(tenant_id, record.session_id) if record is not None else None
    items = dict(named_items(record.turn)) if record is not None and session is not None else {}
    if item_id not in items:
        raise NotFound(f"{where}: no item {str(item_id)[:64]!r}", code="item_not_found", param=f"{where}.id")
    return items[item_id]


def _opened(seal: ContentSeal, tenant_id: str, entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    kept = {name: value for name, value in entry.items() if name not in ("encrypted_content", "id", "status")}
    if kept.get("content") is None:
        kept.pop("content", None)
    sealed = entry.get("encrypted_content")
    if sealed is None:
        return kept
    content = _unsealed(seal, tenant_id, REASONING, sealed, where)
    return {**kept, "content": kept.get("content") or content}


def _summary(seal: ContentSeal, tenant_id: str, entry: Mapping[str, Any], where: str) -> Sequence[Item]:
    told = _unsealed(seal, tenant_id, COMPACTION, entry.get("encrypted_content"), where)
    text = summary_text([Segment(id="", turn_ids=("",) * told["turns"], text=told["text"], tokens=0, source="model")])
    return message("user", text), message("assistant", READ)


def _unsealed(seal: ContentSeal, tenant_id: str, kind: str, sealed: Any, where: str) -> Any:
    try:
        if not isinstance(sealed, str):
            raise CannotOpen("it is missing")
        return seal.unseal(tenant_id, kind, sealed)
    except CannotOpen as error:
        param = f"{where}.encrypted_content"
        raise BadRequest(
            f"{param} cannot be read: {error}; only what this gateway sealed can be", code="invalid_value", param=param
        ) from None


def sealed_reasoning(seal: ContentSeal, tenant_id: str, item: Mapping[str, Any]) -> str:
    return seal.seal(tenant_id, REASONING, item.get("content") or [])
