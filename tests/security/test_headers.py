"""Headers are a list of allowed ones in every direction: up to an engine, down to a client, to pages of elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engines.echo import EchoEngine
from tests.contracts import openai_app
from tests.contracts.live import LiveServer
from tests.gateway.api.refusal import nothing_saved, refused
from tests.gateway.served import Served, served
from tests.security.fuzzed import ANSWERED

PAGE = "https://chat.example"
BODY = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LEAVING = {"set-cookie": "up=1", "x-upstream": "secret", "access-control-allow-origin": "*", "keep-alive": "timeout=9"}
COMING = {
    "cookie": "session=hush", "x-forwarded-for": "hush", "x-forwarded-host": "hush", "forwarded": "for=hush",
    "via": "hush",
    "x-session-id": "hush", "x-api-key": "hush", "proxy-authorization": "hush", "te": "trailers", "x-anything": "hush",
    "x-request-id": "hush", "traceparent": "hush", "referer": "hush", "user-agent": "hush",
    "openai-organization": "hush",
}  # fmt: skip


class Upstream:
    """An engine's server that remembers what headers it was sent, and sends some that are nobody's business."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.seen: list[dict[str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in LEAVING.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        if scope["type"] == "http":
            self.seen.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await self.app(scope, receive, sent)


@pytest.fixture(scope="module")
def upstream() -> Iterator[tuple[Upstream, str]]:
    app = Upstream(openai_app.create_app(EchoEngine()))
    with LiveServer(app) as live:
        yield app, live.url


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, upstream: tuple[Upstream, str]) -> Iterator[Served]:
    one = {"url": upstream[1], "name": "up", "kind": "openai", "api_key": "sk-ours"}
    with served(tmp_path_factory.mktemp("headers"), embed=False, auth=True, upstreams=(one,)) as running:
        yield running


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("cors"), auth=True, cors_origins=(PAGE,)) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_of_a_client_s_headers_reaches_an_engine_and_nothing_of_an_engine_s_the_client(
    gateway: Served, upstream: tuple[Upstream, str], stream: bool
) -> None:
    app, _ = upstream
    app.seen.clear()
    answer = gateway.client.post(
        "/v1/chat/completions", json={**BODY, "stream": stream}, headers={**gateway.key(), **COMING}
    )
    assert answer.status_code == 200, answer.text
    assert app.seen
    for headers in app.seen:
        assert "hush" not in str(headers)
        assert headers["authorization"] == "Bearer sk-ours"
        assert set(headers) <= {
            "host", "accept", "accept-encoding", "user-agent", "authorization", "content-type", "content-length",
            "x-request-id",
        }  # fmt: skip
    assert set(answer.headers) <= ANSWERED
    assert not set(answer.headers) & set(LEAVING)


def test_no_page_of_elsewhere_may_read_an_answer_unless_a_setting_names_it(gateway: Served) -> None:
    key = gateway.key()
    for origin in (PAGE, "null", gateway.url):
        for path in ("/v1/models", "/v1/sessions/none", "/openapi.json", "/admin", "/livez"):
            answer = gateway.client.get(path, headers={**key, "origin": origin})
            assert not any(name.startswith("access-control-") for name in answer.headers), path
    asked = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with nothing_saved(gateway):
        answer = gateway.client.options("/v1/sessions", headers=asked)
        refused(answer, 405)
    assert not any(name.startswith("access-control-") for name in answer.headers)


def test_a_page_that_a_setting_names_may_ask_and_no_other(opened: Served) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = opened.client.options("/v1/sessions", headers={"origin": PAGE, **asked})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
    key = opened.key()
    answer = opened.client.get("/v1/models", headers={"origin": PAGE, **key})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "Origin" in answer.headers["vary"]
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    for origin in ("https://chat.example.evil", "http://chat.example", "https://chat.example:8443", "null"):
        assert (
            "access-control-allow-origin"
            not in opened.client.get("/v1/models", headers={"origin": origin, **key}).headers
        )
        other = opened.client.options("/v1/sessions", headers={"origin": origin, **asked})
        assert "access-control-allow-origin" not in other.headers


def test_no_answer_lets_a_browser_send_credentials_of_its_own(opened: Served) -> None:
    """There are none: a key comes in a header that a page must set itself, so no other page acts in an admin's name."""
    asked = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for answer in (
        opened.client.options("/v1/sessions", headers=asked),
        opened.client.get("/livez", headers={"origin": PAGE}),
    ):
        assert "access-control-allow-credentials" not in answer.headers
        assert "set-cookie" not in answer.headers
    admin = opened.key(scopes=frozenset({"admin"}))["authorization"].removeprefix("Bearer ")
    simple = {
        "origin": "https://evil.example",
        "content-type": "text/plain",
    }  # what a form may send without asking first
    with nothing_saved(opened):
        for place in ({"cookie": f"authorization={admin}; key={admin}"}, {"cookie": f"Bearer {admin}"}, {}):
            answer = opened.client.post("/admin/v1/tenants", content='{"id":"evil"}', headers={**simple, **place})
            refused(answer, 401, "invalid_api_key")
        for query in ("key", "api_key", "access_token", "authorization"):
            refused(opened.client.post(f"/admin/v1/tenants?{query}={admin}", json={"id": "evil"}), 401)


@pytest.mark.parametrize("path", ["/admin", "/admin/app.js", "/admin/style.css"])
def test_the_dashboard_is_framed_by_nobody_and_runs_only_what_is_its_own(gateway: Served, path: str) -> None:
    headers = gateway.client.get(path).headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert headers["x-frame-options"] == "DENY"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_the_page_of_the_description_sends_nothing_elsewhere(gateway: Served) -> None:
    policy = gateway.client.get("/docs").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


def test_every_page_and_script_has_its_type(gateway: Served) -> None:
    kinds = {
        path: gateway.client.get(path).headers["content-type"].partition(";")[0] for path in ("/admin", "/admin/app.js")
    }
    assert kinds == {"/admin": "text/html", "/admin/app.js": "text/javascript"}


def test_who_serves_is_told_to_nobody(gateway: Served) -> None:
    answers: list[httpx.Response] = [gateway.client.get(path) for path in ("/livez", "/none", "/admin")]
    assert not any("x-powered-by" in answer.headers for answer in answers)
