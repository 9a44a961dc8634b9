"""The engine's HTTP front (docs/engine-wire.md): an ASGI app over any Backend. Imports no torch.

The app is a value built once: `create_app(backend)`. Its hot path is one door: bytes in, checked, handed to the
backend; events out as they come, untouched.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engines.kv_snapshot import CONTENT_TYPE as KV_SNAPSHOT
from engines.local import checks
from engines.local.admission import Admission
from engines.local.asgi import Door, read_body, send_bytes, send_events, send_json, send_pieces, while_connected
from engines.local.backend import Backend
from engines.local.completions import Completions
from engines.local.kv.events import KvPublisher
from engines.local.metrics import Metrics, Snapshot
from engines.local.refusal import Refusal
from engines.local.session_doors import SessionDoors
from engines.local.texts import Texts, tokenizer_file
from engines.local.wire import CONTENT_TYPE, Event, WireRequest, decode_generate


@dataclass(frozen=True, slots=True)
class Limits:
    max_waiting: int = 256  # requests in the queue; beyond it 503 overloaded
    max_body_bytes: int = 8 << 20  # two million token ids
    max_kv_bytes: int = 16 << 30  # of a session's K/V as a file


class Front:
    """What the doors share."""

    def __init__(self, backend: Backend, limits: Limits, clock: Callable[[], float], kv: KvPublisher | None) -> None:
        self.backend = backend
        self.kv = kv
        self.limits = limits
        self.metrics = Metrics()
        self.admission = Admission(backend, self.metrics, max_waiting=limits.max_waiting, clock=clock)
        self._texts: asyncio.Future[Texts] | None = None

    async def texts(self) -> Texts:
        """The tokenizer, built in a thread with the first text: a large one takes a second."""
        if self._texts is None:
            info = self.backend.info
            self._texts = asyncio.ensure_future(asyncio.to_thread(Texts, info.folder, info.window))
        return await asyncio.shield(self._texts)

    def require_model(self) -> None:
        if self.backend.state == "loading":
            raise Refusal("loading", "the model is still loading")

    def require_name(self, name: str) -> None:
        if name != self.backend.info.name:
            raise Refusal("model_not_found", f"this engine serves {self.backend.info.name!r}", param="model")

    async def json(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        body = await read_body(scope, receive, limit=self.limits.max_body_bytes, content_type="application/json")
        return checks.json_object(body)

    async def generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /turnkeep/v1/generate"""
        body = await read_body(scope, receive, limit=self.limits.max_body_bytes, content_type=CONTENT_TYPE)
        self.require_model()
        request = decode_generate(body, self.backend.info.vocab)
        self.require_name(request.model)
        if request.score_from is not None:
            raise checks.refuse("score_from", "belongs to /turnkeep/v1/score")
        await send_events(send, receive, self._lines(request))

    async def score(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /turnkeep/v1/score"""
        body = await read_body(scope, receive, limit=self.limits.max_body_bytes, content_type=CONTENT_TYPE)
        self.require_model()
        request = decode_generate(body, self.backend.info.vocab)
        self.require_name(request.model)
        if request.score_from is None:
            raise checks.refuse("score_from", "is required")
        async with while_connected(receive):
            scores = b"".join([piece async for piece in self._scores(request)])
            await send_bytes(send, scores, content_type=b"application/octet-stream")

    async def _scores(self, request: WireRequest) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.admission.generate(request)) as answer:
            async for events in answer:
                for event in events:
                    if event.kind == "scores":
                        yield event.data
                    if event.kind == "error":
                        raise Refusal("engine_error", "the engine failed while it scored")

    async def _lines(self, request: WireRequest) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.admission.generate(request)) as answer:
            async for events in answer:
                yield sse(events)

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /health"""
        state = self.backend.state
        if state == "loading":
            await send_json(send, {"status": state}, status=503)
            return
        info, status = self.backend.info, await self.backend.status()
        await send_json(
            send,
            {
                "status": state,
                "model": info.name,
                "epoch": info.epoch,
                "window": info.window,
                "block_size": info.block_size,
                "device": info.device,
                "dtype": info.dtype,
                "load": {"running": self.admission.running, "waiting": self.admission.waiting},
                "pool": {
                    "total": status.blocks_total,
                    "free": status.blocks_free,
                    "cached": status.blocks_cached,
                    "used": status.blocks_used,
                    "bytes": status.pool_bytes,
                    "sealed_bytes": status.sealed_bytes,
                    "sealed_units": status.sealed,
                },
                "tiers": status.tiers,
                "pool_ok": status.pool_ok,
                "eviction": info.eviction,
                "sessions": status.gauges.get("sessions"),
                "no_shift": info.no_shift,
                "no_native": info.no_native,
                "kv_refused": info.kv_refused,
                "attention": info.attention,
            },
            status=200 if state == "ok" else 503,
        )

    async def scrape(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /metrics"""
        text = generate_latest(self.metrics.registry)
        if self.backend.state != "loading":
            now = CollectorRegistry()
            status = await self.backend.status()
            now.register(Snapshot(self.backend.info, status, self.admission.running, self.admission.waiting))
            text += generate_latest(now)
        await send_bytes(send, text, content_type=CONTENT_TYPE_LATEST.encode())

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/models"""
        self.require_model()
        info = self.backend.info
        model = {"id": info.name, "object": "model", "created": 0, "owned_by": "turnkeep", "max_model_len": info.window}
        await send_json(send, {"object": "list", "data": [model]})

    async def capabilities(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /turnkeep/v1/capabilities"""
        self.require_model()
        found = asdict(await self.backend.capabilities()) | {"routes": frozenset({"/v1/completions"})}
        told = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in found.items()}
        if self.kv is not None:
            told["kv"] = {"events": self.kv.endpoint, "replay": self.kv.replay}
        await send_json(send, told | {"kv_events": self.kv is not None})

    async def kv_snapshot(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /turnkeep/v1/kv/snapshot"""
        self.require_model()
        if self.kv is None:
            raise Refusal("not_found", "this engine publishes no KV events (--kv-events)")
        await send_pieces(send, receive, self.kv.snapshot(), content_type=KV_SNAPSHOT.encode())

    async def tokenizer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /turnkeep/v1/tokenizer/{name}"""
        self.require_model()
        name = scope["path_params"]["name"]
        content = tokenizer_file(self.backend.info.folder, name)
        if content is None:
            raise Refusal("not_found", "no such tokenizer file")
        kind = b"application/json" if name.endswith(".json") else b"text/plain; charset=utf-8"
        await send_bytes(send, content, content_type=kind)

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /tokenize"""
        fields = await self.json(scope, receive)
        self.require_model()
        checks.unknown(fields, {"prompt", "model", "add_special_tokens"})
        self._named(fields)
        prompt = fields.get("prompt")
        if not isinstance(prompt, str):
            raise checks.refuse("prompt", "must be a string")
        ids = await (await self.texts()).encode(prompt, special=checks.flag(fields, "add_special_tokens", True))
        await send_json(send, {"tokens": ids, "count": len(ids), "max_model_len": self.backend.info.window})

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /detokenize"""
        fields = await self.json(scope, receive)
        self.require_model()
        checks.unknown(fields, {"tokens", "model"})
        self._named(fields)
        ids = checks.ids(fields.get("tokens"), self.backend.info.vocab, "tokens")
        await send_json(send, {"prompt": await (await self.texts()).decode(ids)})

    async def sessions(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /turnkeep/v1/sessions"""
        self.require_model()
        await send_json(send, {"sessions": await self.backend.sessions()})

    async def forget(self, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE /turnkeep/v1/sessions/{session}?salt="""
        self.require_model()
        session, query = scope["path_params"]["session"], _query(scope)
        if not checks.PRINTABLE.fullmatch(session):
            raise checks.refuse("session", "is no session name")
        salt = checks.text(query, "salt", checks.SALT, None)
        gone = await self.backend.forget(session, salt)
        if self.kv is not None:
            self.kv.forget_past()  # what was published tells the ids of its blocks
        await send_json(send, {"blocks_freed": sum(gone.values()) - gone.get("remote", 0), "tiers": gone})

    def _named(self, fields: dict[str, Any]) -> None:
        """A model's name is optional here, but not another's."""
        if (name := checks.text(fields, "model", checks.PRINTABLE, None)) is not None:
            self.require_name(name)


def sse(events: list[Event]) -> bytes:
    return b"".join([b"data: %b\n\n" % event.data for event in events])


def _query(scope: Scope) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1"), True).items()}


def create_app(
    backend: Backend,
    *,
    clock: Callable[[], float],
    now: Callable[[], float],
    limits: Limits | None = None,
    kv: KvPublisher | None = None,
    kv_dir: Path | None = None,
) -> Starlette:
    """The front as an ASGI app. Who made `backend` and `kv` closes them. `clock` is monotonic, `now` in seconds since
    1970. `kv_dir`: where the backend keeps its files of K/V."""
    front = Front(backend, limits or Limits(), clock, kv)
    sessions = SessionDoors(backend, kv_dir, front.limits.max_kv_bytes)
    completions = Completions(front, now)
    doors = [
        ("POST", "/turnkeep/v1/generate", front.generate),
        ("POST", "/turnkeep/v1/score", front.score),
        ("POST", "/v1/completions", completions.create),
        ("GET", "/v1/models", front.models),
        ("GET", "/health", front.health),
        ("GET", "/metrics", front.scrape),
        ("GET", "/turnkeep/v1/capabilities", front.capabilities),
        ("GET", "/turnkeep/v1/kv/snapshot", front.kv_snapshot),
        ("GET", "/turnkeep/v1/tokenizer/{name}", front.tokenizer),
        ("POST", "/tokenize", front.tokenize),
        ("POST", "/detokenize", front.detokenize),
        ("GET", "/turnkeep/v1/sessions", front.sessions),
        ("POST", "/turnkeep/v1/sessions/{session:path}/suspend", sessions.suspend),
        ("POST", "/turnkeep/v1/sessions/{session:path}/resume", sessions.resume),
        ("GET", "/turnkeep/v1/sessions/{session:path}/kv", sessions.export),
        ("PUT", "/turnkeep/v1/sessions/{session:path}/kv", sessions.adopt),
        ("DELETE", "/turnkeep/v1/sessions/{session:path}", front.forget),
    ]
    routes = [Route(path, Door(call), methods=[method]) for method, path, call in doors]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _failure})


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    return _answer(Refusal(code, error.detail))


def _failure(_: Request, error: Exception) -> Response:
    """Our own mistake: the client learns no more than that, the log has the traceback."""
    return _answer(Refusal("engine_error", "the engine's front failed"))


def _answer(refused: Refusal) -> Response:
    return Response(orjson.dumps({"error": refused.fields()}), refused.status, media_type="application/json")
