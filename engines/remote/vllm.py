"""vLLM: token ids through /v1/completions, messages through /v1/chat/completions.

Written to the protocol of vLLM 0.6 to 0.2x as published in its sources; what a release does not have is found out from
its own OpenAPI page and named in `Capabilities.unseen`. vLLM keeps no sessions: each prompt goes whole, and its prefix
cache finds it by content, under `cache_salt`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import orjson

from engines.contract import (
    ROUTES,
    Capabilities,
    Delta,
    EngineLoad,
    EngineUnreachable,
    GenerateRequest,
    Grammar,
    IdsPrompt,
    RequestRefused,
    Sampling,
    Unsupported,
)
from engines.kv_events import FeedItem
from engines.remote.answer import AnswerStream, chunk_deltas
from engines.remote.chat import ALL_SAMPLING, chat_fields, chat_logprobs, response_format, sampling_fields
from engines.remote.forward import forward, forward_stream
from engines.remote.http import Upstream
from engines.remote.kv_feed import FeedAddress, feed
from engines.remote.metrics import VLLM, Metrics
from engines.remote.replies import cards_of, check, json_of, natural, spoken, tokenized

MAX_LOGPROBS = 20  # vLLM's --max-logprobs default
_TOP_K_OFF = -1  # every release reads -1 as off; 0 only newer ones


class VllmEngine:
    """One vLLM server. Owns `upstream` and closes it."""

    def __init__(self, upstream: Upstream, *, kv: FeedAddress | None = None) -> None:
        self._upstream = upstream
        self._kv = kv
        self._takes_priority = True  # until it refuses one: only with --scheduling-policy priority
        self._reports_cached = False  # until it does: only with --enable-prompt-tokens-details
        self._fields: Mapping[str, Any] | None = None  # of CompletionRequest, from its OpenAPI page
        self._paths: frozenset[str] = frozenset()  # those of ROUTES that the page has
        self._version: str | None = None

    @property
    def name(self) -> str:
        return self._upstream.name

    @spoken
    async def capabilities(self) -> Capabilities:
        cards = cards_of(json_of(await self._upstream.get("/v1/models"), self.name))
        unseen = ["tokenizer", "fingerprint", "tool_parser", "reasoning_parser", "images", "max_running"]
        fields = await self._request_fields()
        if fields is None:
            unseen.append("request_fields")
        metrics = await self._metrics()
        unseen += metrics.unseen(VLLM) if metrics else ["metrics"]
        window = next((length for card in cards if (length := natural(card.get("max_model_len")))), None)
        block_size = metrics.label(VLLM.config, "block_size") if metrics else None
        epoch = metrics.epoch(VLLM) if metrics else None
        salted = fields is None or "cache_salt" in fields
        found = {"window": window, "block_size": block_size, "epoch": epoch, "cache_salt": salted or None}
        unseen += [name for name, value in found.items() if value is None]
        if not self._reports_cached:
            unseen.append("cached_tokens")
        if self._kv is None:
            unseen.append("kv_events")
        return Capabilities(
            kind="vllm",
            models=tuple(str(card["id"]) for card in cards),
            window=window,
            takes_ids=True,
            takes_salt=salted,
            takes_chat=True,
            parses_tools=True,
            parses_reasoning=True,
            takes_images=True,
            grammars=frozenset({"json_object", "json_schema"} | ({"regex"} if self._regex_field else set())),
            sampling=ALL_SAMPLING if fields is None else ALL_SAMPLING & fields.keys(),
            max_logprobs=MAX_LOGPROBS,
            returns_ids=fields is None or "return_token_ids" in fields,
            reports_cached=self._reports_cached,
            block_size=block_size,
            prefills=metrics is None or metrics.text(VLLM.config, "enable_prefix_caching") != "False",
            adapters=tuple(str(card["id"]) for card in cards if card.get("parent")),
            routes=self._paths,
            kv_events=self._kv is not None,
            epoch=epoch,
            unseen=tuple(unseen),
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        async with aclosing(chunk_deltas(await self._open(request))) as deltas:
            async for delta in deltas:
                if delta.usage is not None and delta.usage.cached_tokens is not None:
                    self._reports_cached = True
                yield delta

    def kv_feed(self) -> AsyncGenerator[FeedItem, None] | None:
        """From where the operator says that it publishes; it does not say so itself."""
        return feed(self._kv) if self._kv is not None else None

    @spoken
    async def load(self) -> EngineLoad:
        health = await self._upstream.get("/health")
        if health.status != 200:
            raise EngineUnreachable(f"{self.name} is not healthy (status {health.status})", replica=self.name)
        metrics = await self._metrics()
        return metrics.load(VLLM) if metrics else EngineLoad()

    @spoken
    async def tokenize(self, text: str, *, model: str) -> list[int] | None:
        return await tokenized(self._upstream, text, model=model)

    async def forget(self, session: str, salt: str) -> None:
        """vLLM keeps no sessions."""

    async def forward(self, route: str, fields: Mapping[str, Any], *, request_id: str, salt: str) -> dict[str, Any]:
        return await forward(self._upstream, route, {**fields, **_salt(salt)}, request_id)

    def forward_stream(
        self, route: str, fields: Mapping[str, Any], *, request_id: str, salt: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        return forward_stream(self._upstream, route, {**fields, **_salt(salt)}, request_id)

    async def aclose(self) -> None:
        await self._upstream.aclose()

    async def _open(self, request: GenerateRequest) -> AnswerStream:
        path, body = await self._body(request)
        if request.priority and self._takes_priority:
            try:
                return await self._send(path, body | {"priority": request.priority}, request)
            except RequestRefused as error:
                if "priority" not in str(error).lower():
                    raise
                self._takes_priority = False  # it serves in order of arrival; the request itself is the same
        return await self._send(path, body, request)

    async def _send(self, path: str, body: Mapping[str, Any], request: GenerateRequest) -> AnswerStream:
        try:
            return await AnswerStream.open(
                self._upstream,
                path,
                orjson.dumps(body),
                request_id=request.request_id,
                patient=request.priority > 0,
            )
        except RequestRefused as error:
            if "tool-call-parser" in str(error):
                raise Unsupported(str(error), param="tools", replica=self.name) from error
            raise

    async def _body(self, request: GenerateRequest) -> tuple[str, dict[str, Any]]:
        prompt, sampling = request.prompt, request.sampling
        fields = sampling_fields(sampling, ALL_SAMPLING, replica=self.name, explicit=True)
        fields["top_k"] = sampling.top_k or _TOP_K_OFF
        body: dict[str, Any] = {
            "model": request.model,
            "max_tokens": sampling.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "skip_special_tokens": True,  # text is content; `token_ids` has every id
            **fields,
        }
        body |= _salt(request.cache_salt)
        if sampling.grammar is not None:
            body |= self._constraint(sampling.grammar)
        if isinstance(prompt, IdsPrompt):
            whole = prompt.delta if prompt.base is None else await prompt.whole()
            body["prompt"] = memoryview(whole).cast("I").tolist()
            return "/v1/completions", body | _completion_logprobs(sampling)
        body |= chat_fields(prompt)
        if prompt.template_options:
            body["chat_template_kwargs"] = dict(prompt.template_options)
        return "/v1/chat/completions", body | chat_logprobs(sampling)

    def _constraint(self, grammar: Grammar) -> dict[str, Any]:
        if grammar.kind == "regex" and self._regex_field == "structured_outputs":
            return {"structured_outputs": {"regex": grammar.text}}
        if grammar.kind == "regex" and self._regex_field == "guided_regex":
            return {"guided_regex": grammar.text}
        return {"response_format": response_format(grammar, replica=self.name)}

    @property
    def _regex_field(self) -> str | None:
        fields = self._fields or {}
        return next((name for name in ("structured_outputs", "guided_regex") if name in fields), None)

    async def _request_fields(self) -> Mapping[str, Any] | None:
        """The fields of its completion request. Read again only when the version changed: the page is long."""
        reply = await self._upstream.get("/version")
        version = str(json_of(reply, self.name).get("version")) if reply.status == 200 else None
        if self._fields is None or version is None or version != self._version:
            page = await self._upstream.get("/openapi.json")
            found = json_of(page, self.name) if page.status == 200 else {}
            schemas = found.get("components", {}).get("schemas", {})
            self._fields = schemas.get("CompletionRequest", {}).get("properties") or None
            self._paths = frozenset(found.get("paths", {})) & frozenset(ROUTES)
            self._version = version
        return self._fields

    async def _metrics(self) -> Metrics | None:
        reply = await self._upstream.get("/metrics")
        if reply.status in (404, 405):
            return None
        check(reply, self.name)
        return Metrics(reply.body.decode("utf-8", "replace"))


def _salt(salt: str) -> dict[str, str]:
    return {"cache_salt": salt} if salt else {}


def _completion_logprobs(sampling: Sampling) -> dict[str, Any]:
    return {} if sampling.logprobs is None else {"logprobs": sampling.logprobs}
