"""Items as the Responses and Conversations APIs show them. Payloads stay as they were received or generated; what such
a shape needs beside them (id, status, content as parts) is put there when it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from compression.conversation import Item


def shown(item_id: str, item: Item, *, status: str = "completed") -> dict[str, Any]:
    payload = dict(item.payload)
    told: dict[str, Any] = {**payload, "id": item_id, "type": item.type}
    told["status"] = payload.get("status", status)
    if item.type == "message":
        told["content"] = _parts(payload.get("content"), str(payload.get("role")))
    elif item.type == "function_call_output" and isinstance(payload.get("output"), list):
        told["output"] = _parts(payload["output"], "user")
    elif item.type == "reasoning":
        told.setdefault("summary", [])
    return told


def shown_all(named: Iterable[tuple[str, Item]]) -> list[dict[str, Any]]:
    return [shown(item_id, item) for item_id, item in named]


def _parts(content: Any, role: str) -> list[dict[str, Any]]:
    if content is None:
        return []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [_part(part, role) for part in parts]


def _part(part: Mapping[str, Any], role: str) -> dict[str, Any]:
    """A part of a chat message as a part of an item; one that is an item's already stays."""
    if part.get("type") == "text":
        if role == "assistant":
            return {"type": "output_text", "text": part.get("text", ""), "annotations": []}
        return {"type": "input_text", "text": part.get("text", "")}
    if part.get("type") == "image_url":
        image = part.get("image_url")
        url, detail = (image.get("url"), image.get("detail")) if isinstance(image, Mapping) else (image, None)
        return {"type": "input_image", "image_url": url, "detail": detail or "auto"}
    return dict(part)
