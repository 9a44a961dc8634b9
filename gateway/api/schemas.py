"""The bodies that routes take, checked strictly, and the shapes they answer with, for the OpenAPI description.

OpenAI-compatible bodies accept fields they do not know; session bodies refuse them by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from gateway.policy import CacheFields, CompactionFields

Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False, description="0 is greedy.")]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Stop = StopString | Annotated[list[StopString], Field(max_length=16)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@/+=-]{1,128}$")]
Text64 = Annotated[str, Field(max_length=64)]
Text512 = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Text64, Text512], Field(max_length=16)]
Object = dict[str, JsonValue]


class FunctionSpec(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = Field(None, max_length=16_384)
    parameters: Object | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A function that the model may call (OpenAI's chat shape)."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: FunctionSpec


class JsonSchemaSpec(BaseModel):
    model_config = ConfigDict(extra="allow", populate_by_name=True)
    name: str | None = Field(None, max_length=64)
    schema_: Object = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaSpec | None = None


class NamedFunction(BaseModel):
    name: str = Field(max_length=64)


class NamedTool(BaseModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool
Tools = Annotated[list[Tool], Field(max_length=128)]


class SamplingFields(BaseModel):
    """How tokens are chosen; the ranges are OpenAI's, with vLLM's top_k, min_p and repetition_penalty."""

    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = Field(None, description="0 or -1: off.")
    min_p: Probability | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
                Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)],
            ],
            Field(max_length=1024),
        ]
        | None
    ) = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None


class ChatBody(SamplingFields):
    """`POST /v1/chat/completions`, as OpenAI describes it; fields that are not known are left alone."""

    model_config = ConfigDict(extra="allow")
    model: str = Field(min_length=1, max_length=256)
    messages: list[Object] = Field(min_length=1, max_length=10_000)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = Field(None, description="Only 1.")
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[Text64, bool | int | float | Text512 | None] | None = None
    metadata: dict[Text64, Text512] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    store: bool | None = None
    session_id: Name | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    history: Literal["auto", "off", "match", "append", "replace"] | None = Field(
        None, description="What becomes of the history; the header X-Turnkeep-History says the same."
    )
    on_disconnect: Literal["cancel", "finish"] | None = None
    cache: CacheFields | None = None


class Policy(CompactionFields):
    """What a session does by itself, where it differs from its tenant's and the gateway's settings."""

    on_disconnect: Literal["cancel", "finish"] | None = None
    max_output_tokens: Tokens | None = None
    cache: CacheFields | None = None


class SessionCreate(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: Name | None = Field(None, description="Chosen by the client, unique for the tenant; else made here.")
    model: str | None = Field(None, min_length=1, max_length=256, description="Default: the first model served.")
    title: Annotated[str, Field(max_length=256)] | None = None
    system: Annotated[str, Field(max_length=1_000_000)] | None = None
    tools: Tools | None = None
    metadata: Metadata | None = None
    policy: Policy | None = None
    user_ref: Annotated[str, Field(max_length=256)] | None = None
    ttl_seconds: Annotated[int, Field(ge=1, le=10 * 365 * 86_400)] | None = None


class SessionPatch(BaseModel):
    """Fields that are named change; `null` clears what can be empty."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = Field(None, min_length=1, max_length=256)
    title: Annotated[str, Field(max_length=256)] | None = None
    system: Annotated[str, Field(max_length=1_000_000)] | None = None
    tools: Tools | None = None
    metadata: Metadata | None = None
    policy: Policy | None = None
    ttl_seconds: Annotated[int, Field(ge=1, le=10 * 365 * 86_400)] | None = None


InputList = Annotated[list[Object], Field(min_length=1, max_length=1000)]


class AnswerFields(SamplingFields):
    """What shapes the answer of a session's turn."""

    max_output_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[Text64, bool | int | float | Text512 | None] | None = None
    stream: bool | None = None
    on_disconnect: Literal["cancel", "finish"] | None = None
    cache: CacheFields | None = Field(None, description="For this turn; else the session's policy.")


class TurnCreate(AnswerFields):
    """The new message, or items: messages, parallel tool outputs, and ephemeral ones that are sent but not kept."""

    model_config = ConfigDict(extra="forbid")
    input: str | InputList = Field(
        description='A user message, or items. An item with `"ephemeral": true` is sent with this turn and not kept.'
    )
    instructions: Annotated[str, Field(max_length=1_000_000)] | None = Field(None, description="For this turn only.")
    parent_turn_id: Annotated[str, Field(max_length=128)] | None = Field(
        None, description="Go on from this turn instead of the last one: a branch."
    )


