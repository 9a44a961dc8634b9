"""KV events: what a replica tells of its own cache. Values, and both encodings of vLLM and SGLang. Knows no socket.

    payload   msgpack: [at, [event, ...], rank]     (a map of `ts`, `events`, `data_parallel_rank` is read, too)
    event     map    {"type": "BlockStored", "block_hashes": [...], ...}    vLLM since June 2026 (vllm#42892)
              array  ["BlockStored", [...], ...], fields by place           vLLM before, SGLang

Fields by place, as they were added: block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name,
extra_keys, group_idx, kv_cache_spec_kind; BlockRemoved: block_hashes, medium, group_idx. SGLang puts a map `metadata`
(cache_salt) where vLLM has lora_name. Fields and event types that are not known are passed over, the latter by name
(`EventBatch.unknown`); what is known and malformed raises KvEventsError, and nothing else is ever raised.

A block's name is bytes: as the engine gives it, or the 8 bytes (big-endian) of a 64-bit integer, signed or not. Names
of different engines have nothing in common, and nobody here computes them: hash the token ids yourself, and map.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

MAX_PAYLOAD_BYTES = 32 << 20  # one forward of an engine stores far less: 1 MiB is some 200,000 token ids
MAX_EVENTS = 65_536  # of one batch
MAX_HASHES = 1 << 20  # of one event
MAX_HASH_BYTES = 64
MAX_BLOCK_TOKENS = 1 << 20
MAX_EXTRA_KEYS = 256  # of one block
MAX_NAME_CHARS = 1024
TIERS = {"CPU_TIER1": "CPU", "CPU_TIER2": "STORAGE", "CPU_PINNED": "CPU", "DISK": "STORAGE", "REMOTE": "STORAGE"}
TOKEN_BYTES = 4
NAME_SIZES = range(1, MAX_HASH_BYTES + 1)

ExtraKeys = tuple[Any, ...] | None  # of one block: strings, numbers, bytes and tuples of those
Form = Literal["map", "array"]


class KvEventsError(ValueError):
    """A payload that is not what its protocol says."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that follow one another, of which a replica now holds the K/V.

    | parent | hashes[0] | hashes[1] | ... |        token_ids: `block_size` ids a block, u32 little-endian

    `parent` None: the first block begins at the root. `token_ids` may be empty: a copy of known blocks in another
    tier. `extra_keys`, where there are any, has one entry a block: what besides ids made its name (cache salt, LoRA
    adapter, images). `group`: of a model with several kinds of attention; None or 0 is the first.
    """

    hashes: tuple[bytes, ...]
    parent: bytes | None
    token_ids: bytes
    block_size: int
    medium: str | None = None  # "GPU", "CPU", "STORAGE"; None: not said, so the GPU
    lora_name: str | None = None
    extra_keys: tuple[ExtraKeys, ...] = ()
    group: int | None = None
    kind: str | None = None  # of attention: "full_attention", "sliding_window", ...

    @property
    def spelled(self) -> bool:
        """Whether `token_ids` spells every block."""
        return len(self.token_ids) == len(self.hashes) * self.block_size * TOKEN_BYTES

    @property
    def salt(self) -> str:
        """The cache salt, which vLLM tells with the first block of a path alone: "" there means none, later nothing."""
        first = self.extra_keys[0] if self.extra_keys else None
        named = [key for key in first or () if isinstance(key, str) and key != self.lora_name]
        return named[-1] if named else ""

    def blocks(self) -> Iterator[tuple[bytes, bytes]]:
        """(name, token bytes) of each block, in order; nothing where the ids are not told."""
        if self.spelled:
            size = self.block_size * TOKEN_BYTES
            for place, name in enumerate(self.hashes):
                yield name, self.token_ids[place * size : (place + 1) * size]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that a replica holds no more in `medium`; those that followed them may still be there."""

    hashes: tuple[bytes, ...]
    medium: str | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The rank holds nothing."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What one step of one data-parallel rank did. `seq` counts a rank's batches from 0 on, without gaps."""

    seq: int
    at: float  # seconds since 1970, by the replica's clock
    rank: int
    events: tuple[KvEvent, ...]
    unknown: tuple[str, ...] = ()  # types of events that were passed over


