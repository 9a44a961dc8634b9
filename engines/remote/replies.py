"""Whole replies read as JSON, or the contract's error that they stand for."""

from __future__ import annotations

from typing import Any

import orjson

from engines.contract import EngineBroken
from engines.remote.http import Reply
from engines.remote.refusal import engine_error, read_complaint


def check(reply: Reply, name: str) -> None:
    """Raises the EngineError of a reply that is not 200."""
    if reply.status != 200:
        raise engine_error(reply.status, read_complaint(reply.body), replica=name, retry_after_s=reply.retry_after_s)


def json_of(reply: Reply, name: str) -> dict[str, Any]:
    """The JSON object in a 200. Raises EngineError."""
    check(reply, name)
    try:
        found = orjson.loads(reply.body)
    except orjson.JSONDecodeError as error:
        raise EngineBroken(f"{name}: an answer is not JSON: {error}", replica=name) from error
    if not isinstance(found, dict):
        raise EngineBroken(f"{name}: an answer is no JSON object", replica=name)
    return found
