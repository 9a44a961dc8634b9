"""Whole replies read as JSON, or the contract's error that they stand for; and what a server's numbers may be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import orjson

from engines.contract import EngineBroken, Usage
from engines.remote.http import Reply, Upstream
from engines.remote.refusal import engine_error, read_complaint

MAX_ID = (1 << 32) - 1  # ids are stored as u32
MAX_COUNT = 1 << 53  # more than there are tokens, blocks or requests anywhere; JSON carries it exactly
STUMBLES = (LookupError, TypeError, ValueError, AttributeError, OverflowError)  # over JSON of another shape

P = ParamSpec("P")
T = TypeVar("T")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


E = TypeVar("E", bound=_Named)


def spoken(ask: Callable[Concatenate[E, P], Awaitable[T]]) -> Callable[Concatenate[E, P], Coroutine[Any, Any, T]]:
    """A question of an adapter: an answer that it stumbles over is EngineBroken, and nothing else is raised."""

    @wraps(ask)
    async def asked(engine: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await ask(engine, *args, **kwargs)
        except STUMBLES as error:
            message = f"{engine.name}: an answer is not of its protocol: {repr(error)[:200]}"
            raise EngineBroken(message, replica=engine.name) from error

    return asked


def check(reply: Reply, name: str) -> None:
    """Raises the EngineError of a reply that is not 200."""
    if reply.status != 200:
        raise engine_error(reply.status, read_complaint(reply.body), replica=name, retry_after_s=reply.retry_after_s)


def token_ids(value: Any) -> tuple[int, ...]:
    """Generated ids as JSON has them; nothing where there are none. Raises ValueError."""
    if not value:
        return ()
    if type(value) is not list or not all(type(token) is int and 0 <= token <= MAX_ID for token in value):
        raise ValueError("token ids are a list of numbers")
    return tuple(value)


def text_of(value: Any) -> str:
    """A text as JSON has it; nothing where there is none. Raises ValueError."""
    if value is not None and type(value) is not str:
        raise ValueError("a text is no string")
    return value or ""


def natural(value: Any) -> int | None:
    """A count as JSON has it; None for what is none, and for one beyond all counts."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def share(value: Any) -> float | None:
    """A ratio as JSON has it; None for what is none."""
    return float(value) if type(value) in (int, float) and 0 <= value <= 1 else None


def usage_of(
    prompt: Any, output: Any, cached: Any, shifted: Any = 0, *, host: Any = 0, disk: Any = 0, bits: Any = None
) -> Usage | None:
    """What a server says that an answer took; None where it says nonsense: the answer itself is whole. More cached
    tokens than the prompt has are not told. `host`, `disk`: of the cached ones, by the tier they came from."""
    counts = natural(prompt), natural(output)
    if counts[0] is None or counts[1] is None:
        return None
    known = natural(cached)
    cached_tokens = known if known is not None and known <= counts[0] else None
    tiers = natural(host) or 0, natural(disk) or 0
    return Usage(counts[0], counts[1], cached_tokens, natural(shifted) or 0, *tiers, natural(bits))


def cards_of(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The cards of a list of models. Raises TypeError."""
    return [card for card in found.get("data") or [] if isinstance(card, Mapping) and "id" in card]


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


def list_of(reply: Reply, name: str) -> list[dict[str, Any]]:
    """The JSON objects of the array in a 200. Raises EngineError."""
    check(reply, name)
    try:
        found = orjson.loads(reply.body)
    except orjson.JSONDecodeError as error:
        raise EngineBroken(f"{name}: an answer is not JSON: {error}", replica=name) from error
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise EngineBroken(f"{name}: an answer is no JSON array of objects", replica=name)
    return found


async def tokenized(upstream: Upstream, text: str, *, model: str) -> list[int] | None:
    """Ids by the `/tokenize` that vLLM and SGLang share, special tokens parsed and none added; None: it has none."""
    asked = {"model": model, "prompt": text, "add_special_tokens": False}
    reply = await upstream.post("/tokenize", orjson.dumps(asked))
    if reply.status in (404, 405):
        return None
    return list(token_ids(json_of(reply, upstream.name)["tokens"]))