@dataclass(frozen=True, slots=True)
class FeedReset:
    """Forget what is known of `rank` (None: of every rank), for `reason`; what follows is told anew.

    `whole`: what follows tells everything that the rank holds. Otherwise older blocks may be there that nobody tells
    of any more, and a block may come whose parent is unknown.
    """

    rank: int | None
    reason: str
    whole: bool = False


@dataclass(frozen=True, slots=True)
class FeedSnapshot:
    """A part of what `rank` held after batch `seq` (-1: before the first). Comes after a FeedReset, before the batches
    from `seq + 1` on; parents come before children."""

    rank: int
    seq: int
    stored: tuple[BlockStored, ...]
    last: bool


FeedItem = EventBatch | FeedReset | FeedSnapshot


def decode_batch(seq: int, payload: bytes, *, rank: int = 0) -> EventBatch:
    """One payload of either encoding; `rank` where the payload names none. Raises KvEventsError, and nothing else."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise KvEventsError(f"a batch of {len(payload)} bytes: over {MAX_PAYLOAD_BYTES}")
    try:
        told = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, TypeError) as error:
        raise KvEventsError(f"no msgpack: {error}") from None  # TypeError: a map with a key that cannot be one
    match told:
        case [at, events, *rest]:
            named = rest[0] if rest else None
        case {"ts": at, "events": events}:
            named = told.get("data_parallel_rank")
        case _:
            raise KvEventsError(f"a batch is [ts, events, rank], not {type(told).__name__}")
    if not isinstance(at, float | int) or isinstance(at, bool) or not math.isfinite(at):
        raise KvEventsError("the time of a batch is no number")
    events = _list(events, "events", MAX_EVENTS)
    known: list[KvEvent] = []
    unknown: list[str] = []
    for event in events:
        kind, fields = _fields(event)
        match kind:
            case "BlockStored":
                known.append(_stored(fields))
            case "BlockRemoved":
                known.append(_removed(fields))
            case "AllBlocksCleared":
                known.append(AllBlocksCleared())
            case _:
                unknown.append(kind)
    return EventBatch(seq, float(at), rank if named is None else _natural(named, "rank"), tuple(known), tuple(unknown))


def encode_batch(batch: EventBatch, *, form: Form = "map") -> bytes:
    """The payload of `batch`, as vLLM sends it now ("map") or sent it before June 2026 ("array")."""
    events = [_spelled(event, form) for event in batch.events]
    return msgspec.msgpack.encode([batch.at, events, batch.rank])


_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind"),
)
_REMOVED = ("block_hashes", "medium", "group_idx")
_PLACES: Mapping[str, Sequence[str]] = {"BlockStored": _STORED, "BlockRemoved": _REMOVED}


def _spelled(event: KvEvent, form: Form) -> list[Any] | dict[str, Any]:
    kind, fields = type(event).__name__, {}
    if isinstance(event, BlockStored):
        ids = array("I", event.token_ids)
        values = (list(event.hashes), event.parent, ids.tolist(), event.block_size, None, event.medium, event.lora_name)
        fields = dict(zip(_STORED, (*values, event.extra_keys or None, event.group, event.kind), strict=True))
    elif isinstance(event, BlockRemoved):
        fields = dict(zip(_REMOVED, (list(event.hashes), event.medium, event.group), strict=True))
    return {"type": kind} | fields if form == "map" else [kind, *fields.values()]


def _fields(event: Any) -> tuple[str, Mapping[Any, Any]]:
    match event:
        case {"type": str(kind)}:
            fields: Mapping[Any, Any] = event
        case [str(kind), *values]:
            fields = dict(zip(_PLACES.get(kind, ()), values, strict=False))
        case _:
            raise KvEventsError("an event is a map with a type, or an array that begins with it")
    if len(kind) > MAX_NAME_CHARS:
        raise KvEventsError(f"the type of an event has {len(kind)} characters")
    return kind, fields


def _stored(fields: Mapping[Any, Any]) -> BlockStored:
    hashes = _hashes(fields.get("block_hashes"))
    parent = fields.get("parent_block_hash")
    size = _natural(fields.get("block_size"), "block_size")
    if not 0 < size <= MAX_BLOCK_TOKENS:
        raise KvEventsError(f"a block of {size} tokens")
    lora, metadata = fields.get("lora_name"), fields.get("metadata")
    if isinstance(lora, dict):  # SGLang's array has its metadata at this place
        lora, metadata = None, lora
    extra = _extra_keys(fields.get("extra_keys"), len(hashes))
    salt = metadata.get("cache_salt") if isinstance(metadata, dict) else None
    if salt is not None and hashes:
        rest = extra[1:] if extra else (None,) * (len(hashes) - 1)
        extra = ((*((extra[0] or ()) if extra else ()), _name(salt, "cache_salt")), *rest)
    ids = _list(fields.get("token_ids"), "token_ids", MAX_PAYLOAD_BYTES)
    try:
        token_ids = array("I", ids).tobytes()
    except (TypeError, OverflowError, ValueError):
        raise KvEventsError("token_ids is no list of 32-bit numbers") from None
    return BlockStored(
        hashes,
        None if parent is None else _hash(parent),
        token_ids,
        size,
        _medium(fields.get("medium")),
        _name(lora, "lora_name"),
        extra,
        _group(fields.get("group_idx")),
        _name(fields.get("kv_cache_spec_kind"), "kv_cache_spec_kind"),
    )


def _removed(fields: Mapping[Any, Any]) -> BlockRemoved:
    hashes = _hashes(fields.get("block_hashes"))
    return BlockRemoved(hashes, _medium(fields.get("medium")), _group(fields.get("group_idx")))


def _hashes(value: Any) -> tuple[bytes, ...]:
    names = _list(value, "block_hashes", MAX_HASHES)
    if set(map(type, names)) == {bytes} and all(map(NAME_SIZES.__contains__, map(len, names))):
        return tuple(names)
    return tuple(map(_hash, names))


def _hash(value: Any) -> bytes:
    if isinstance(value, bytes) and 0 < len(value) <= MAX_HASH_BYTES:
        return value
    if isinstance(value, int) and not isinstance(value, bool):  # msgpack holds none beyond 64 bits
        return (value & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "big")
    raise KvEventsError("a block's hash is a 64-bit integer or up to 64 bytes")


def _extra_keys(value: Any, num_blocks: int) -> tuple[ExtraKeys, ...]:
    if value is None:
        return ()
    entries = _list(value, "extra_keys", MAX_HASHES)
    if len(entries) != num_blocks:
        raise KvEventsError(f"{len(entries)} extra keys for {num_blocks} blocks")
    return tuple(
        None if entry is None else tuple(_key(key) for key in _list(entry, "extra_keys", MAX_EXTRA_KEYS))
        for entry in entries
    )


def _key(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if isinstance(value, list) and depth < 4:
        return tuple(_key(one, depth + 1) for one in _list(value, "extra_keys", MAX_EXTRA_KEYS))
    raise KvEventsError(f"an extra key of type {type(value).__name__}")


def _list(value: Any, what: str, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise KvEventsError(f"{what} is no list")
    if len(value) > most:
        raise KvEventsError(f"{what} has {len(value)} entries: over {most}")
    return value


def _natural(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise KvEventsError(f"{what} is no natural number")
    return value


def _group(value: Any) -> int | None:
    return None if value is None else _natural(value, "group_idx")


def _name(value: Any, what: str) -> str | None:
    if value is not None and not (isinstance(value, str) and len(value) <= MAX_NAME_CHARS):
        raise KvEventsError(f"{what} is no string of up to {MAX_NAME_CHARS} characters")
    return value


def _medium(value: Any) -> str | None:
    told = _name(value, "medium")
    return TIERS.get(told, told) if told is not None else None
