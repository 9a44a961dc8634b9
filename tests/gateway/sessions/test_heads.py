"""What a gateway remembers of a session's head is never taken for the truth: another gateway may have been there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from compression.conversation import Turn
from gateway.sessions.heads import Heads, Standing
from gateway.store.records import SessionRecord, TurnRecord
from tests.gateway.live import Live, live_gateway

pytestmark = pytest.mark.anyio
KEY = {"X-Session-Id": "shared"}


def standing(session_id: str = "s", expires_at: float | None = None) -> Standing:
    session = SessionRecord(
        id=session_id, tenant_id="t", version=1, model="m", system=None, tools=(), title=None, metadata={}, policy={},
        user_ref=None, origin="chat", head_turn_id="turn", next_seq=2, status="idle", created_at=0.0, updated_at=0.0,
        expires_at=expires_at, archived_at=None,
    )  # fmt: skip
    last = TurnRecord(
        turn=Turn("turn", None, 1, "completed", ()), tenant_id="t", session_id=session_id, model="m", fence=1,
        idempotency_key=None, request_hash=None, on_disconnect="finish", created_at=0.0, completed_at=0.0,
        finish_reason="stop", tokens=None, meaning=None, usage={}, placement={}, prefix_report={}, error=None,
        metadata={},
    )  # fmt: skip
    return Standing(session, last)


def test_the_session_used_longest_ago_is_forgotten_first() -> None:
    heads = Heads(lambda: 0.0, kept=2)
    for name in ("a", "b", "a", "c"):
        heads.put(standing(name))
    assert [name for name in "abc" if heads.get("t", name)] == ["a", "c"]


def test_an_expired_session_and_another_tenants_are_not_there() -> None:
    now = 0.0
    heads = Heads(lambda: now)
    heads.put(standing(expires_at=5.0))
    assert heads.get("t", "s") is not None
    assert heads.get("other", "s") is None
    now = 5.0
    assert heads.get("t", "s") is None
    assert not heads.forget("t", "s"), "nothing of it stays in memory"


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Live, Live]]:
    """Two gateways on one database."""
    async with live_gateway(tmp_path, gateway_name="one") as one, live_gateway(tmp_path, gateway_name="two") as two:
        yield one, two


async def said(live: Live, told: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The whole history is sent; the history with the answer."""
    sent = [*told, {"role": "user", "content": text}]
    answer = await live.chat(sent, KEY)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == text
    return [*sent, {"role": "assistant", "content": text}]


async def contents(live: Live) -> list[str]:
    return [t["input"][-1]["content"] for t in await live.turns("shared", branch="head")]


async def test_a_whole_history_goes_on_from_the_head_that_the_other_gateway_moved(pair: tuple[Live, Live]) -> None:
    one, two = pair
    told = await said(one, [], "a")
    told = await said(one, told, "b")  # from here on `one` remembers the head
    told = await said(two, told, "c")
    told = await said(one, told, "d")
    assert await contents(two) == ["a", "b", "c", "d"]


async def test_a_history_without_the_other_gateways_turn_becomes_a_branch(pair: tuple[Live, Live]) -> None:
    one, two = pair
    told = await said(one, await said(one, [], "a"), "b")
    await said(two, told, "c")
    await said(one, told, "e")
    assert await contents(one) == ["a", "b", "e"]


async def test_a_turn_follows_a_patch_by_the_other_gateway(pair: tuple[Live, Live]) -> None:
    one, two = pair
    session = await one.session(id="shared")
    for text in ("a", "b"):
        assert (await one.turn(session, text)).status_code == 200
    patched = await two.client.patch("/v1/sessions/shared", json={"system": "Be brief."}, headers={"If-Match": "*"})
    assert patched.status_code == 200
    answer = await one.turn(session, "c")
    assert answer.json()["prefix_report"]["cause"] == "system_changed", answer.json()["prefix_report"]


@pytest.mark.parametrize("deleter", [0, 1])
async def test_a_deleted_session_is_made_anew_with_the_whole_history(pair: tuple[Live, Live], deleter: int) -> None:
    one, _ = pair
    told = await said(one, await said(one, [], "a"), "b")
    assert (await pair[deleter].client.delete("/v1/sessions/shared")).status_code == 200
    await said(one, told, "c")
    (turn,) = await one.turns("shared")
    assert [item["content"] for item in turn["input"]] == ["a", "a", "b", "b", "c"]


async def test_a_turn_of_a_session_that_the_other_gateway_deleted_is_404(pair: tuple[Live, Live]) -> None:
    one, two = pair
    session = await one.session(id="shared")
    for text in ("a", "b"):
        assert (await one.turn(session, text)).status_code == 200
    assert (await two.client.delete("/v1/sessions/shared")).status_code == 200
    assert (await one.turn(session, "c")).json()["error"]["code"] == "session_not_found"


async def test_a_turn_goes_on_without_reading_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with live_gateway(tmp_path) as live:
        told = await said(live, [], "a")
        store = live.app.state.gateway.store

        async def refused(*_: Any, **__: Any) -> None:
            raise AssertionError("the store was read")

        monkeypatch.setattr(type(store), "_read", refused)
        await said(live, await said(live, told, "b"), "c")
