"""The bodies of `/v1/messages` as Anthropic describes them, checked strictly, and the shapes of their answers.

Fields that are not known are left alone; `asked` refuses by name what cannot be done.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.api.schemas import Object, Probability, StopString, Tokens


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class MessageParam(Open):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Object], Field(max_length=10_000)]


class ToolParam(Open):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = Field(None, max_length=16_384)
    input_schema: Object


class ToolChoice(Open):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(max_length=64)] | None = None
    disable_parallel_tool_use: bool | None = None


class JsonFormat(Open):
    model_config = ConfigDict(extra="allow", populate_by_name=True)
    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")


class OutputConfig(Open):
    effort: Literal["low", "medium", "high", "xhigh"] | None = None
    format: JsonFormat | None = None


class MessageMetadata(Open):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class Thinking(Open):
    type: Literal["disabled", "adaptive"] = Field(
        description="Whether the model thinks is its own matter and its template's: a budget cannot be held."
    )


class CountBody(Open):
    """`POST /v1/messages/count_tokens`."""

    model: str = Field(min_length=1, max_length=256)
    messages: list[MessageParam] = Field(min_length=1, max_length=10_000)
    system: str | Annotated[list[Object], Field(max_length=1000)] | None = None
    tools: Annotated[list[ToolParam], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: Tokens
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] | None = None
    temperature: Probability | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    metadata: MessageMetadata | None = None


class MessageShape(BaseModel):
    """Anthropic's message, with `turnkeep`: session, turn, mode and prefix report."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Object]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use", "refusal"]
    stop_sequence: None
    usage: Object
    turnkeep: Object


class TokensShape(BaseModel):
    input_tokens: int
