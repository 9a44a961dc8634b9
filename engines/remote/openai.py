"""Any OpenAI-compatible endpoint, by messages: SGLang, llama.cpp's server, LM Studio, Ollama, hosted services.

Most of them pass over fields they do not know. So a field goes only to a server that is known to honour it
(`DIALECTS`), and what was asked for beyond that is Unsupported, never dropped. No dialect recognised: OpenAI's own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson

from engines.contract import (
    Capabilities,
    ChatPrompt,
    Delta,
    EngineLoad,
    EngineUnreachable,
    GenerateRequest,
    RequestRefused,
    Unsupported,
)
from engines.remote.answer import AnswerStream, chunk_deltas
from engines.remote.chat import (
    ALL_SAMPLING,
    OPENAI_SAMPLING,
    chat_fields,
    chat_logprobs,
    response_format,
    sampling_fields,
)
from engines.remote.http import Reply, Upstream
from engines.remote.metrics import LLAMACPP, SGLANG, Metrics, Names
from engines.remote.replies import json_of


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one server's chat endpoint honours, as documented. `explicit`: it has sampling defaults of its own."""

    kind: str
    sampling: frozenset[str]
    explicit: bool = False
    template_options: bool = False
    max_logprobs: int = 20
    renamed: Mapping[str, str] = field(default_factory=dict)
    metrics: Names | None = None


OPENAI = Dialect("openai", OPENAI_SAMPLING)
SGLANG_CHAT = Dialect("sglang", ALL_SAMPLING, explicit=True, template_options=True, metrics=SGLANG)
LLAMACPP_CHAT = Dialect(
    "llamacpp", ALL_SAMPLING - {"stop_token_ids"}, explicit=True, template_options=True,
    renamed={"repetition_penalty": "repeat_penalty"}, metrics=LLAMACPP,
)  # fmt: skip
LM_STUDIO = Dialect(
    "openai", (OPENAI_SAMPLING - {"logprobs"}) | {"top_k", "repetition_penalty"}, explicit=True, max_logprobs=0,
    renamed={"repetition_penalty": "repeat_penalty"},
)  # fmt: skip
OLLAMA = Dialect("openai", OPENAI_SAMPLING - {"logit_bias", "logprobs"}, explicit=True, max_logprobs=0)
DIALECTS: Mapping[str, Dialect] = {  # by `owned_by` of /v1/models
    "sglang": SGLANG_CHAT,
    "llamacpp": LLAMACPP_CHAT,
    "organization_owner": LM_STUDIO,
    "library": OLLAMA,
}
_WINDOW_FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length")


