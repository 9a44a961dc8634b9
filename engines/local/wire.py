"""The gateway's door of the engine as bytes and values (docs/engine-wire.md). Knows no HTTP, no torch, no clock."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import orjson

from engines.contract import Base, Generated, RequestRefused, Sampling, Shift, TokenLogprob, Usage
from engines.local import checks
from engines.local.refusal import Refusal

CONTENT_TYPE = "application/vnd.turnkeep.generate"
HEADER_FIELDS = frozenset(
    {"request_id", "model", "session", "base", "shift", "generated", "cache_salt", "priority", "retention", "sampling"}
    | {"min_bits", "system_tokens", "recent_from", "score_from"}
)
SYSTEM = "system"  # retention of a system prompt: its blocks are kept before others, within the pool's quota
SHIFT_COUNTS = ("source_start", "dest_start", "length", "recompute")
MAX_HEADER_BYTES = 256 * 1024
REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_PRIORITY = 1 << 20
MAX_CHARS = 1 << 26
MAX_BITS = 16
ID_BYTES = 4
LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class WireRequest:
    """One request to generate, its fields within their bounds. `delta` is u32 little-endian."""

    request_id: str
    model: str
    delta: bytes
    sampling: Sampling
    session: str | None = None
    base: Base | None = None
    salt: str = ""
    priority: int = 0
    shift: Shift | None = None
    generated: Generated | None = None
    retention: str | None = None  # None, or SYSTEM
    min_bits: int = 0
    system_tokens: int = 0
    recent_from: int = 0
    score_from: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Without what is generated already."""
        before = self.base.length if self.base is not None else 0
        return before + len(self.delta) // ID_BYTES - (self.generated.ids if self.generated is not None else 0)


class Event(NamedTuple):
    """One `data:` line: `kind` is started, delta, last or error; `data` its JSON; `usage` that of the last. Before it
    a request that scores has one of kind scores, whose `data` is no JSON but the log-probabilities."""

    kind: str
    data: bytes
    usage: Usage | None = None


def decode_generate(body: bytes, vocab: int) -> WireRequest:
    """Read the body of POST /turnkeep/v1/generate. Raises RequestRefused naming the field."""
    if len(body) < LENGTH.size:
        raise RequestRefused("the body ends before the header's length")
    (header_bytes,) = LENGTH.unpack_from(body)
    end = LENGTH.size + header_bytes
    if header_bytes > MAX_HEADER_BYTES or end > len(body):
        raise RequestRefused(f"the header's length {header_bytes} is beyond the body or {MAX_HEADER_BYTES}")
    header = checks.json_object(body[LENGTH.size : end])
    return read_header(header, checks.token_bytes(body[end:], vocab, "delta"), vocab)


