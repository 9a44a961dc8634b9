"""Bodies of the routes that belong to no session, checked strictly. Fields that are not named here are left alone:
they are not passed on, so no client reaches an engine's salts, slots, priorities or hooks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from gateway.api.schemas import Object, ResponseFormat, SamplingFields, StreamOptions

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=1_000_000)]
Text = Annotated[str, Field(min_length=1)]
MAX_PROMPTS, MAX_INPUTS, MAX_DOCUMENTS = 32, 2048, 1000
MAX_TOKENS = 1_000_000


class Stateless(BaseModel):
    model_config = ConfigDict(extra="ignore")
    model: str = Field(min_length=1, max_length=256)
    user: Annotated[str, Field(max_length=512)] | None = Field(None, description="Taken, and not passed on.")


class CompletionBody(SamplingFields, Stateless):
    """`POST /v1/completions`, as OpenAI describes it, with vLLM's fields for sampling."""

    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = Field(None, description="Default: 16.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    best_of: Annotated[int, Field(ge=1, le=16)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None


class EmbeddingsBody(Stateless):
    """`POST /v1/embeddings`, as OpenAI describes it."""

    input: (
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=65_536)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None


class RerankBody(Stateless):
    """`POST /v1/rerank`, as Jina and Cohere describe it and vLLM, SGLang and llama.cpp answer it."""

    query: Text
    documents: Annotated[list[Text | Object], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=0, le=MAX_DOCUMENTS)] | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None


class Forwarded(BaseModel):
    """The engine's reply, and where it came from."""

    model_config = ConfigDict(extra="allow")
    turnkeep: dict[str, JsonValue] = Field(description="`replica`, its `kind`, and `mode`: forward or ids.")
