"""Any OpenAI-compatible endpoint, by messages: LM Studio, Ollama, hosted services, any other with a chat endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import orjson

from engines.contract import (
    Capabilities,
    ChatPrompt,
    Delta,
    EngineBroken,
    EngineLoad,
    EngineUnreachable,
    GenerateRequest,
    RequestRefused,
    Unsupported,
)
from engines.remote.answer import AnswerStream, chunk_deltas
from engines.remote.dialects import LLAMACPP_CHAT, OPENAI, Dialect, chat_body, recognise
from engines.remote.forward import forward, forward_stream
from engines.remote.http import Reply, Upstream
from engines.remote.metrics import Metrics
from engines.remote.probing import Routes
from engines.remote.replies import cards_of, json_of, natural, spoken, token_ids

TURNKEEP = "turnkeep"  # who owns the models of a gateway: two that name each other would send a turn round for ever
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
        self._routes = Routes(upstream, prefix=prefix)
        self._running = 0  # our own requests, where it does not say how busy it is

    @property
    def name(self) -> str:
        return self._upstream.name

    @spoken
    async def capabilities(self) -> Capabilities:
        reply = await self._upstream.get(f"{self._prefix}/models")
        cards = _cards(reply, self.name)
        if any(card.get("owned_by") == TURNKEEP for card in cards):
            message = f"{self.name} is a Turnkeep gateway, or its engine asked for chat: name the replicas themselves"
            raise EngineBroken(message, replica=self.name)
        dialect = self._dialect = self._dialect or recognise(cards)
        window = await self._window(cards, dialect)
        unseen = ["tokenizer", "tool_parser", "reasoning_parser", "images", "epoch", "block_size", "cache_salt"]
        unseen += ["prefix_cache", "max_running", "fingerprint"]
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
            routes=await self._routes.probe(),
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

    @spoken
    async def load(self) -> EngineLoad:
        """The server's own count where it has one, else the requests that we have running there."""
        dialect = self._dialect or OPENAI
        if dialect.metrics is not None and (metrics := await self._metrics(dialect)) is not None:
            return metrics.load(dialect.metrics)
        reply = await self._upstream.get(f"{self._prefix}/models")
        if reply.status >= 500:
            raise EngineUnreachable(f"{self.name} is not healthy (status {reply.status})", replica=self.name)
        return EngineLoad(running=self._running)

    @spoken
    async def tokenize(self, text: str, *, model: str) -> list[int] | None:
        if self._dialect is not LLAMACPP_CHAT:
            return None
        asked = {"content": text, "add_special": False, "parse_special": True}
        reply = await self._upstream.post("/tokenize", orjson.dumps(asked))
        return list(token_ids(json_of(reply, self.name)["tokens"]))

    async def forget(self, session: str, salt: str) -> None:
        """It keeps no sessions."""

    async def forward(self, route: str, fields: Mapping[str, Any], *, request_id: str, salt: str) -> dict[str, Any]:
        """It knows no salt."""
        return await forward(self._upstream, self._routes.path(route), fields, request_id)

    def forward_stream(
        self, route: str, fields: Mapping[str, Any], *, request_id: str, salt: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        return forward_stream(self._upstream, self._routes.path(route), fields, request_id)

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
                    request_id=request.request_id,
                    patient=request.priority > 0,
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
        prompt = request.prompt
        if not isinstance(prompt, ChatPrompt):
            raise Unsupported(f"{self.name} takes messages, not token ids", param="prompt", replica=self.name)
        return chat_body(request, prompt, self._dialect or OPENAI, replica=self.name)

    async def _window(self, cards: list[Mapping[str, Any]], dialect: Dialect) -> int | None:
        if dialect is LLAMACPP_CHAT:  # n_ctx_train of its model card is what was trained, not what is served
            reply = await self._upstream.get("/props")
            props = json_of(reply, self.name) if reply.status == 200 else {}
            served = (props.get("default_generation_settings") or {}).get("n_ctx") or props.get("n_ctx")
            return natural(served) or None
        return min(
            (found for card in cards for name in _WINDOW_FIELDS if (found := natural(card.get(name)))), default=None
        )

    async def _metrics(self, dialect: Dialect) -> Metrics | None:
        if dialect.metrics is None:
            return None
        reply = await self._upstream.get("/metrics")
        return Metrics(reply.body.decode("utf-8", "replace")) if reply.status == 200 else None


def _cards(reply: Reply, name: str) -> list[Mapping[str, Any]]:
    """The model cards; none where the endpoint has no such list."""
    if reply.status in (404, 405):
        return []
    return cards_of(json_of(reply, name))
