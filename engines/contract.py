"""The engine contract: token ids in, token ids out.

    GenerateRequest --> Engine.generate --> Delta, Delta, ..., Delta(finish)

Every replica, ours or another's, stands behind `Engine`. This module knows no HTTP, no torch, no session store.

    EngineError
    |-- EngineUnreachable      no connection, or it broke before the first delta          another replica may try
    |-- EngineTimeout          connect, first_delta, idle or total                        another replica may try
    |-- EngineOverloaded       the replica's queue is full (429, 503)                     another replica may try
    |-- EngineLost             the stream broke after the first delta: never re-sent blindly
    |-- EngineBroken           the replica answered something that is not its protocol
    |-- UnknownBase            the replica does not hold the base path: resend the whole prompt
    `-- RequestRefused         the request itself: no replica will take it
        |-- ContextOverflow    prompt (+ answer) longer than the window, with both numbers
        `-- Unsupported        this replica cannot do what was asked (says what)
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from engines.kv_events import FeedItem

EMPTY_DIGEST = b"\0" * 32
ROUTES = ("/v1/completions", "/v1/embeddings", "/v1/rerank")  # answered without a session, beside chat


def chain_digest(digest: bytes, ids: bytes) -> bytes:
    """Name of a token path: SHA-256 over the digest of the path before `ids` and `ids` (u32 little-endian).

    A path grows by two links a turn: the ids that were sent, then the ids that were generated.
    """
    return hashlib.sha256(digest + ids).digest()


@dataclass(frozen=True, slots=True)
class Base:
    """A token path that the replica may still hold: `length` ids under `digest` (see `chain_digest`)."""

    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Shift:
    """Leave to reuse K/V at another position, which makes the answer approximate (`Usage.shifted_tokens`).

    The path that the replica keeps under the prompt's session, named by `base`, holds from `source_start` on the same
    `length` ids as the prompt does from `dest_start` on. The first `recompute` of them are computed all the same: they
    are what everything later leans on most. A replica that cannot shift, or holds the path no more, computes all.
    """

    base: Base
    source_start: int
    dest_start: int
    length: int
    recompute: int = 64


@dataclass(frozen=True, slots=True)
class Generated:
    """The end of a prompt that is the answer's own beginning, generated elsewhere: another replica died over it.

    The prompt's last `ids` ids are generated already, and the first `chars` characters of the answer's text are told.
    A replica that `Capabilities.continues` goes on as if it had generated them itself: detokenizer, stop strings,
    penalties, grammar, a seed's random numbers and `max_tokens` count them, `Usage` has them in `output_tokens` and
    not in `prompt_tokens`, and its deltas hold the new ids, and the text beyond `chars`.
    """

    ids: int
    chars: int


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """A prompt as token ids. `delta` continues `base`; without a base it is the whole prompt.

    An adapter whose engine keeps no session, or answers `unknown_base`, awaits `whole()`.
    """

    delta: bytes  # u32 little-endian
    num_tokens: int  # of the whole prompt, base and generated ids included
    whole: Callable[[], Awaitable[bytes]]  # u32 little-endian, num_tokens of them
    session: str | None = None  # opaque to the replica; names the path it may keep (background work only reads it)
    base: Base | None = None
    shift: Shift | None = None
    generated: Generated | None = None  # its ids are the end of `delta`
    system_tokens: int = 0  # so many ids of its beginning are the system prompt
    recent_from: int = 0  # from here on are the last three turns; 0: nobody here says


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as OpenAI chat messages, for what ids cannot carry to this replica."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Mapping[str, Any] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)  # e.g. {"enable_thinking": False}
    reasoning_effort: str | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must match. `text` is a JSON schema, a Lark grammar or a regular expression, by `kind`."""

    kind: Literal["json_object", "json_schema", "lark", "regex"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens; the names and ranges are OpenAI's and vLLM's. `temperature` 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # the template's end-of-turn ids; generated, kept in `ids`, not in `text`
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None = off; n = the chosen token's and the n most likely
    grammar: Grammar | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    request_id: str
    model: str
    prompt: IdsPrompt | ChatPrompt
    sampling: Sampling
    cache_salt: str = ""  # derived from the tenant, never from the client; equal salt is needed to share a block
    priority: int = 0  # lower runs first; above 0 is background work (warm-up, compaction): see docs/engines.md
    min_bits: int = 0  # the fewest bits of K/V that the answer may rest on; 0: any
    shared: bool = False  # other sessions begin with the same system prompt: its blocks are worth keeping


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural) of one generated token, with the alternatives asked for, most likely first."""

    id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call, as OpenAI streams them: id and name come once, arguments in pieces."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None  # None: the engine does not say
    shifted_tokens: int = 0  # of the prompt, taken from another position of the session's former path
    host_tokens: int = 0  # of the cached ones, those that came from host memory
    disk_tokens: int = 0  # and from a disk
    prefix_bits: int | None = None  # the fewest bits of K/V that the answer rests on, 16: all; None: it does not say

    @property
    def approximate(self) -> bool:
        """Whether the answer rests on K/V that a full computation would not give."""
        return self.shifted_tokens > 0


class Delta(NamedTuple):
    """What one step added. The last delta of an answer carries `finish` and `usage`.

    `ids` holds every generated id, also those of end-of-turn and other special tokens; `text` is what they read as
    without special tokens, held back while a character is incomplete or a stop string may be starting. In chat
    mode `ids` may be empty, and the engine's own parser fills `reasoning` and `tool_calls`. A named tuple because one
    is made for every chunk: a frozen dataclass of eight fields takes four times as long.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it, if one did
    usage: Usage | None = None


FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "cancelled"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a replica can do, probed and not configured. `unseen` names what could not be learnt."""

    kind: str  # "turnkeep", "vllm", "sglang", "llamacpp", "openai", "echo"
    models: tuple[str, ...]
    window: int | None = None  # tokens; None: unknown
    takes_ids: bool = False
    takes_delta: bool = False  # the session wire: base + delta
    takes_shift: bool = False
    retains: bool = False  # it keeps the blocks of a `shared` system prompt before others
    takes_bits: bool = False  # its K/V may have fewer bits: it takes `min_bits`, `system_tokens` and `recent_from`
    continues: bool = False  # takes an answer that another replica began (Generated)
    takes_salt: bool = False  # equal `cache_salt` is needed to share a prefix
    takes_chat: bool = False
    parses_tools: bool = False  # chat mode: the engine parses tool calls itself
    parses_reasoning: bool = False
    takes_images: bool = False
    grammars: frozenset[str] = frozenset()  # kinds of Grammar
    sampling: frozenset[str] = frozenset()  # fields of Sampling that it honours, beyond max_tokens
    max_logprobs: int = 0
    returns_ids: bool = False  # by ids; an answer in chat mode may come without
    reports_cached: bool = False
    max_running: int | None = None  # requests that it works on at once; those beyond wait in it
    block_size: int | None = None
    kv_events: bool = False  # it tells what its cache holds: see KvSource
    suspends: bool = False  # a session's K/V can be put down and taken up: see KeepsKv
    carries_kv: bool = False  # and goes out and comes in as a file
    keeps_sessions: bool = False  # a session cache: paths are kept, and forgotten, by the session's name
    prefills: bool = False  # it has a prefix cache, so a prompt that is sent ahead is found by the next one
    adapters: tuple[str, ...] = ()  # those of `models` that are LoRA adapters, where the engine tells
    routes: frozenset[str] = frozenset()  # of ROUTES: what it answers beside chat
    epoch: str | None = None  # changes when the replica restarts, so its caches are known to be gone
    tokenizer: str | None = None  # SHA-256 hex over tokenizer.json and the chat template, where the engine tells
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # model -> names its weights, where the engine tells
    unseen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy a replica is, and how full. None: the replica does not say."""

    running: int = 0
    waiting: int = 0
    kv_used_ratio: float | None = None
    kv_blocks_total: int | None = None
    kv_blocks_cached: int | None = None
    kv_blocks_used: int | None = None


