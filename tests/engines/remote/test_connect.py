"""What stands at a URL is found out by asking."""

from __future__ import annotations

from typing import get_args

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engines.contract import EngineBroken, EngineUnreachable
from engines.echo import EchoEngine
from engines.remote.connect import Kind, connect
from engines.remote.http import Timeouts
from engines.remote.llamacpp import LlamaCppEngine
from engines.remote.openai import OpenAiEngine
from engines.remote.sglang import SglangEngine
from engines.remote.turnkeep import TurnkeepEngine
from engines.remote.vllm import VllmEngine
from tests.contracts import llamacpp_app, openai_app, sglang_app, vllm_app, wire_app
from tests.contracts.live import LiveServer

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("app", "kind"),
    [
        (wire_app.create_app, TurnkeepEngine),
        (vllm_app.create_app, VllmEngine),
        (sglang_app.create_app, SglangEngine),
        (llamacpp_app.create_app, LlamaCppEngine),
        (openai_app.create_app, OpenAiEngine),
    ],
)
@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
async def test_the_kind_is_recognised(app: object, kind: type, ending: str) -> None:
    with LiveServer(app(EchoEngine())) as server:  # type: ignore[operator]
        engine = await connect(server.url + ending, name="one")
        assert type(engine) is kind
        assert engine.name == "one"
        assert (await engine.capabilities()).models == ("echo",)
        await engine.aclose()


async def test_the_path_of_a_url_is_kept_and_the_key_is_sent() -> None:
    seen: list[str | None] = []

    async def models(request: Request) -> Response:
        seen.append(request.headers.get("authorization"))
        return JSONResponse({"data": [{"id": "m"}]})

    with LiveServer(Starlette(routes=[Route("/v1beta/openai/models", models)])) as server:
        engine = await connect(f"{server.url}/v1beta/openai/", api_key="sk-up")
        assert (await engine.capabilities()).models == ("m",)
        await engine.aclose()
    assert set(seen) == {"Bearer sk-up"}


async def test_a_server_that_is_no_engine_is_broken() -> None:
    async def home(request: Request) -> Response:
        return JSONResponse({})

    with LiveServer(Starlette(routes=[Route("/", home)])) as server, pytest.raises(EngineBroken, match="neither"):
        await connect(server.url)


async def test_nobody_there_is_unreachable_unless_the_kind_is_given() -> None:
    url = "http://127.0.0.1:1"
    with pytest.raises(EngineUnreachable):
        await connect(url, timeouts=Timeouts(connect_s=0.5))
    for kind in get_args(Kind):
        engine = await connect(url, kind=kind)
        with pytest.raises(EngineUnreachable):
            await engine.load()
        await engine.aclose()


@pytest.mark.parametrize(
    "url", ["ftp://host", "host:8000", "http://", "http://u:p@host", "http://host/?q=1", "http://host/#x"]
)
async def test_what_is_no_url_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - three wordings
        await connect(url)