class Regenerate(AnswerFields):
    model_config = ConfigDict(extra="forbid")
    instructions: Annotated[str, Field(max_length=1_000_000)] | None = None


class Edit(TurnCreate):
    """The turn's input in its new form; the old turn stays as a branch."""

    parent_turn_id: None = None


class Count(BaseModel):
    model_config = ConfigDict(extra="forbid")
    input: str | InputList
    instructions: Annotated[str, Field(max_length=1_000_000)] | None = None


class Compact(BaseModel):
    model_config = ConfigDict(extra="forbid")
    dry_run: bool | None = Field(None, description="Only plan: nothing is changed and no model is asked.")
    strategy: Literal["summarize", "extract", "trim"] | None = Field(
        None, description="For this time; else the session's own."
    )


class ErrorBody(BaseModel):
    type: str = Field(description="invalid_request_error, authentication_error, …")
    code: str = Field(description="Stable string to match on; OpenAI's where there is one.")
    message: str
    param: str | None = Field(None, description="Path of the field that is wrong.")
    request_id: str = Field(description="Also in the header x-request-id.")
    details: dict[str, Any] | None = Field(None, description="Numbers, e.g. limit and requested.")


class ErrorAnswer(BaseModel):
    error: ErrorBody


class SessionShape(BaseModel):
    id: str
    object: Literal["session"]
    title: str | None
    model: str
    system: str | None
    tools: list[Object]
    metadata: dict[str, str]
    policy: Object
    user_ref: str | None
    status: Literal["idle", "running"]
    head_turn_id: str | None
    turns: int = Field(description="Turns ever begun, branches included.")
    version: int = Field(description="Grows with every PATCH; the ETag.")
    created_at: float = Field(description="Seconds since 1970.")
    updated_at: float
    expires_at: float | None
    archived_at: float | None


class ImportShape(SessionShape):
    imported: dict[str, int] = Field(
        description="turns; compactions_left_out: a file's summaries are not taken over, but made anew when needed."
    )


class SessionList(BaseModel):
    object: Literal["list"]
    data: list[SessionShape]
    has_more: bool
    next_cursor: str | None


class TurnShape(BaseModel):
    id: str
    object: Literal["turn"]
    session_id: str
    parent_id: str | None
    seq: int = Field(description="Order of begin in the session, from 1.")
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    input: list[Object]
    output: list[Object]
    finish_reason: str | None
    usage: Object = Field(
        description="prompt_tokens, output_tokens, cached_tokens (null: the engine does not say), "
        "prefix_bits: the fewest bits of K/V that the answer rests on, 16 for full ones, where the engine tells."
    )
    placement: Object = Field(description="replica, reason, expected_cached_tokens.")
    prefix_report: Object = Field(description="How much of the path before was reused; the first token that differs.")
    pinned: bool = Field(description="It stays as it is, whatever is compacted.")
    metadata: Object
    error: Object | None
    created_at: float
    completed_at: float | None


class CompactionShape(BaseModel):
    """`id` and what follows it are absent where nothing was written: a dry run (planned), or nothing to gain."""

    object: Literal["compaction"]
    session_id: str
    status: Literal["planned", "running", "committed", "failed", "skipped", "reverted"]
    plan: Object = Field(
        description="Way, ranges of turns with their budgets, merges, cuts, tokens before and after, and the priced "
        "options; or the reason why there is none, with the numbers."
    )
    reason: str | None = Field(
        None,
        description="Why nothing was done. Of a plan: off, nothing, gain, floor. Else no_turns, running (at another "
        "gateway), changed (pins and reverts keep coming).",
    )
    message: str | None = Field(None, description="That in words, where `plan` has no numbers.")
    id: str | None = None
    number: int | None = Field(None, description="Order of begin in the session, from 1.")
    trigger: Literal["background", "foreground", "manual"] | None = None
    base_id: str | None = Field(None, description="The compaction whose view this one goes on from.")
    head_turn_id: str | None = Field(None, description="The session's head when it was planned.")
    anchor_turn_id: str | None = Field(None, description="The latest turn it touches: paths that hold it are seen so.")
    segments: list[Object] | None = Field(
        None, description="Summaries in the order of their turns: text, tokens, rank, source, turns, ledger."
    )
    elisions: list[Object] | None = Field(None, description="Parts that were cut out, and what stands there.")
    report: Object | None = Field(
        None, description="Tokens before and after, prefilled tokens, summariser, sources, problems, duration."
    )
    error: Object | None = None
    created_at: float | None = None
    completed_at: float | None = None


class CompactionList(BaseModel):
    object: Literal["list"]
    data: list[CompactionShape]
    has_more: bool