class Engine(Protocol):
    """One replica. Every method may raise EngineError and nothing else."""

    @property
    def name(self) -> str: ...

    async def capabilities(self) -> Capabilities:
        """Probe the replica, each time anew."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Stream one answer. Closing the generator cancels the request in the engine within a second."""
        ...

    async def load(self) -> EngineLoad: ...

    async def tokenize(self, text: str, *, model: str) -> list[int] | None:
        """Ids of `text` by the engine's own tokenizer, special tokens parsed; None where it has no such call."""
        ...

    async def forget(self, session: str, salt: str) -> dict[str, int] | None:
        """Drop, and zero, what the replica keeps under this session's name and cache salt -> blocks that went, by where
        they lay (device, host, disk, remote); all 0, or none named, where it kept nothing.

        None: it keeps nothing by a session's name, so it cannot be asked. What it cached of the prompts goes when
        others take its place.
        """
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class Forwards(Protocol):
    """An engine that also answers requests of OpenAI's shape as they are: `Capabilities.routes` names which."""

    async def forward(self, route: str, fields: Mapping[str, Any], *, request_id: str, salt: str) -> dict[str, Any]:
        """The whole reply to `fields` posted to `route`. `salt` takes the place of any in `fields`."""
        ...

    def forward_stream(
        self, route: str, fields: Mapping[str, Any], *, request_id: str, salt: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed reply. Closing the generator cancels the request in the engine."""
        ...


@runtime_checkable
class KvSource(Protocol):
    """An engine whose replica tells what its cache holds. Not every Engine is one."""

    def kv_feed(self) -> AsyncGenerator[FeedItem, None] | None:
        """What the replica's cache holds, from now on: a FeedReset first, and whenever something was lost.

        Never ends of itself: it reconnects, and a replica that is away is only silent. Closing it closes its sockets.
        None: this replica tells nothing (not configured, or it cannot).
        """
        ...


@runtime_checkable
class KeepsKv(Protocol):
    """An engine that puts a session's K/V down: `Capabilities.suspends` and `carries_kv` say whether its replica does.

    `session` is the name that prompts came under, `salt` their cache salt. What the session's state or the replica's
    does not allow is a RequestRefused with its code: not_found, session_busy, other_model, kv_file_refused,
    storage_full, unsupported. The session is then as it was.
    """

    async def suspend(self, session: str, salt: str) -> dict[str, Any]:
        """Off the device -> tokens, blocks, bytes, tier. Its next turn goes on as if it had not been."""
        ...

    async def resume(self, session: str, salt: str) -> dict[str, Any]:
        """To where its next turn takes it from -> tokens, and its blocks by tier."""
        ...

    def kv_out(self, session: str, salt: str) -> AsyncGenerator[bytes, None]:
        """As a file, piece by piece; it stays where it is."""
        ...

    async def kv_in(self, session: str, salt: str, file: AsyncGenerator[bytes, None]) -> dict[str, Any]:
        """Take over what another replica's `kv_out` told -> tokens, blocks, bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Kept:
    """A session's cache at a replica, under the name that its prompts came by. `bytes`: of its blocks on the device,
    also of those that other sessions share."""

    session: str
    bytes: int


@runtime_checkable
class TellsKept(Protocol):
    """An engine that tells how much it keeps of each session."""

    async def kept(self) -> list[Kept] | None:
        """The least recently used first. None: this replica does not tell bytes."""
        ...


class EngineError(Exception):
    """Something about a replica or a request to it. `retryable`: another replica may be asked."""

    retryable = False

    def __init__(self, message: str, *, replica: str = "") -> None:
        super().__init__(message)
        self.replica = replica


class EngineUnreachable(EngineError):
    retryable = True


class EngineTimeout(EngineError):
    retryable = True

    def __init__(
        self, message: str, *, stage: Literal["connect", "first_delta", "idle", "total"], replica: str = ""
    ) -> None:
        super().__init__(message, replica=replica)
        self.stage = stage
        self.retryable = stage in ("connect", "first_delta")


class EngineOverloaded(EngineError):
    retryable = True

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, limited: bool = False, replica: str = ""
    ) -> None:
        """`limited`: by a rate limit (429); otherwise its queue is full."""
        super().__init__(message, replica=replica)
        self.retry_after_s = retry_after_s
        self.limited = limited


class EngineLost(EngineError):
    """The stream ended without a finish after at least one delta."""


class EngineBroken(EngineError):
    retryable = True


class UnknownBase(EngineError):
    """`length` ids of a base were named that are no mark of the session; the same request without a base will do."""

    def __init__(self, message: str, *, length: int | None = None, replica: str = "") -> None:
        super().__init__(message, replica=replica)
        self.length = length


class RequestRefused(EngineError):
    def __init__(
        self, message: str, *, code: str = "invalid_request", param: str | None = None, replica: str = ""
    ) -> None:
        super().__init__(message, replica=replica)
        self.code = code
        self.param = param


class ContextOverflow(RequestRefused):
    def __init__(self, message: str, *, limit: int | None, requested: int | None, replica: str = "") -> None:
        super().__init__(message, code="context_length_exceeded", replica=replica)
        self.limit = limit
        self.requested = requested


class Unsupported(RequestRefused):
    def __init__(self, message: str, *, param: str, replica: str = "") -> None:
        super().__init__(message, code="unsupported_parameter", param=param, replica=replica)