def read_header(header: Mapping[str, Any], delta: bytes, vocab: int) -> WireRequest:
    checks.unknown(header, HEADER_FIELDS)
    sampling = checks.mapping(header, "sampling") or {}
    checks.unknown(sampling, checks.SAMPLING_FIELDS, "sampling.")
    base = _base(header, "base")
    generated = _generated(header, len(delta) // ID_BYTES)
    if base is None and len(delta) // ID_BYTES == (generated.ids if generated is not None else 0):
        raise checks.refuse("delta", "an empty prompt")
    return WireRequest(
        request_id=_required(header, "request_id", REQUEST_ID),
        model=_required(header, "model", checks.PRINTABLE),
        delta=delta,
        sampling=checks.sampling(sampling, vocab),
        session=checks.text(header, "session", checks.PRINTABLE, None),
        base=base,
        salt=checks.text(header, "cache_salt", checks.SALT, ""),
        priority=checks.whole(header, "priority", -MAX_PRIORITY, MAX_PRIORITY, 0),
        shift=_shift(header),
        generated=generated,
        retention=_retention(header),
        min_bits=checks.whole(header, "min_bits", 0, MAX_BITS, 0),
        system_tokens=checks.whole(header, "system_tokens", 0, checks.MAX_TOKENS, 0),
        recent_from=checks.whole(header, "recent_from", 0, checks.MAX_TOKENS, 0),
        score_from=checks.whole(header, "score_from", 0, checks.MAX_TOKENS, None),
    )


def _retention(header: Mapping[str, Any]) -> str | None:
    value = header.get("retention")
    if value not in (None, SYSTEM):
        raise checks.refuse("retention", f"must be {SYSTEM!r}")
    return SYSTEM if value else None


def _required(header: Mapping[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = checks.text(header, name, pattern, None)
    if value is None:
        raise checks.refuse(name, "is required")
    return value


def _base(fields: Mapping[str, Any], name: str) -> Base | None:
    value = checks.mapping(fields, "base")
    if value is None:
        return None
    checks.unknown(value, {"length", "digest"}, f"{name}.")
    length = checks.whole(value, "length", 0, checks.MAX_TOKENS, None)
    digest = checks.text(value, "digest", DIGEST, None)
    if length is None or digest is None:
        raise checks.refuse(name, "needs length and digest")
    return Base(length, bytes.fromhex(digest))


def _generated(header: Mapping[str, Any], delta_ids: int) -> Generated | None:
    value = checks.mapping(header, "generated")
    if value is None:
        return None
    checks.unknown(value, {"ids", "chars"}, "generated.")
    ids = checks.whole(value, "ids", 1, delta_ids, None)
    chars = checks.whole(value, "chars", 0, MAX_CHARS, None)
    if ids is None or chars is None:
        raise checks.refuse("generated", "needs ids and chars")
    return Generated(ids, chars)


def _shift(header: Mapping[str, Any]) -> Shift | None:
    value = checks.mapping(header, "shift")
    if value is None:
        return None
    checks.unknown(value, {"base", *SHIFT_COUNTS}, "shift.")
    base = _base(value, "shift.base")
    counts = [checks.whole(value, name, 0, checks.MAX_TOKENS, None) for name in SHIFT_COUNTS]
    if base is None or None in counts:
        raise checks.refuse("shift", f"needs base, {', '.join(SHIFT_COUNTS)}")
    return Shift(base, *(count or 0 for count in counts))


def header_of(request: WireRequest) -> dict[str, Any]:
    """The JSON header of a request: `read_header` is its inverse. Fields at their default are left out."""
    header: dict[str, Any] = {"request_id": request.request_id, "model": request.model}
    header["sampling"] = sampling_fields(request.sampling)
    if request.session is not None:
        header["session"] = request.session
    if request.base is not None:
        header["base"] = _base_fields(request.base)
    if (shift := request.shift) is not None:
        counts = {name: getattr(shift, name) for name in SHIFT_COUNTS}
        header["shift"] = {"base": _base_fields(shift.base), **counts}
    if request.generated is not None:
        header["generated"] = {"ids": request.generated.ids, "chars": request.generated.chars}
    if request.salt:
        header["cache_salt"] = request.salt
    if request.priority:
        header["priority"] = request.priority
    if request.retention is not None:
        header["retention"] = request.retention
    if request.min_bits:
        header["min_bits"] = request.min_bits
    if request.system_tokens:
        header["system_tokens"] = request.system_tokens
    if request.recent_from:
        header["recent_from"] = request.recent_from
    if request.score_from is not None:
        header["score_from"] = request.score_from
    return header


def _base_fields(base: Base) -> dict[str, Any]:
    return {"length": base.length, "digest": base.digest.hex()}


_DEFAULTS = Sampling(max_tokens=1)
_NAMES = tuple(field.name for field in fields(Sampling))


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    given: dict[str, Any] = {"max_tokens": sampling.max_tokens}
    for name in _NAMES[1:]:
        value = getattr(sampling, name)
        if value != getattr(_DEFAULTS, name):
            given[name] = value
    if sampling.logit_bias:
        given["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.grammar is not None:
        given["grammar"] = {"kind": sampling.grammar.kind, "text": sampling.grammar.text}
    return given


def encode_generate(request: WireRequest) -> bytes:
    header = orjson.dumps(header_of(request))
    return b"".join((LENGTH.pack(len(header)), header, request.delta))


def started_event(prompt_tokens: int, cached_tokens: int | None, queue_s: float) -> Event:
    fields = {"prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens, "queue_s": round(queue_s, 6)}
    return Event("started", orjson.dumps(fields))


def delta_event(
    ids: Sequence[int],
    text: str,
    logprobs: Sequence[TokenLogprob] = (),
    *,
    finish: str | None = None,
    stop: str | None = None,
    usage: Usage | None = None,
) -> Event:
    """A piece of the answer; with `finish` the last one."""
    fields: dict[str, Any] = {"ids": list(ids), "text": text}
    if logprobs:
        fields["logprobs"] = [
            {"id": token.id, "text": token.text, "logprob": token.logprob, "top": token.top} for token in logprobs
        ]
    if finish is None:
        return Event("delta", orjson.dumps(fields))
    fields |= {"finish": finish, "stop": stop}
    if usage is not None:
        fields["usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
        }
        if usage.approximate:
            fields["usage"] |= {"approximate": True, "shifted_tokens": usage.shifted_tokens}
        for name in ("host_tokens", "disk_tokens"):
            if tokens := getattr(usage, name):
                fields["usage"][name] = tokens
        if usage.prefix_bits is not None:
            fields["usage"]["prefix_bits"] = usage.prefix_bits
    return Event("last", orjson.dumps(fields), usage)


def error_event(error: Refusal) -> Event:
    return Event("error", error.body())