class TurnList(BaseModel):
    object: Literal["list"]
    data: list[TurnShape]
    has_more: bool


class PlaceShape(BaseModel):
    """What became of a place that may have held something: a replica, a gateway's memory, the database's own files."""

    state: Literal["pending", "answered", "cannot", "gone"] = Field(
        description="pending: not yet, it is asked until it answers. cannot: it keeps nothing by a session's name, and "
        "what it cached goes when others take its place. gone: it was removed, or not seen for long."
    )
    sessions: int = Field(0, description="Sessions that it has forgotten.")
    gone: dict[str, int] = Field({}, description="KV blocks that went, by tier: device, host, disk, remote.")
    left: int = Field(0, description="While pending: sessions that it has still to forget.")
    tries: int = 0
    error: str | None = Field(None, description="What the last try met.")


class ErasureShape(BaseModel):
    """A receipt: what was erased and where, never a word of what it said."""

    object: Literal["erasure"]
    id: str
    scope: Literal["session", "expired", "user"]
    session_id: str | None = Field(description="Of one session's.")
    user_digest: str | None = Field(description="Of an end user's: a keyed digest in place of the name.")
    status: Literal["erasing", "pending", "done"] = Field(
        description="erasing: rows may be left. pending: some place has still to forget. done: nothing is left."
    )
    sessions: int
    erased: dict[str, int] = Field(description="Rows that went, by table.")
    places: dict[str, PlaceShape]
    at: float
    completed_at: float | None


class ErasureList(BaseModel):
    object: Literal["list"]
    data: list[ErasureShape]
    has_more: bool
    next_cursor: str | None


class ErasureAsked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    user: Annotated[str, Field(min_length=1, max_length=256, description="As sessions have it in `user_ref`.")]


class ReceiptShape(BaseModel):
    object: Literal["session.deleted"]
    id: str
    deleted: Literal[True]
    erasure: str = Field(description="Of its receipt: `GET /v1/erasures/{erasure_id}`.")
    status: Literal["pending", "done"]
    erased: dict[str, int] = Field(description="Rows that went, by table.")
    places: dict[str, PlaceShape]
    at: float
    completed_at: float | None


class SuspendedShape(BaseModel):
    """Where a session's KV lies. `tier`, `blocks` and `bytes` after suspend; blocks by tier after resume."""

    id: str
    replica: str
    tokens: int
    tier: Literal["host", "disk"] | None = None
    blocks: int | None = None
    bytes: int | None = None
    device: int | None = None
    host: int | None = None
    disk: int | None = None


class ContextPart(BaseModel):
    part: str = Field(description="system, tools, history, input, template.")
    tokens: int


class ContextShape(BaseModel):
    """Exactly what would be sent, from the function that sends it."""

    object: Literal["session.context"]
    mode: Literal["ids", "chat"]
    model: str
    messages: list[Object]
    prompt_tokens: int = Field(
        description="Without a turn: system prompt, tools and what the template puts around a first message."
    )
    window: int | None
    used_ratio: float | None
    headroom_tokens: int | None
    trigger_ratio: float
    past_trigger: bool
    cacheable_tokens: int = Field(description="Tokens that the replica has read before under this session.")
    prompt_sha256: str | None = Field(description="Over the ids, u32 little-endian.")
    parts: list[ContextPart]
    policy: Object = Field(description="The compaction policy that holds for the session.")
    compaction_id: str | None = Field(description="The compaction through which the path is seen.")
    segments: list[Object] = Field(
        description="Summaries that are sent, each with its ledger, the seqs of its turns, and of those it tells of "
        "that are sent whole all the same, pinned since (turns_beside)."
    )
    elisions: list[Object] = Field(description="Parts of kept turns that were cut out, and what stands there.")
    pinned: list[int] = Field(description="Seqs of the path's pinned turns.")
    prefix_report: Object
    pin: str | None = Field(description="The replica that ran the last turn.")
    prefix_bits: int | None = Field(
        description="The fewest bits of K/V that the last answer rested on; null where its replica does not tell."
    )


class CountShape(BaseModel):
    object: Literal["input_tokens"]
    input_tokens: int
    window: int | None
    exact: bool = Field(description="False: the replica goes by chat messages, and may read other tokens.")
    counted_by: str = Field(description="The model's own template, OpenAI's encoding, or an estimate with its margin.")


class ModelShape(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelShape]


class ChatAnswer(BaseModel):
    """OpenAI's chat.completion, with `turnkeep`: session, turn, mode and prefix report."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Object]
    usage: Object
    turnkeep: Object