class OpenAiEngine:
    """One endpoint. `prefix` is what its paths begin with, `/v1` nearly always. Owns `upstream` and closes it."""

    def __init__(self, upstream: Upstream, *, prefix: str = "/v1", dialect: Dialect | None = None) -> None:
        self._upstream = upstream
        self._prefix = prefix
        self._dialect = dialect
        self._max_tokens_field = "max_tokens"  # until it insists on max_completion_tokens
        self._stream_options = True  # until it refuses them
        self._reports_cached = False  # until it does
        self._running = 0  # our own requests, where it does not say how busy it is

    @property
    def name(self) -> str:
        return self._upstream.name

    async def capabilities(self) -> Capabilities:
        reply = await self._upstream.get(f"{self._prefix}/models")
        cards = _cards(reply, self.name)
        dialect = self._dialect = self._dialect or recognise(cards)
        window = await self._window(cards, dialect)
        unseen = ["tokenizer", "tool_parser", "reasoning_parser", "images", "epoch", "block_size"]
        unseen += [] if cards else ["models"]
        unseen += [] if window is not None else ["window"]
        unseen += [] if self._reports_cached else ["cached_tokens"]
        metrics = await self._metrics(dialect)
        unseen += metrics.unseen(dialect.metrics) if metrics and dialect.metrics else ["load"]
        return Capabilities(
            kind=dialect.kind,
            models=tuple(str(card["id"]) for card in cards),
            window=window,
            takes_chat=True,
            parses_tools=True,
            parses_reasoning=True,
            takes_images=True,
            grammars=frozenset({"json_object", "json_schema"}),
            sampling=dialect.sampling,
            max_logprobs=dialect.max_logprobs,
            reports_cached=self._reports_cached,
            unseen=tuple(unseen),
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self._running += 1
        try:
            async with aclosing(chunk_deltas(await self._open(request))) as deltas:
                async for delta in deltas:
                    if delta.usage is not None and delta.usage.cached_tokens is not None:
                        self._reports_cached = True
                    yield delta
        finally:
            self._running -= 1

    async def load(self) -> EngineLoad:
        """The server's own count where it has one, else the requests that we have running there."""
        dialect = self._dialect or OPENAI
        if dialect.metrics is not None and (metrics := await self._metrics(dialect)) is not None:
            return metrics.load(dialect.metrics)
        reply = await self._upstream.get(f"{self._prefix}/models")
        if reply.status >= 500:
            raise EngineUnreachable(f"{self.name} is not healthy (status {reply.status})", replica=self.name)
        return EngineLoad(running=self._running)

    async def tokenize(self, text: str, *, model: str) -> list[int] | None:
        if self._dialect is not LLAMACPP_CHAT:
            return None
        asked = {"content": text, "add_special": False, "parse_special": True}
        reply = await self._upstream.post("/tokenize", orjson.dumps(asked))
        return [int(token) for token in json_of(reply, self.name)["tokens"]]

    async def forget(self, session: str) -> None:
        """It keeps no sessions."""

    async def aclose(self) -> None:
        await self._upstream.aclose()

    async def _open(self, request: GenerateRequest) -> AnswerStream:
        """Asks, and once more when the endpoint wants one of two things said in another way."""
        body = self._body(request)
        while True:
            fields: dict[str, Any] = {self._max_tokens_field: request.sampling.max_tokens}
            if self._stream_options:
                fields["stream_options"] = {"include_usage": True}
            try:
                return await AnswerStream.open(
                    self._upstream,
                    f"{self._prefix}/chat/completions",
                    orjson.dumps(body | fields),
                    request,
                )
            except RequestRefused as error:
                if not self._adapt(str(error)):
                    raise

    def _adapt(self, complaint: str) -> bool:
        """Whether the complaint taught us another way to ask."""
        if "max_completion_tokens" in complaint and self._max_tokens_field == "max_tokens":
            self._max_tokens_field = "max_completion_tokens"
            return True
        if "stream_options" in complaint and self._stream_options:
            self._stream_options = False
            return True
        return False

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        prompt, sampling, dialect = request.prompt, request.sampling, self._dialect or OPENAI
        if not isinstance(prompt, ChatPrompt):
            raise Unsupported(f"{self.name} takes messages, not token ids", param="prompt", replica=self.name)
        if sampling.logprobs is not None and sampling.logprobs > dialect.max_logprobs:
            raise Unsupported(
                f"{self.name} gives at most {dialect.max_logprobs} logprobs", param="logprobs", replica=self.name
            )
        body = {"model": request.model, "stream": True, **chat_fields(prompt), **chat_logprobs(sampling)}
        body |= sampling_fields(
            sampling, dialect.sampling, replica=self.name, explicit=dialect.explicit, renamed=dialect.renamed
        )
        if prompt.template_options:
            if not dialect.template_options:
                message = f"{self.name} takes no options for its template"
                raise Unsupported(message, param="chat_template_kwargs", replica=self.name)
            body["chat_template_kwargs"] = dict(prompt.template_options)
        if sampling.grammar is not None:
            body["response_format"] = response_format(sampling.grammar, replica=self.name)
        return body

    async def _window(self, cards: list[Mapping[str, Any]], dialect: Dialect) -> int | None:
        if dialect is LLAMACPP_CHAT:  # n_ctx_train of its model card is what was trained, not what is served
            reply = await self._upstream.get("/props")
            props = json_of(reply, self.name) if reply.status == 200 else {}
            served = (props.get("default_generation_settings") or {}).get("n_ctx") or props.get("n_ctx")
            return int(served) if served else None
        found = [card[name] for card in cards for name in _WINDOW_FIELDS if isinstance(card.get(name), int)]
        return min(found) if found else None

    async def _metrics(self, dialect: Dialect) -> Metrics | None:
        if dialect.metrics is None:
            return None
        reply = await self._upstream.get("/metrics")
        return Metrics(reply.body.decode("utf-8", "replace")) if reply.status == 200 else None


def recognise(cards: Iterable[Mapping[str, Any]]) -> Dialect:
    """The dialect of the server that lists these models."""
    return next((DIALECTS[owner] for card in cards if (owner := str(card.get("owned_by"))) in DIALECTS), OPENAI)


def _cards(reply: Reply, name: str) -> list[Mapping[str, Any]]:
    """The model cards; none where the endpoint has no such list."""
    if reply.status in (404, 405):
        return []
    cards = json_of(reply, name).get("data") or []
    return [card for card in cards if isinstance(card, Mapping) and "id" in card]
