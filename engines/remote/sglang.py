"""SGLang: token ids through its native /generate, messages through /v1/chat/completions.

Written to the protocol of SGLang 0.4.6 to 0.5.x as published in its sources. It keeps no sessions that we use: its
radix tree finds a prompt by content, under `cache_salt` (releases before that field: `extra_key`; both are sent).
/generate names no model, so a model that is not in its list is refused here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import orjson

from engines.contract import (
    Capabilities,
    Delta,
    EngineError,
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
from engines.remote.chat import ALL_SAMPLING
from engines.remote.dialects import SGLANG_CHAT, chat_body
from engines.remote.forward import forward, forward_stream
from engines.remote.http import Upstream
from engines.remote.identity import sglang_model
from engines.remote.kv_feed import FeedAddress, feed
from engines.remote.metrics import SGLANG, Metrics
from engines.remote.probing import Routes
from engines.remote.refusal import complaint_of, engine_error
from engines.remote.replies import STUMBLES, cards_of, json_of, natural, share, spoken, tokenized
from engines.remote.sglang_events import Aborted, GenerateReader

_GRAMMARS = {"json_schema": "json_schema", "regex": "regex"}
_SERVER_INFO = ("/server_info", "/get_server_info")  # newest first
_MODEL_INFO = ("/model_info", "/get_model_info")


class SglangEngine:
    """One SGLang server. Owns `upstream` and closes it."""

    def __init__(self, upstream: Upstream, *, kv: FeedAddress | None = None) -> None:
        self._upstream = upstream
        self._kv = kv
        self._routes = Routes(upstream)
        self._models: tuple[str, ...] = ()
        self._adapters: tuple[str, ...] = ()
        self._priority_sign = 0  # 0: it schedules by no priority; -1: higher runs first, its default; 1: lower does
        self._text_in_steps: bool | None = None  # --incremental-streaming-output
        self._takes_loads = True  # /v1/loads, until it answers 404

    @property
    def name(self) -> str:
        return self._upstream.name

    @spoken
    async def capabilities(self) -> Capabilities:
        cards = cards_of(json_of(await self._upstream.get("/v1/models"), self.name))
        self._models = tuple(str(card["id"]) for card in cards)
        self._adapters = tuple(str(card["id"]) for card in cards if card.get("parent"))
        server, model, metrics = await self._first(_SERVER_INFO), await self._first(_MODEL_INFO), await self._metrics()
        self._priority_sign = _priority_sign(server)
        self._text_in_steps = bool(server.get("incremental_streaming_output")) if server else None
        window = natural(server.get("context_length")) or next(
            (length for card in cards if (length := natural(card.get("max_model_len")))), None
        )
        page_size, max_running = natural(server.get("page_size")) or None, natural(server.get("max_running_requests"))
        epoch = metrics.epoch(SGLANG) if metrics else None
        images = model.get("has_image_understanding")
        fingerprint = sglang_model(server, model)
        found = {
            "fingerprint": fingerprint,
            "window": window,
            "epoch": epoch,
            "block_size": page_size,
            "max_running": max_running,
            "server_info": server or None,
            "images": images,
            "metrics": metrics,
        }
        unseen = ["tokenizer", *(name for name, value in found.items() if value is None)]
        unseen += metrics.unseen(SGLANG) if metrics and not self._takes_loads else ()
        unseen += ["kv_events"] if self._kv is None else []
        return Capabilities(
            kind="sglang",
            models=self._models,
            window=window,
            takes_ids=model.get("is_generation", True) is not False,
            takes_salt=True,
            takes_chat=True,
            parses_tools=bool(server.get("tool_call_parser")) if server else True,
            parses_reasoning=bool(server.get("reasoning_parser")) if server else True,
            takes_images=images is not False,
            grammars=frozenset({"json_object", "json_schema", "regex"}),
            sampling=ALL_SAMPLING,
            max_logprobs=20,
            returns_ids=True,
            reports_cached=True,
            block_size=page_size,
            prefills=not server.get("disable_radix_cache"),
            max_running=max_running,
            adapters=self._adapters,
            routes=await self._routes.probe(epoch),
            kv_events=self._kv is not None,
            epoch=epoch,
            fingerprints={name: fingerprint for name in self._models if fingerprint and name not in self._adapters},
            unseen=tuple(dict.fromkeys(unseen)),
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self._check_model(request.model)
        if isinstance(request.prompt, IdsPrompt):
            body = await self._ids_body(request, request.prompt)
            deltas = self._native(await self._open("/generate", body, request), request)
        else:
            body = chat_body(request, request.prompt, SGLANG_CHAT, replica=self.name)
            body |= {"max_tokens": request.sampling.max_tokens, "stream_options": {"include_usage": True}}
            deltas = chunk_deltas(await self._open("/v1/chat/completions", body | self._shared(request), request))
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta

    def kv_feed(self) -> AsyncGenerator[FeedItem, None] | None:
        """From where the operator says that it publishes; it does not say so itself."""
        return feed(self._kv) if self._kv is not None else None

    @spoken
    async def load(self) -> EngineLoad:
        health = await self._upstream.get("/health")
        if health.status != 200:
            raise EngineUnreachable(f"{self.name} is not healthy (status {health.status})", replica=self.name)
        if self._takes_loads:
            reply = await self._upstream.get("/v1/loads?include=core")
            self._takes_loads = reply.status not in (404, 405)
            if reply.status == 200:
                return read_loads(json_of(reply, self.name))
        metrics = await self._metrics()
        return metrics.load(SGLANG) if metrics else EngineLoad()

    @spoken
    async def tokenize(self, text: str, *, model: str) -> list[int] | None:
        return await tokenized(self._upstream, text, model=model)

    async def forget(self, session: str, salt: str) -> None:
        """We keep no sessions there."""

    async def forward(self, route: str, fields: Mapping[str, Any], *, request_id: str, salt: str) -> dict[str, Any]:
        return await forward(self._upstream, self._routes.path(route), {**fields, **_salt(salt)}, request_id)

    def forward_stream(
        self, route: str, fields: Mapping[str, Any], *, request_id: str, salt: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        return forward_stream(self._upstream, self._routes.path(route), {**fields, **_salt(salt)}, request_id)

    async def aclose(self) -> None:
        await self._upstream.aclose()

    async def _native(self, stream: AnswerStream, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        reader = GenerateReader(request.sampling.stop, text_in_steps=self._text_in_steps)
        try:
            while (events := await stream.next()) is not None:
                for event in events:
                    if event.get("error"):
                        raise self._refused(stream, event)
                    if (delta := reader.read(event)) is None:
                        continue
                    stream.begun()
                    if delta.finish is not None:
                        stream.finished()
                    yield delta
                    if delta.finish is not None:
                        return
            raise stream.lost("the answer ended without a finish reason")
        except Aborted as aborted:
            complaint = {"message": str(aborted), "code": aborted.status or 503}
            raise stream.failed({"error": complaint}) from aborted
        except STUMBLES as error:
            raise stream.broken(f"an event is not of the protocol: {error!r}") from error
        finally:
            await stream.close()

    def _refused(self, stream: AnswerStream, event: dict[str, Any]) -> EngineError:
        """An error event. Without a status it says what is wrong with the request: that is how /generate refuses."""
        complaint = complaint_of(event)
        if complaint.status is None and not stream.has_begun:
            return engine_error(400, complaint, replica=self.name)
        return stream.failed(event)

    async def _open(self, path: str, body: dict[str, Any], request: GenerateRequest) -> AnswerStream:
        try:
            return await AnswerStream.open(
                self._upstream,
                path,
                orjson.dumps(body),
                request_id=request.request_id,
                patient=request.priority > 0,
            )
        except RequestRefused as error:
            if "unexpected keyword argument" in str(error):  # a field of sampling that this release does not have
                raise Unsupported(str(error), param=_quoted(str(error)), replica=self.name) from error
            raise

    async def _ids_body(self, request: GenerateRequest, prompt: IdsPrompt) -> dict[str, Any]:
        whole = prompt.delta if prompt.base is None else await prompt.whole()
        sampling = request.sampling
        body: dict[str, Any] = {
            "input_ids": memoryview(whole).cast("I").tolist(),
            "sampling_params": self._sampling(sampling),
            "stream": True,
            **self._shared(request),
        }
        if request.model in self._adapters:
            body["lora_path"] = request.model
        if sampling.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs, "return_text_in_logprobs": True}
        return body

    def _shared(self, request: GenerateRequest) -> dict[str, Any]:
        priority = {"priority": request.priority * self._priority_sign} if request.priority else {}
        return _salt(request.cache_salt) | (priority if self._priority_sign else {})

    def _sampling(self, sampling: Sampling) -> dict[str, Any]:
        """Defaults too: it would take the model's own in their place. Newer fields only where they were asked for."""
        fields: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "skip_special_tokens": True,
            "top_k": sampling.top_k or -1,
            **{
                name: getattr(sampling, name)
                for name in (
                    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
                    "ignore_eos",
                )
            },
        }  # fmt: skip
        if sampling.stop:
            fields["stop"] = list(sampling.stop)
        if sampling.stop_token_ids:
            fields["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.logit_bias:
            fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if sampling.seed is not None:
            fields["sampling_seed"] = sampling.seed
        if sampling.grammar is not None:
            fields |= self._constraint(sampling.grammar)
        return fields

    def _constraint(self, grammar: Grammar) -> dict[str, str]:
        if grammar.kind == "json_object":
            return {"json_schema": '{"type": "object"}'}
        if grammar.kind not in _GRAMMARS:
            message = f"{self.name} takes no {grammar.kind} grammar"
            raise Unsupported(message, param="response_format", replica=self.name)
        return {_GRAMMARS[grammar.kind]: grammar.text}

    def _check_model(self, model: str) -> None:
        if self._models and model not in self._models:
            message = f"{self.name} serves no model {model!r}"
            raise RequestRefused(message, code="model_not_found", param="model", replica=self.name)

    async def _first(self, paths: tuple[str, ...]) -> dict[str, Any]:
        """The answer of the first path that the release has; empty where it has none."""
        for path in paths:
            reply = await self._upstream.get(path)
            if reply.status not in (401, 403, 404, 405):
                return json_of(reply, self.name)
        return {}

    async def _metrics(self) -> Metrics | None:
        reply = await self._upstream.get("/metrics")
        return Metrics(reply.body.decode("utf-8", "replace")) if reply.status == 200 else None


def read_loads(found: Mapping[str, Any]) -> EngineLoad:
    """Of /v1/loads: the data-parallel ranks added up. A token is a block here: SGLang counts its pool in tokens."""
    ranks = [rank for rank in found.get("loads") or () if isinstance(rank, Mapping)]
    running, waiting, total, used = (
        sum(natural(rank.get(name)) or 0 for rank in ranks)
        for name in ("num_running_reqs", "num_waiting_reqs", "max_total_num_tokens", "num_used_tokens")
    )
    usage = [told for rank in ranks if (told := share(rank.get("token_usage"))) is not None]
    return EngineLoad(
        running=running,
        waiting=waiting,
        kv_used_ratio=sum(usage) / len(usage) if usage else None,
        kv_blocks_total=total or None,
        kv_blocks_used=used if total else None,
    )


def _priority_sign(server: Mapping[str, Any]) -> int:
    if not server.get("enable_priority_scheduling"):
        return 0
    return 1 if server.get("schedule_low_priority_values_first") else -1


def _salt(salt: str) -> dict[str, Any]:
    return {"cache_salt": salt, "extra_key": salt} if salt else {}


def _quoted(text: str) -> str:
    parts = text.split("'")
    return parts[1] if len(parts) > 2 else "sampling"
