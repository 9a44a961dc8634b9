"""The bodies of `/v1/responses` and `/v1/conversations`, checked strictly, and the shapes of their answers.

As OpenAI's other routes they accept fields that they do not know; `asked` refuses by name what cannot be done.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.api.schemas import Metadata, Object, SamplingFields, Text64, Text512, Tokens
from gateway.policy import CacheFields

Instructions = Annotated[str, Field(max_length=1_000_000)]
ResponseId = Annotated[str, Field(min_length=1, max_length=256)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_ITEMS = 20  # that a conversation takes at once, as OpenAI's do


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class FunctionTool(Open):
    """A function that the model may call (the Responses API's flat shape)."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = Field(None, max_length=16_384)
    parameters: Object | None = None
    strict: bool | None = None


class NamedFunction(Open):
    type: Literal["function"]
    name: str = Field(max_length=64)


class AllowedTools(Open):
    """Only these of the tools, and whether one must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1, max_length=128)


class TextFormat(Open):
    type: Literal["text", "json_object"]


class JsonSchemaFormat(Open):
    model_config = ConfigDict(extra="allow", populate_by_name=True)
    type: Literal["json_schema"]
    name: str = Field(max_length=64)
    schema_: Object = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextAsked(Open):
    format: TextFormat | JsonSchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Only medium.")


class ReasoningAsked(Open):
    effort: Effort | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = Field(
        None, description="Reasoning of earlier turns. auto: as the session's policy has it."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Only auto: reasoning is shown whole, in `content`."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ContextManagement(Open):
    type: Literal["compaction"]
    compact_threshold: Annotated[int, Field(ge=1, le=10_000_000)] | None = Field(
        None, description="Tokens of the conversation past which its old turns are summarised, after the response."
    )


class ConversationRef(Open):
    id: Annotated[str, Field(min_length=1, max_length=128)]


class StreamOptions(Open):
    include_obfuscation: bool | None = Field(None, description="Only false.")


class ContextFields(Open):
    """What comes before the answer: the same for an answer and for its count."""

    model: str | None = Field(None, min_length=1, max_length=256, description="Default: the conversation's own.")
    input: str | Annotated[list[Object], Field(min_length=1, max_length=10_000)] | None = None
    instructions: Instructions | None = Field(None, description="For this response only; not carried over.")
    previous_response_id: ResponseId | None = Field(None, description="Go on from that response; a branch if need be.")
    conversation: Annotated[str, Field(min_length=1, max_length=128)] | ConversationRef | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningAsked | None = None
    text: TextAsked | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description="auto: where the window is full, old turns are left out. disabled: 400. Default: the policy's.",
    )
    chat_template_kwargs: dict[Text64, bool | int | float | Text512 | None] | None = None
    cache: CacheFields | None = Field(None, description="For this response; else the session's policy.")


class ResponseCreate(SamplingFields, ContextFields):
    """`POST /v1/responses`, as OpenAI describes it, with the sampling fields of chat completions."""

    store: bool | None = Field(None, description="false: nothing of it is kept.")
    background: bool | None = Field(None, description="Answer at once; ask for the response later.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    context_management: Annotated[list[ContextManagement], Field(max_length=1)] | None = None
    max_output_tokens: Tokens | None = None
    metadata: Metadata | None = None
    include: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=16)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    safety_identifier: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    on_disconnect: Literal["cancel", "finish"] | None = None


class InputTokens(ContextFields):
    """`POST /v1/responses/input_tokens`."""


class CompactWindow(Open):
    """`POST /v1/responses/compact`."""

    model: str | None = Field(None, min_length=1, max_length=256)
    input: str | Annotated[list[Object], Field(min_length=1, max_length=10_000)] | None = None
    instructions: Instructions | None = Field(None, description="Not summarised: send it again.")
    previous_response_id: ResponseId | None = None


Items = Annotated[list[Object], Field(max_length=MAX_ITEMS)]


class ConversationCreate(Open):
    items: Items | None = None
    metadata: Metadata | None = None


class ConversationUpdate(Open):
    metadata: Metadata | None


class ItemsCreate(Open):
    items: Annotated[list[Object], Field(min_length=1, max_length=MAX_ITEMS)]


class ResponseShape(BaseModel):
    """OpenAI's response, with `turnkeep`: session, turn, mode and prefix report."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "failed", "in_progress", "cancelled", "incomplete"]
    completed_at: int | None
    error: Object | None
    incomplete_details: Object | None
    model: str
    output: list[Object]
    usage: Object | None
    conversation: Object | None
    previous_response_id: str | None
    instructions: str | None
    metadata: dict[str, str]
    store: bool
    turnkeep: Object


class DeletedShape(BaseModel):
    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: Literal[True]
    erased: dict[str, int] = Field(description="Rows that went, by table.")
    erasure: str | None = Field(None, description="Of a conversation's receipt: `GET /v1/erasures/{erasure_id}`.")
    status: Literal["pending", "done"] | None = Field(None, description="pending: a replica has still to forget it.")


class InputTokensShape(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int
    window: int | None
    exact: bool = Field(description="False: the replica goes by chat messages, and may read other tokens.")
    counted_by: str


class CompactedShape(BaseModel):
    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Object] = Field(description="The user's messages, then one compaction item: the next input.")
    usage: Object


class ConversationShape(BaseModel):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ItemList(BaseModel):
    object: Literal["list"]
    data: list[Object]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ItemShape(BaseModel):
    id: str
    type: Literal["message", "function_call", "function_call_output", "reasoning"]


AnyObject = dict[str, Any]
