"""What a replica's error means: status, code and text of its body -> one EngineError.

One classifier for every kind of server, because proxies pass each other's errors on. A prompt that is too long is
said with 400, 413, 422, 429, 500 or inside a 200 stream, under a dozen wordings; throttling uses nearly the same
words. Decides only; knows no HTTP client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from engines.contract import (
    ContextOverflow,
    EngineBroken,
    EngineError,
    EngineOverloaded,
    EngineTimeout,
    EngineUnreachable,
    RequestRefused,
    UnknownBase,
    Unsupported,
)

_NOT_SERVING = frozenset({"loading", "engine_dead"})  # our own engine's words, with 503
MAX_MESSAGE = 500  # characters of a replica's message that are passed on
MAX_READ = 4 * MAX_MESSAGE  # that are looked at: a server may send megabytes, and patterns take their time

_OVERFLOW_CODES = frozenset(
    {"context_length_exceeded", "exceed_context_size_error", "context_window_exceeded", "prompt_too_long"}
)
# Each names `limit`, and `requested` or the parts `a` + `b` that add up to it. First match wins.
_NUMBERS = tuple(
    re.compile(pattern.replace("#", r"\d[\d,]*"), re.IGNORECASE | re.DOTALL)
    for pattern in (
        # vLLM, when max_tokens alone is too much, of 0.32 and before
        r"max_tokens=(?P<requested>#) cannot be greater than max_model_len=(?P<limit>#)",
        r"too large: (?P<a>#).*?maximum context length is (?P<limit>#).*?has (?P<b>#) input tokens",
        # vLLM: "... for a total of at least N tokens"; SGLang: "You requested a total of N tokens"
        r"maximum context length (?:is|of) (?P<limit>#).*?total of (?:at least )?(?P<requested>#)",
        # OpenAI and most who copy it
        r"maximum context length is (?P<limit>#).*?(?:requested|resulted in|contains|has) (?:about )?(?P<requested>#)",
        # llama.cpp
        r"request \((?P<requested>#) tokens\) exceeds the available context size \((?P<limit>#)",
        # SGLang
        r"input \((?P<requested>#) tokens\) is longer than the model's context length \((?P<limit>#)",
        r"input length[ :(]*(?P<requested>#)\)? exceeds (?:the )?(?:model'?s? )?maximum (?:allowed )?"
        r"(?:input|context) length[ of(]*(?P<limit>#)",
        r"context limit: (?P<a>#) \+ (?P<b>#) > (?P<limit>#)",
        r"too long:? (?P<requested>#) tokens (?:>|exceeds) (?:max\w* )?(?P<limit>#)",
        r"input token count (?:is )?\(?(?P<requested>#)\)? (?:but model only supports up to|exceeds the maximum number "
        r"of tokens allowed) \(?(?P<limit>#)",
        # text-generation-inference
        r"must be <= (?P<limit>#)\. given: (?P<a>#) `inputs` tokens and (?P<b>#)",
        r"prompt contains (?P<requested>#) tokens.*?too large for model with (?P<limit>#) maximum context length",
        # LM Studio
        r"keep the first (?P<requested>#) tokens.*?context length of only (?P<limit>#)",
        r"requested tokens \((?P<requested>#)\) exceed context window of (?P<limit>#)",
        r"max input tokens: (?P<limit>#), request input token count: (?P<requested>#)",
        r"(?:maximum )?context (?:length|window|size)(?: is| of|:)? \(?(?P<limit>#)",
    )
)
_RATE = re.compile(r"limit:? (?P<limit>\d[\d,]*).*?requested:? (?P<requested>\d[\d,]*)", re.IGNORECASE | re.DOTALL)
_OVERFLOW_TEXT = re.compile(
    r"maximum context length|max(?:imum)? (?:allowed )?input length|context (?:length|window|size|limit)"
    r"|(?:prompt|input)(?: is)? too long|too many input tokens|input token count"
    r"|(?:exceeds?|greater than) (?:the )?max_(?:model|seq)_len"
    r"|reduce the length of the (?:messages|prompt)|must be <= \d+\. given: \d+ `inputs` tokens"
    r"|number of tokens to keep from the initial prompt",
    re.IGNORECASE,
)
_THROTTLE_TEXT = re.compile(r"rate limit|too many requests|throttl|quota|concurren|please wait", re.IGNORECASE)
MAX_DIGITS = 15  # of a number of tokens
_LOADING_TEXT = re.compile(r"loading model", re.IGNORECASE)  # llama.cpp's whole message, with 503
_MODEL_TEXT = re.compile(r"\bmodel\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Complaint:
    """The parts of an error body that say something; empty strings where the body is silent."""

    message: str
    code: str = ""
    type: str = ""
    param: str | None = None
    limit: int | None = None
    requested: int | None = None
    status: int | None = None  # of the error itself, where the body repeats it


def read_complaint(body: bytes) -> Complaint:
    """Reads `{"error": {…}}`, `{"error": "…"}`, `{"message": …}`, `{"detail": …}` or plain text."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return Complaint(body[:MAX_READ].decode("utf-8", "replace").strip())
    return complaint_of(parsed)


