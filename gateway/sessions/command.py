"""What a client asks of a turn, in the gateway's own words. Plain values; knows no HTTP and no store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from compression.budget import OnOverflow, Reasoning
from compression.conversation import Item
from engines.contract import Grammar
from gateway.limits.told import Told
from gateway.store.records import HEAD, NewSession, SessionRecord

OnDisconnect = Literal["cancel", "finish"]


@dataclass(frozen=True, slots=True)
class Input:
    """One new item; an ephemeral one is sent to the engine and not kept (a retrieved document)."""

    item: Item
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """How to sample, as asked: None means the model's or the gateway's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One turn's request, apart from where it is stored."""

    model: str
    input: tuple[Input, ...]
    system: str | None = None
    instructions: str | None = None  # for this turn only
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    old_reasoning: Reasoning = "template"
    kv_shift: bool = False
    min_bits: int = 0  # the fewest bits of K/V that the answer may rest on; 0: any
    shape: Shape = field(default_factory=Shape)

    @property
    def kept(self) -> tuple[Item, ...]:
        return tuple(i.item for i in self.input if not i.ephemeral)

    @property
    def sent(self) -> tuple[Item, ...]:
        return tuple(i.item for i in self.input)

    @property
    def has_ephemeral(self) -> bool:
        return any(i.ephemeral for i in self.input)


@dataclass(frozen=True, slots=True)
class TurnCommand:
    """A turn to run: stateless where `session_id` is None, else stored under the session.

    `ask` was made of the session at `version`; where a PATCH came in between, `ask_of` makes it anew. Where the
    session is another than it was taken for (its head moved, it is gone), `again` makes the whole command anew;
    `follows` is the turn that `ask` goes on from, where that matters.
    """

    tenant_id: str
    ask: Ask
    key_id: str = ""  # of the API key that asks
    user_ref: str | None = (
        None  # the end user, where no session says who it is; a session that is nobody's is theirs then
    )
    told: Told | None = None  # hears how the limits of who asks stand
    version: int | None = None
    ask_of: Callable[[SessionRecord], Ask] | None = None
    follows: str | None = None
    again: Callable[[], Awaitable[TurnCommand]] | None = None
    session_id: str | None = None
    create: NewSession | None = None
    parent: str | None = HEAD
    idempotency_key: str | None = None
    request_hash: bytes | None = None
    on_disconnect: OnDisconnect = "finish"
    persist_events: bool = False
    busy_is_stateless: bool = False  # history matching never answers 409: the turn then runs unsaved
    waits_s: float = 0.0  # for the turn that the session answers now, before it is refused as busy
    whole: Ask | None = None  # all that the request itself says: what it is answered from where nothing can be kept
    saved: bool = True  # False: it goes on from the session's history, and nothing of it is kept
    move_head: bool = True  # whether the turn becomes the session's head when it is answered
    on_overflow: OnOverflow | None = None  # in place of the session's policy
    compact_past: int | None = None  # tokens of the path past which the session is compacted, in place of its policy
    metadata: Mapping[str, Any] = field(default_factory=dict)
    param: str = "input"  # what the client calls the new items: errors name it


def grammar_of(response_format: Mapping[str, Any] | None) -> Grammar | None:
    """The output grammar of a checked `response_format` (OpenAI: text, json_object, json_schema)."""
    if response_format is None or response_format["type"] == "text":
        return None
    if response_format["type"] == "json_object":
        return Grammar("json_object")

    return Grammar("json_schema", orjson.dumps(response_format["json_schema"]["schema"]).decode())
