"""The dashboard in a real Chromium: it asks for a key, shows what is there, stays live, and makes and ends keys."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


@contextmanager
def browsing(served: Started) -> Iterator[tuple[Any, httpx.Client, list[str]]]:
    """A page of a phone's width; a client with the admin's key; the errors that the page's console said."""
    headers = {"authorization": f"Bearer {served.key}"}
    with (
        httpx.Client(base_url=served.url, headers=headers, trust_env=False, timeout=30) as http,
        sync_api.sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS) as browser,
    ):
        said: list[str] = []
        page = browser.new_page(viewport={"width": 400, "height": 800})
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        yield page, http, said


def opened(page: Any, served: Started, where: str = "") -> None:
    page.goto(f"{served.url}/admin{where}")
    page.get_by_label("Admin API key").fill(served.key)
    page.get_by_role("button", name="Open").click()
    page.locator("#view").wait_for()


def test_the_dashboard_shows_sessions_replicas_and_turns_and_follows_them(served: Started) -> None:
    with browsing(served) as (page, http, said):
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


def test_a_key_is_made_shown_once_copied_rotated_and_revoked_by_the_keyboard(served: Started) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    with browsing(served) as (page, http, said):
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        mine = served.key[:11]
        opened(page, served, "#tenants")
        page.locator("#keys tr", has_text=mine).wait_for()
        assert "this page's" in page.locator("#keys tr", has_text=mine).inner_text()
        page.get_by_label("Id", exact=True).fill("acme")
        page.get_by_label("Name", exact=True).fill(hostile)
        page.get_by_role("button", name="Make tenant").press("Enter")
        page.get_by_text("Tenant acme is made").wait_for()
        page.locator("#tenants tr", has_text="acme").wait_for()
        page.get_by_label("Id", exact=True).fill("acme")
        page.get_by_role("button", name="Make tenant").press("Enter")
        page.get_by_role("status").get_by_text("there is a tenant 'acme' already (request req_").wait_for()

        page.get_by_role("button", name="New key").press("Enter")
        dialog = page.get_by_role("dialog", name="New key")
        dialog.get_by_label("Tenant").select_option("acme")
        dialog.get_by_label("What it is for").fill(hostile)
        dialog.get_by_label("read: reading").press("Space")
        dialog.get_by_label("sessions: sessions").press("Space")
        dialog.get_by_label("What it is for").press("Enter")
        shown = page.get_by_label("API key", exact=True)
        shown.wait_for()
        key = shown.input_value()
        page.get_by_role("button", name="Copy").press("Enter")
        page.get_by_text("copied", exact=True).wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == key
        shown.press("Escape")
        assert shown.input_value() == key, "a key that is shown once does not go by Escape"
        page.get_by_role("button", name="I have kept it").press("Enter")
        assert key not in page.content()
        line = page.locator("#keys tr", has_text=key[:11])
        line.wait_for()
        assert "chat read" in line.inner_text()
        told = http.get(f"/admin/v1/keys/{key[:11]}").json()
        assert (told["tenant"], told["name"], told["scopes"]) == ("acme", hostile, ["chat", "read"])

        page.locator("#of-tenant").select_option("acme")
        page.locator("#keys tr", has_text=mine).wait_for(state="detached")
        assert page.url.endswith("#tenants?tenant=acme")
        page.get_by_role("button", name=f"Rotate {key[:11]}").press("Enter")
        dialog = page.get_by_role("dialog", name="Rotate a key")
        dialog.get_by_text("It was never used.").wait_for()
        assert dialog.get_by_label("Hours").input_value() == "6"
        dialog.get_by_role("button", name="Rotate").press("Enter")
        shown.wait_for()
        page.get_by_role("button", name="I have kept it").press("Enter")
        page.locator("#keys tr", has_text="works until").get_by_text("replaced by").wait_for()

        page.get_by_role("button", name=f"Revoke {key[:11]}").press("Enter")
        page.get_by_role("dialog", name="Revoke a key").press("Escape")
        assert http.get(f"/admin/v1/keys/{key[:11]}").json()["state"] == "ending"
        page.get_by_role("button", name=f"Revoke {key[:11]}").press("Enter")
        page.get_by_role("dialog").get_by_role("button", name="Revoke").press("Enter")
        page.locator("#keys tr", has_text="revoked").wait_for()
        assert http.get(f"/admin/v1/keys/{key[:11]}").json()["state"] == "revoked"

        page.get_by_role("link", name="Audit log").press("Enter")
        page.locator("#audit tr", has_text="key.rotate").wait_for()
        page.locator("#audit-filter").get_by_label("Tenant").fill("acme")
        page.get_by_label("Action").fill("key.revoke")
        page.get_by_role("button", name="Show").press("Enter")
        page.locator("#audit tr", has_text="key.rotate").wait_for(state="detached")
        assert key[:11] in page.locator("#audit tr", has_text="key.revoke").inner_text()
        page.get_by_label("Action").fill("key.nothing")
        page.get_by_role("button", name="Show").press("Enter")
        page.get_by_text("Nothing that fits.").wait_for()
        assert page.locator("img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert page.context.cookies() == []
        assert [text for text in said if "401" not in text and "409" not in text] == []


def test_the_last_admin_key_goes_only_by_force_and_the_page_then_asks_for_another(served: Started) -> None:
    with browsing(served) as (page, http, _):
        opened(page, served, "#tenants")
        page.get_by_role("button", name=f"Revoke {served.key[:11]}").press("Enter")
        dialog = page.get_by_role("dialog", name="Revoke a key")
        dialog.get_by_text("This page uses it").wait_for()
        force = dialog.get_by_label("Even so")
        assert not force.is_visible()
        dialog.get_by_role("button", name="Revoke").press("Enter")
        dialog.get_by_role("alert").get_by_text("the last admin key that works").wait_for()
        assert http.get("/admin/v1/keys").status_code == 200
        made = http.post("/admin/v1/keys", json={"name": "spare", "scopes": ["admin"]}).json()
        dialog.get_by_role("button", name="Revoke").press("Enter")
        page.get_by_role("alert").get_by_text("unknown, revoked or past its time").wait_for()
        page.get_by_label("Admin API key").fill(made["key"])
        page.get_by_role("button", name="Open").click()
        page.locator("#keys tr", has_text="spare").get_by_text("this page's").wait_for()
        served.key = made["key"]


def test_a_list_that_cannot_be_read_says_why_and_is_read_again_when_asked(served: Started) -> None:
    with browsing(served) as (page, _, _):
        page.route("**/admin/v1/audit?*", lambda route: route.abort())
        page.emulate_media(color_scheme="dark")
        opened(page, served, "#audit")
        page.get_by_text("the gateway does not answer").wait_for()
        page.unroute("**/admin/v1/audit?*")
        page.get_by_role("button", name="Try again").press("Enter")
        page.locator("#audit tr", has_text="key.create").first.wait_for()
        ground = page.evaluate("getComputedStyle(document.documentElement).colorScheme")
        assert "dark" in ground