def complaint_of(parsed: Any) -> Complaint:
    """As `read_complaint`, from parsed JSON: an error may also be an event of a stream."""
    inner = parsed.get("error", parsed) if isinstance(parsed, Mapping) else parsed
    if not isinstance(inner, Mapping):
        return Complaint(str(inner)[:MAX_READ])
    message = inner.get("message") or inner.get("detail") or inner.get("error_description") or ""
    code = inner.get("code")
    status = code if isinstance(code, int) and not isinstance(code, bool) else None
    if status is None and isinstance(code, str) and code.isdigit() and len(code) == 3:
        status = int(code)
    return Complaint(
        message=(message if isinstance(message, str) else orjson.dumps(message).decode())[:MAX_READ],
        code=code if isinstance(code, str) and status is None else "",
        type=str(inner.get("type") or "")[:MAX_READ],
        param=inner["param"] if isinstance(inner.get("param"), str) else None,
        limit=_count(inner.get("limit", inner.get("n_ctx"))),
        requested=_count(inner.get("requested", inner.get("n_prompt_tokens"))),
        status=status,
    )


def engine_error(status: int, complaint: Complaint, *, replica: str, retry_after_s: float | None = None) -> EngineError:
    """The error to raise for a response with this status (200 for an error inside a stream) and this body."""
    if status == 200 and complaint.status is not None:
        status = complaint.status
    said = complaint.message[:MAX_MESSAGE] or f"status {status}"
    message = f"{replica}: {said}"
    if (overflow := _overflow(status, complaint)) is not None:
        return ContextOverflow(message, limit=overflow[0], requested=overflow[1], replica=replica)
    if complaint.code == "unknown_base":
        return UnknownBase(message, replica=replica)
    if complaint.code in _NOT_SERVING or _LOADING_TEXT.match(complaint.message):
        return EngineUnreachable(message, replica=replica)
    if status in (429, 503) or complaint.code == "overloaded":
        return EngineOverloaded(message, retry_after_s=retry_after_s, limited=status == 429, replica=replica)
    if complaint.code == "unsupported_parameter" or status == 501:
        return Unsupported(message, param=complaint.param or "", replica=replica)
    if complaint.code == "model_not_found" or (status == 404 and _MODEL_TEXT.search(complaint.message)):
        return RequestRefused(message, code="model_not_found", param="model", replica=replica)
    if status in (400, 413, 422):
        return RequestRefused(message, code=complaint.code or "invalid_request", param=complaint.param, replica=replica)
    if status in (408, 504):
        return EngineTimeout(message, stage="first_delta", replica=replica)
    if status == 502:
        return EngineUnreachable(message, replica=replica)
    if status in (401, 403):
        return EngineBroken(f"{replica} refuses our credential: {said}", replica=replica)
    return EngineBroken(f"{message} (status {status})", replica=replica)


def _overflow(status: int, complaint: Complaint) -> tuple[int | None, int | None] | None:
    """(limit, requested) when the complaint is about a prompt that is too long, else None."""
    text = complaint.message
    named = complaint.code in _OVERFLOW_CODES or complaint.type in _OVERFLOW_CODES
    rate = _RATE.search(text)
    if rate and not named and ("token" in text.lower()):
        limit, requested = _count(rate["limit"]), _count(rate["requested"])
        return (limit, requested) if limit is not None and requested is not None and requested > limit else None
    if not named and (_THROTTLE_TEXT.search(text) or not _OVERFLOW_TEXT.search(text)):
        return None
    if not named and status not in (200, 400, 413, 422, 429, 500):
        return None
    limit, requested = complaint.limit, complaint.requested
    if limit is None or requested is None:
        found = read_numbers(text)
        limit = found[0] if limit is None else limit
        requested = found[1] if requested is None else requested
    return limit, requested


def read_numbers(text: str) -> tuple[int | None, int | None]:
    """(limit, requested) in tokens, as far as the text names them."""
    for pattern in _NUMBERS:
        if (match := pattern.search(text)) is None:
            continue
        groups = match.groupdict()
        limit = _count(groups["limit"])
        if "a" in groups:
            return limit, (_count(groups["a"]) or 0) + (_count(groups["b"]) or 0)
        return limit, _count(groups.get("requested"))
    return None, None


def _count(value: Any) -> int | None:
    """A number of tokens; None for what is none."""
    if isinstance(value, str) and (digits := value.replace(",", "")).isdecimal() and len(digits) <= MAX_DIGITS:
        value = int(digits)
    return value if type(value) is int and 0 < value < 10**MAX_DIGITS else None
