"""llama.cpp's server: token ids through its native /completion, messages through /v1/chat/completions.

Written to the protocol as published and as build 11549 was seen to speak it. It keeps no sessions and knows no salt:
a slot reuses what its last prompt has in common with the next, so `slots` says which slot a request may use. It
answers whatever model a request names, so a model that is not in its list is refused here. Which of its tokens are
ends of a turn its file says; other stop ids, and stop strings, end the answer on this side.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

import orjson

from engines.contract import (
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
from engines.remote.answer import AnswerStream, chunk_deltas
from engines.remote.chat import ALL_SAMPLING
from engines.remote.dialects import LLAMACPP_CHAT, chat_body
from engines.remote.forward import forward, forward_stream
from engines.remote.http import Upstream
from engines.remote.identity import llamacpp_model
from engines.remote.llamacpp_events import CompletionReader
from engines.remote.metrics import LLAMACPP, Metrics
from engines.remote.probing import Routes
from engines.remote.replies import STUMBLES, cards_of, check, json_of, list_of, natural, spoken, token_ids
from engines.remote.slots import SlotTable

if TYPE_CHECKING:
    from collections.abc import Iterator

FIXED_MARKER = "<__media__>"  # of releases whose marker is the same in every process
MAX_SEED = 2**32 - 1  # which it takes for "any"
MAX_SLOTS = 4096  # the first ones of a server that says more
MAX_CHARACTERS = 4096  # whose ids are remembered


class LlamaCppEngine:
    """One llama.cpp server. Owns `upstream` and closes it."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._routes = Routes(upstream)
        self._models: frozenset[str] = frozenset()
        self._slots: SlotTable | None = None
        self._epoch: str | None = None
        self._window: int | None = None
        self._lists_slots = True  # until it refuses: --no-slots
        self._characters: dict[tuple[str, int], tuple[int, ...]] = {}  # (text, number of ids) -> ids

    @property
    def name(self) -> str:
        return self._upstream.name

    @spoken
    async def capabilities(self) -> Capabilities:
        cards = cards_of(json_of(await self._upstream.get("/v1/models"), self.name))
        self._models = frozenset(str(name) for card in cards for name in (card["id"], *(card.get("aliases") or ())))
        props = await self._learn()
        served = (props.get("default_generation_settings") or {}).get("n_ctx") or props.get("n_ctx")
        self._window = natural(served) or None
        images = (props.get("modalities") or {}).get("vision")
        metrics = await self._metrics()
        named = {str(card["id"]): llamacpp_model(card, props.get("chat_template")) for card in cards}
        found = {
            "fingerprint": next(iter(named.values()), None),
            "window": self._window,
            "epoch": self._epoch,
            "max_running": natural(props.get("total_slots")),
            "images": images,
            "metrics": metrics,
            "slot_list": self._lists_slots or None,
        }
        tools = (props.get("chat_template_caps") or {}).get("supports_tools")
        unseen = ["tokenizer", "cache_salt", "reasoning_parser", "block_size"]
        unseen += [name for name, value in found.items() if value is None]
        unseen += metrics.unseen(LLAMACPP) if metrics else ()
        return Capabilities(
            kind="llamacpp",
            models=tuple(str(card["id"]) for card in cards),
            window=self._window,
            takes_ids=True,
            takes_chat=True,
            parses_tools=tools is not False,
            parses_reasoning=True,
            takes_images=images is not False,
            grammars=frozenset({"json_object", "json_schema"}),
            sampling=ALL_SAMPLING,
            max_logprobs=20,
            returns_ids=True,
            reports_cached=True,
            block_size=None,
            prefills=True,
            max_running=natural(props.get("total_slots")),
            routes=await self._routes.probe(self._epoch),
            epoch=self._epoch,
            fingerprints={name: told for name, told in named.items() if told is not None},
            unseen=tuple(unseen),
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        if self._models and request.model not in self._models:
            message = f"{self.name} serves no model {request.model!r}"
            raise RequestRefused(message, code="model_not_found", param="model", replica=self.name)
        prompt = request.prompt
        with self._seat(request.cache_salt, session_of(request)) as seat:
            if isinstance(prompt, IdsPrompt):
                body = await self._ids_body(request.sampling, prompt)
                deltas = self._native(await self._open("/completion", body | seat, request), request.sampling)
            else:
                body = chat_body(request, prompt, LLAMACPP_CHAT, replica=self.name)
                body |= {"max_tokens": request.sampling.max_tokens, "stream_options": {"include_usage": True}}
                deltas = chunk_deltas(await self._open("/v1/chat/completions", body | seat, request))
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta

    @spoken
    async def load(self) -> EngineLoad:
        health = await self._upstream.get("/health")
        if health.status != 200:
            raise EngineUnreachable(f"{self.name} is not healthy (status {health.status})", replica=self.name)
        if (metrics := await self._metrics()) is not None:
            return metrics.load(LLAMACPP)
        if self._lists_slots:
            reply = await self._upstream.get("/slots")
            self._lists_slots = reply.status == 200
            if self._lists_slots:
                return EngineLoad(running=sum(bool(s.get("is_processing")) for s in list_of(reply, self.name)))
        return EngineLoad(running=self._slots.running if self._slots is not None else 0)

    @spoken
    async def tokenize(self, text: str, *, model: str) -> list[int] | None:
        return await self._tokenize(text, special=True)

    async def forget(self, session: str, salt: str) -> dict[str, int]:
        """Empties the slot that holds the session's last prompt; where it erases none, another prompt fills it."""
        slots, gone = self._slots, 0
        for number in slots.of(session) if slots is not None else ():
            reply = await self._upstream.post(f"/slots/{number}?action=erase", b"{}")
            if reply.status == 501:  # without --slot-save-path
                asked = {"prompt": [0], "n_predict": 0, "id_slot": number, "cache_prompt": False}
                reply = await self._upstream.post("/completion", orjson.dumps(asked), timeout_s=60.0)
            check(reply, self.name)
            assert slots is not None
            slots.erased(number)
            gone += 1
        return {"slots": gone}

    async def forward(self, route: str, fields: Mapping[str, Any], *, request_id: str, salt: str) -> dict[str, Any]:
        with self._seat(salt, None) as seat:
            asked = {**fields, **(seat if route == "/v1/completions" else {})}
            return await forward(self._upstream, self._routes.path(route), asked, request_id)

    async def forward_stream(
        self, route: str, fields: Mapping[str, Any], *, request_id: str, salt: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        with self._seat(salt, None) as seat:
            events = forward_stream(self._upstream, self._routes.path(route), {**fields, **seat}, request_id)
            async with aclosing(events):
                async for event in events:
                    yield event

    async def aclose(self) -> None:
        await self._upstream.aclose()

    @contextmanager
    def _seat(self, salt: str, session: str | None) -> Iterator[dict[str, Any]]:
        """The fields that name a slot, held for the time of the request."""
        if (slots := self._slots) is None:  # it does not say what slots it has
            yield {"cache_prompt": not salt}
            return
        seat = slots.take(salt, session)
        try:
            yield {"id_slot": seat.slot, "cache_prompt": not seat.fresh}
        finally:
            slots.give_back(seat)

    async def _native(self, stream: AnswerStream, sampling: Sampling) -> AsyncGenerator[Delta, None]:
        reader = CompletionReader(stops=sampling.stop, stop_ids=sampling.stop_token_ids, logprobs=sampling.logprobs)
        try:
            while (events := await stream.next()) is not None:
                for event in events:
                    if event.get("error"):
                        raise stream.failed(event)
                    told = list(token_ids(event["tokens"]))
                    gap = reader.missing(event)
                    ids = told if not gap else await self._completed(event["content"], told, gap)
                    if (delta := reader.read(event, ids)) is None:
                        continue
                    stream.begun()
                    if delta.finish is not None and event["stop"]:
                        stream.finished()
                    yield delta
                    if delta.finish is not None:
                        return
            raise stream.lost("the answer ended without a finish reason")
        except STUMBLES as error:
            raise stream.broken(f"an event is not of the protocol: {error!r}") from error
        finally:
            await stream.close()

    async def _completed(self, text: str, told: list[int], gap: int) -> tuple[int, ...]:
        """All ids of `text`, of which only the last were told: its own tokenizer knows the others."""
        number = gap + len(told)
        key = (text, number)
        if key not in self._characters:
            found = await self._tokenize(text, special=False)
            ids = tuple(found[-number:] if found[-len(told) :] == told else found)
            if len(self._characters) >= MAX_CHARACTERS:
                self._characters.clear()
            self._characters[key] = ids
        return self._characters[key]

    async def _tokenize(self, text: str, *, special: bool) -> list[int]:
        asked = {"content": text, "add_special": False, "parse_special": special}
        reply = await self._upstream.post("/tokenize", orjson.dumps(asked))
        return list(token_ids(json_of(reply, self.name)["tokens"]))

    async def _learn(self) -> dict[str, Any]:
        """/props; a server that was started anew has empty slots, which nobody of ours has used."""
        reply = await self._upstream.get("/props")
        if reply.status in (401, 403, 404):
            return {}
        props = json_of(reply, self.name)
        marker, number = props.get("media_marker"), natural(props.get("total_slots"))
        epoch = None
        if isinstance(marker, str) and marker != FIXED_MARKER:  # drawn at random by each process
            epoch = hashlib.sha256(marker.encode()).hexdigest()[:16]
        if number and (self._slots is None or len(self._slots) != min(number, MAX_SLOTS) or epoch != self._epoch):
            self._slots = SlotTable(min(number, MAX_SLOTS))
        self._epoch = epoch
        return props

    async def _open(self, path: str, body: dict[str, Any], request: GenerateRequest) -> AnswerStream:
        return await AnswerStream.open(
            self._upstream,
            path,
            orjson.dumps(body),
            request_id=request.request_id,
            patient=request.priority > 0,
        )

    async def _ids_body(self, sampling: Sampling, prompt: IdsPrompt) -> dict[str, Any]:
        """Defaults too: it would put its own in their place."""
        whole = prompt.delta if prompt.base is None else await prompt.whole()
        body: dict[str, Any] = {
            "prompt": memoryview(whole).cast("I").tolist(),
            "n_predict": sampling.max_tokens,
            "stream": True,
            "return_tokens": True,
            "timings_per_token": bool(sampling.stop),  # whoever ends an answer sees no last event
            "repeat_penalty": sampling.repetition_penalty,
            **{
                name: getattr(sampling, name)
                for name in (
                    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos",
                )
            },
        }  # fmt: skip
        if self._window and (
            sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        ):
            body["repeat_last_n"] = self._window  # over all there is, as elsewhere; -1 for that is refused since 2026
        if sampling.seed is not None:
            body["seed"] = sampling.seed % MAX_SEED
        if sampling.logit_bias:
            body["logit_bias"] = [[token, bias] for token, bias in sampling.logit_bias.items()]
        if sampling.logprobs is not None:
            body["n_probs"] = max(1, sampling.logprobs)
        if sampling.grammar is not None:
            body["json_schema"] = self._schema(sampling.grammar)
        return body

    def _schema(self, grammar: Grammar) -> Any:
        if grammar.kind == "json_object":
            return {"type": "object"}
        if grammar.kind == "json_schema":
            return orjson.loads(grammar.text)
        message = f"{self.name} takes no {grammar.kind} grammar"
        raise Unsupported(message, param="response_format", replica=self.name)

    async def _metrics(self) -> Metrics | None:
        reply = await self._upstream.get("/metrics")
        return Metrics(reply.body.decode("utf-8", "replace")) if reply.status == 200 else None


def session_of(request: GenerateRequest) -> str | None:
    """Whose slot to come back to: the session's by ids, of messages the conversation that begins alike.

    Background work goes there too: what it goes on from is nowhere else.
    """
    prompt = request.prompt
    if isinstance(prompt, IdsPrompt):
        return prompt.session
    first = next((n for n, message in enumerate(prompt.messages) if message.get("role") == "user"), 0)
    return hashlib.sha256(orjson.dumps(list(prompt.messages[: first + 1]))).hexdigest()
