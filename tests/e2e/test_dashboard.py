"""The first dashboard in a real Chromium: it asks for a key, shows what is there, and stays live."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_serve_command import Started, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt install chromium)")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    with serving(tmp_path_factory.mktemp("dashboard"), "--model", "echo") as started:
        yield started


def test_the_dashboard_shows_sessions_replicas_and_turns_and_follows_them(served: Started, tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {served.key}"}
    with (
        httpx.Client(base_url=served.url, headers=headers, trust_env=False, timeout=30) as http,
        sync_api.sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS) as browser,
    ):
        said: list[str] = []
        page = browser.new_page(viewport={"width": 400, "height": 800})
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.goto(f"{served.url}/admin")
        page.get_by_label("Admin API key").fill("tk-" + "x" * 43)
        page.get_by_role("button", name="Open").click()
        page.get_by_role("alert").get_by_text("unknown, revoked or past its time").wait_for()
        page.get_by_label("Admin API key").fill(served.key)
        page.get_by_role("button", name="Open").click()
        page.get_by_text("No session yet").wait_for()
        page.get_by_role("heading", name="embedded").wait_for()
        hostile = "<img src=x onerror=alert(1)>"
        http.post("/v1/sessions", json={"id": "shown", "title": hostile}).raise_for_status()
        http.post("/v1/sessions/shown/turns", json={"input": hostile}).raise_for_status()
        page.locator("#sessions tr", has_text="shown").wait_for()
        row = page.locator("#sessions tr", has_text="shown").inner_text()
        assert "embedded" in row
        assert "of 131,072" in row
        assert "completed" in page.locator("#turns tr").first.inner_text()
        assert page.locator("#status, #state").inner_text() == "live"
        assert "0 in line" in page.locator("#replicas").inner_text()
        drain = {"force": True, "reason": "a new driver", "timeout_s": 5}
        http.post("/admin/v1/replicas/embedded/drain", json=drain).raise_for_status()
        page.get_by_text("drained: takes no turns").wait_for()
        assert "a new driver" in page.locator("#replicas").inner_text()
        assert page.locator("img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        errors = [text for text in said if "401" not in text]
        assert errors == []
