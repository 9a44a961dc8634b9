"""System prompts that the cache holds from the engine's start: ordinary background requests of the class "system".

A warm-up file has one JSON object a line: {"text": …, "cache_salt": …}. `text` is the beginning of the prompts to come
as the model reads it, the template's markup spelt out; `cache_salt` that of the tenant, or none. Knows no pool: how
much is kept, and for how long, the engine core bounds.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import orjson

from engines.contract import EngineError, Sampling
from engines.local.refusal import Refusal
from engines.local.wire import SYSTEM, Event, WireRequest

MOST_PROMPTS = 64
MOST_BYTES = 4 << 20  # of one file
PRIORITY = 10  # behind every turn


class WarmUpRefused(Exception):
    """The file cannot be what was meant; the message names line and reason."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    text: str
    salt: str = ""


class Generates(Protocol):
    def generate(self, request: WireRequest) -> AsyncGenerator[list[Event], None]: ...


def read_warm_ups(paths: Sequence[Path]) -> list[WarmUp]:
    """All prompts of all files, at most MOST_PROMPTS. Raises WarmUpRefused."""
    found = [warm_up for path in paths for warm_up in _read(path)]
    if len(found) > MOST_PROMPTS:
        raise WarmUpRefused(f"{len(found)} prompts to warm up with: at most {MOST_PROMPTS}")
    return found


def _read(path: Path) -> list[WarmUp]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise WarmUpRefused(f"{path}: {error.strerror or error}") from error
    if len(content) > MOST_BYTES:
        raise WarmUpRefused(f"{path}: {len(content)} bytes, at most {MOST_BYTES}")
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            told = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise WarmUpRefused(f"{path}, line {number}: {error}") from error
        if (
            not isinstance(told, dict)
            or not told.keys() <= {"text", "cache_salt"}
            or not isinstance(told.get("text"), str)
        ):
            raise WarmUpRefused(f'{path}, line {number}: not of the form {{"text": …, "cache_salt": …}}')
        salt = told.get("cache_salt") or ""
        if not isinstance(salt, str):
            raise WarmUpRefused(f"{path}, line {number}: cache_salt is no text")
        found.append(WarmUp(told["text"], salt))
    return found


async def warm_up(
    engine: Generates,
    prompts: Sequence[WarmUp],
    encode: Callable[[str], Awaitable[list[int]]],
    *,
    model: str,
    report: Callable[[str], None],
) -> int:
    """Run them one after the other -> how many went through. One that is refused is reported, and the others run."""
    done = 0
    for number, prompt in enumerate(prompts, 1):
        try:
            ids = array("I", await encode(prompt.text))
            request = WireRequest(
                request_id=f"warm-up-{number}",
                model=model,
                delta=ids.tobytes(),
                sampling=Sampling(max_tokens=1),
                salt=prompt.salt,
                priority=PRIORITY,
                retention=SYSTEM,
            )
            async with aclosing(engine.generate(request)) as answers:
                events = [event async for some in answers for event in some]
            if events and events[-1].kind == "error":
                report(f"warm-up prompt {number}: {events[-1].data.decode()}")
                continue
        except (EngineError, Refusal) as error:
            report(f"warm-up prompt {number}: {error}")
            continue
        done += 1
    return done
