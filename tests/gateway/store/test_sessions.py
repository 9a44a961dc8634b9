"""Sessions: made, changed, listed, expired, erased; on both databases."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.store.records import (
    Begun,
    DuplicateId,
    LeaseLost,
    SessionChanges,
    SessionFilter,
    SessionRecord,
    UnstorableText,
    VersionConflict,
)
from gateway.store.sessions import Store
from tests.gateway.store.conftest import Clock
from tests.gateway.store.values import SESSION, TENANT, begin, finish, session

pytestmark = pytest.mark.anyio


async def got(store: Store, id: str = SESSION) -> SessionRecord:
    record = await store.get_session(TENANT, id)
    assert record is not None
    return record


async def test_a_session_comes_back_as_it_was_made(store: Store, clock: Clock) -> None:
    made = await store.create_session(
        session(
            system="be brief\n\u2028",
            tools=({"type": "function", "name": "f"},),
            title="Züge",
            user_ref="u-7",
            metadata={"k": "v"},
            policy={"trigger_ratio": 0.5},
            expires_at=clock.now + 60,
        )
    )
    assert made == await got(store)
    assert (made.version, made.head_turn_id, made.next_seq, made.status) == (1, None, 1, "idle")
    assert (made.system, made.title, made.user_ref) == ("be brief\n\u2028", "Züge", "u-7")
    assert (made.tools, made.metadata) == (({"type": "function", "name": "f"},), {"k": "v"})
    assert (made.policy, made.expires_at, made.created_at) == ({"trigger_ratio": 0.5}, clock.now + 60, clock.now)


async def test_an_id_is_taken_once(store: Store) -> None:
    await store.create_session(session())
    with pytest.raises(DuplicateId):
        await store.create_session(session())


async def test_a_change_raises_the_version_and_keeps_the_rest(store: Store) -> None:
    await store.create_session(session(title="old", metadata={"a": "1"}))
    changed = await store.update_session(
        TENANT, SESSION, 1, SessionChanges({"title": None, "metadata": {"b": "2"}, "tools": [{"name": "t"}]})
    )
    assert changed is not None
    assert changed == await got(store)
    assert (changed.version, changed.title, changed.metadata, changed.model) == (2, None, {"b": "2"}, "small")


async def test_a_change_built_on_an_old_version_is_refused(store: Store) -> None:
    await store.create_session(session())
    await store.update_session(TENANT, SESSION, None, SessionChanges({"title": "x"}))
    with pytest.raises(VersionConflict) as refused:
        await store.update_session(TENANT, SESSION, 1, SessionChanges({"title": "y"}))
    assert refused.value.current == 2
    assert (await got(store)).title == "x"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tenant_id": "other"}, ValueError),
        ({"head_turn_id": "t"}, ValueError),
        ({"title": 5}, TypeError),
        ({"expires_at": "soon"}, TypeError),
        ({"title": "a\0"}, UnstorableText),
        ({"metadata": {"a": "\0"}}, UnstorableText),
    ],
)
async def test_what_cannot_be_changed_is_refused(store: Store, change: dict[str, Any], error: type[Exception]) -> None:
    before = await store.create_session(session())
    with pytest.raises(error):
        await store.update_session(TENANT, SESSION, None, SessionChanges(change))
    assert await got(store) == before


# ---- listing


async def test_pages_hold_every_session_once_newest_first(store: Store, clock: Clock) -> None:
    for number in range(7):
        clock.now += number % 2  # some share an instant
        await store.create_session(session(f"s{number}"))
    seen, cursor = [], None
    while True:
        page = await store.list_sessions(TENANT, limit=3, cursor=cursor)
        seen += [record.id for record in page.sessions]
        if (cursor := page.next_cursor) is None:
            break
    assert seen == ["s6", "s5", "s4", "s3", "s2", "s1", "s0"]


async def test_a_page_is_not_shifted_by_what_changes_meanwhile(store: Store, clock: Clock) -> None:
    for number in range(4):
        clock.now += 1
        await store.create_session(session(f"s{number}"))
    first = await store.list_sessions(TENANT, limit=2)
    clock.now += 1
    await store.create_session(session("new"))
    await store.delete_session(TENANT, "s2")  # the very one the cursor names
    rest = await store.list_sessions(TENANT, limit=2, cursor=first.next_cursor)
    assert [record.id for record in first.sessions] == ["s3", "s2"]
    assert [record.id for record in rest.sessions] == ["s1", "s0"]


@pytest.mark.parametrize("cursor", ["", "x", "bm90IGpzb24", "WzEsMl0", "W3RydWUsImEiXQ", "W10", "é"])
async def test_a_foreign_cursor_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(ValueError, match="cursor"):
        await store.list_sessions(TENANT, cursor=cursor)


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (SessionFilter(), ["b", "a"]),
        (SessionFilter(include_archived=True), ["c", "b", "a"]),
        (SessionFilter(user_ref="u1"), ["a"]),
        (SessionFilter(status="running"), ["b"]),
        (SessionFilter(status="idle"), ["a"]),
        (SessionFilter(status="archived", include_archived=True), ["c"]),
        (SessionFilter(status="no such"), []),
        (SessionFilter(metadata={"team": 'x"%', "n": "1"}), ["a"]),
        (SessionFilter(metadata={"team": "x"}), []),
        (SessionFilter(query="RAIN"), ["b"]),
        (SessionFilter(query="%"), ["b"]),
        (SessionFilter(query="_"), []),
        (SessionFilter(created_after=101.0), ["b"]),
        (SessionFilter(created_before=101.5), ["a"]),
        (SessionFilter(updated_after=102.5, include_archived=True), ["c"]),
        (SessionFilter(updated_before=101.5), ["a"]),
    ],
)
async def test_filters(store: Store, clock: Clock, filter: SessionFilter, expected: list[str]) -> None:
    clock.now = 101.0
    await store.create_session(session("a", user_ref="u1", metadata={"team": 'x"%', "n": "1"}))
    clock.now = 102.0
    await store.create_session(session("b", title="100% rain", metadata={"team": "y"}))
    await store.begin_turn(begin("t1", session_id="b"))
    await store.create_session(session("c"))
    clock.now = 103.0
    await store.update_session(TENANT, "c", None, SessionChanges({"archived_at": 103.0}))
    page = await store.list_sessions(TENANT, filter=filter)
    assert [record.id for record in page.sessions] == expected


# ---- the end of a session


async def test_a_deleted_session_leaves_a_receipt_and_nothing_else(store: Store) -> None:
    began = await store.begin_turn(begin("t1", create=session(metadata={"a": "b"})))
    assert isinstance(began, Begun)
    await store.append_events(TENANT, SESSION, "t1", 0, [b"one", b"two"])
    receipt = await store.delete_session(TENANT, SESSION)
    assert receipt is not None
    assert receipt.erased == {
        "events": 2,
        "handovers": 0,
        "items": 1,
        "turns": 1,
        "compactions": 0,
        "session_metadata": 1,
        "sessions": 1,
    }
    assert await store.get_session(TENANT, SESSION) is None
    assert await store.get_turn(TENANT, SESSION, "t1") is None
    with pytest.raises(LeaseLost):
        await store.finish_turn(finish("t1", began.fence))
    with pytest.raises(LeaseLost):
        await store.append_events(TENANT, SESSION, "t1", 2, [b"three"])
    assert await store.delete_session(TENANT, SESSION) is None


async def test_an_expired_session_is_absent_before_and_gone_after_the_sweep(store: Store, clock: Clock) -> None:
    await store.create_session(session(expires_at=clock.now + 10))
    await store.create_session(session("lasting"))
    clock.now += 10
    assert await store.get_session(TENANT, SESSION) is None
    assert [record.id for record in (await store.list_sessions(TENANT)).sessions] == ["lasting"]
    assert [(tenant, receipt.session_id) for tenant, receipt in await store.erase_expired()] == [(TENANT, SESSION)]
    assert await store.erase_expired() == []


async def test_a_running_turn_outlives_its_session_s_time(store: Store, clock: Clock) -> None:
    await store.create_session(session(expires_at=clock.now + 2))
    began = await store.begin_turn(begin("t1"))
    assert isinstance(began, Begun)
    clock.now += 3
    assert await store.erase_expired() == []
    await store.finish_turn(finish("t1", began.fence))
    assert await store.get_session(TENANT, SESSION) is None
    assert len(await store.erase_expired()) == 1


async def test_an_id_is_free_again_once_its_session_expired(store: Store, clock: Clock) -> None:
    await store.create_session(session(title="first", expires_at=clock.now + 2))
    await store.begin_turn(begin("t1", session_id="other", create=session("other", expires_at=clock.now + 2)))
    clock.now += 6
    assert (await store.create_session(session(title="second"))).title == "second"
    assert await store.begin_turn(begin("t2", session_id="other", create=session("other"))) == Begun(
        seq=1, fence=1, parent_id=None, turn_id="t2", made=True
    )
