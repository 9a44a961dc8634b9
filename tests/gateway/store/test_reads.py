"""Paths, ids, pages, matches and events of turns; on both databases."""

from __future__ import annotations

import pytest

from gateway.store.records import Begun, SessionChanges
from gateway.store.sessions import Store
from tests.gateway.store.conftest import Clock
from tests.gateway.store.values import SESSION, TENANT, begin, finish, ids, said, session, tokens

pytestmark = pytest.mark.anyio


async def turn(store: Store, turn_id: str, parent: str | None, **other: object) -> None:
    began = await store.begin_turn(begin(turn_id, parent=parent, create=session()))
    assert isinstance(began, Begun)
    await store.finish_turn(finish(turn_id, began.fence, **other))


@pytest.fixture
async def tree(store: Store) -> None:
    """a - b - c     a - d"""
    await turn(store, "a", None, tokens=tokens(0, ids(1, 2), ids(3)), meaning=b"a")
    await turn(store, "b", "a", tokens=tokens(3, ids(4), ids(5)), meaning=b"b")
    await turn(store, "c", "b", tokens=tokens(5, ids(6), ids(7)), meaning=b"c")
    await turn(store, "d", "a", tokens=tokens(2, ids(30, 40), ids(50), open_answer=True), meaning=b"d")


@pytest.mark.usefixtures("tree")
async def test_a_path_runs_from_the_root_to_its_leaf(store: Store) -> None:
    path = await store.path(TENANT, SESSION, "c")
    assert [record.turn.id for record in path] == ["a", "b", "c"]
    assert path[1].turn.input == said("ask b")
    assert path[1].turn.output == said("answer b", "assistant")
    assert path[1].tokens == tokens(3, ids(4), ids(5))
    assert [record.turn.id for record in await store.path(TENANT, SESSION, "d")] == ["a", "d"]
    assert await store.path(TENANT, SESSION, "nowhere") == ()


@pytest.mark.usefixtures("tree")
async def test_ids_of_a_path_leave_the_parent_where_the_turn_says(store: Store) -> None:
    assert await store.path_ids(TENANT, SESSION, "c") == ids(1, 2, 3, 4, 5, 6, 7)
    assert await store.path_ids(TENANT, SESSION, "d") == ids(1, 2, 30, 40, 50)
    assert await store.path_ids(TENANT, SESSION, "nowhere") == b""


@pytest.mark.usefixtures("tree")
async def test_ids_skip_turns_without_any_and_ancestors_rendered_anew(store: Store) -> None:
    await turn(store, "e", "c", tokens=None)
    await turn(store, "f", "e", tokens=tokens(1, ids(20, 21), ids(22)))  # leaves within a's ids, three turns up
    await turn(store, "g", "f", tokens=tokens(0, ids(9), ids(9)))
    assert await store.path_ids(TENANT, SESSION, "f") == ids(1, 20, 21, 22)
    assert await store.path_ids(TENANT, SESSION, "g") == ids(9, 9)


@pytest.mark.usefixtures("tree")
async def test_a_head_has_what_the_next_turn_needs_and_no_more(store: Store) -> None:
    head = await store.last_turn(TENANT, SESSION)
    assert head is not None
    assert (head.turn.id, head.turn.seq, head.turn.status, head.meaning) == ("d", 4, "completed", b"d")
    assert head.turn.input == head.turn.output == ()
    assert head.tokens == tokens(2, ids(30, 40), ids(50), open_answer=True).__class__(
        "fp", 2, b"", b"", 5, b"digest-5", open_answer=True
    )
    other = await store.last_turn(TENANT, SESSION, "b")
    assert other is not None
    assert other.tokens is not None
    assert other.tokens.path_tokens == 5
    assert await store.last_turn(TENANT, SESSION, "nowhere") is None


async def test_a_new_session_has_no_head(store: Store) -> None:
    await store.create_session(session())
    assert await store.last_turn(TENANT, SESSION) is None


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, "abcd"),
        ({"order": "desc"}, "dcba"),
        ({"limit": 2}, "ab"),
        ({"after": 1, "before": 4}, "bc"),
        ({"after": 2, "order": "desc", "limit": 1}, "d"),
        ({"path_of": "c"}, "abc"),
        ({"path_of": "d", "order": "desc"}, "da"),
        ({"path_of": "nowhere"}, ""),
    ],
)
async def test_turns_are_paged_by_seq(store: Store, asked: dict[str, object], expected: str) -> None:
    turns = await store.list_turns(TENANT, SESSION, **asked)  # type: ignore[arg-type]
    assert "".join(record.turn.id for record in turns) == expected


@pytest.mark.usefixtures("tree")
async def test_a_turn_is_found_by_id_and_by_seq(store: Store) -> None:
    assert await store.get_turn_by_seq(TENANT, SESSION, 2) == await store.get_turn(TENANT, SESSION, "b")
    assert await store.get_turn_by_seq(TENANT, SESSION, 9) is None
    assert await store.get_turn(TENANT, "other", "b") is None


async def test_a_long_path_is_read_whole(store: Store) -> None:
    await turn(store, "t0", None, tokens=tokens(0, ids(0), ids(0)))
    for number in range(1, 300):
        await turn(store, f"t{number}", f"t{number - 1}", tokens=tokens(number * 2, ids(number), ids(number)))
    assert [record.turn.seq for record in await store.path(TENANT, SESSION, "t299")] == list(range(1, 301))
    whole = await store.path_ids(TENANT, SESSION, "t299")
    assert whole == ids(*(number // 2 for number in range(600)))


# ---- matching


async def meant(store: Store, id: str, meaning: bytes, user_ref: str | None = None, **other: object) -> None:
    began = await store.begin_turn(begin(f"{id}-t", session_id=id, create=session(id, user_ref=user_ref, **other)))
    assert isinstance(began, Begun)
    await store.finish_turn(finish(f"{id}-t", began.fence, session_id=id, meaning=meaning))


async def found(store: Store, user_ref: str | None, *digests: bytes) -> str | None:
    record = await store.find_meaning(TENANT, user_ref, digests)
    return None if record is None else record.session_id


async def test_the_longest_known_history_of_this_end_user_is_found(store: Store, clock: Clock) -> None:
    await meant(store, "mine", b"m2", "u1")
    await meant(store, "short", b"m1", "u1")
    await meant(store, "theirs", b"m3", "u2")
    await meant(store, "nobody", b"m2")
    assert await found(store, "u1", b"m1", b"m2", b"m3") == "mine"
    assert await found(store, "u1", b"m1") == "short"
    assert await found(store, "u2", b"m1", b"m2", b"m3") == "theirs"
    assert await found(store, None, b"m1", b"m2", b"m3") == "nobody"
    assert await found(store, "u3", b"m1", b"m2", b"m3") is None
    assert await found(store, "u1") is None


async def test_of_equal_histories_the_newest_is_found(store: Store, clock: Clock) -> None:
    for number in range(3):
        clock.now += 1
        await meant(store, f"s{number}", b"same")
    assert await found(store, None, *(b"%d" % n for n in range(40)), b"same", *(b"x%d" % n for n in range(40))) == "s2"


async def test_within_one_session_the_newest_turn_of_the_longest_history_is_found(store: Store) -> None:
    for name, meaning in (("a", b"m1"), ("b", b"m2"), ("c", b"m2"), ("d", b"m1")):
        await turn(store, name, None, meaning=meaning)
    await meant(store, "other", b"m3")
    many = [b"%d" % n for n in range(600)]
    best = await store.find_meaning_in(TENANT, SESSION, [b"m1", b"m2", b"m3", *many])
    assert best is not None
    assert best.turn.id == "c"
    assert await store.find_meaning_in(TENANT, SESSION, [b"m3", *many]) is None


async def test_archived_expired_and_erased_sessions_match_nothing(store: Store, clock: Clock) -> None:
    for name in ("archived", "expired", "erased"):
        await meant(store, name, name.encode(), expires_at=clock.now + 1 if name == "expired" else None)
    await store.update_session(TENANT, "archived", None, SessionChanges({"archived_at": clock.now}))
    await store.delete_session(TENANT, "erased")
    clock.now += 1
    assert await found(store, None, b"archived", b"expired", b"erased") is None


async def test_a_session_given_to_another_end_user_matches_theirs(store: Store) -> None:
    await meant(store, "s", b"m", "u1")
    await store.update_session(TENANT, "s", None, SessionChanges({"user_ref": "u2"}))
    assert await found(store, "u1", b"m") is None
    assert await found(store, "u2", b"m") == "s"


# ---- events


async def test_events_come_back_in_order_after_a_seq_and_are_purged_by_age(store: Store, clock: Clock) -> None:
    began = await store.begin_turn(begin("t1", create=session()))
    assert isinstance(began, Begun)
    await store.append_events(TENANT, SESSION, "t1", 0, [b"a", b"\0\xff"], fence=began.fence)
    clock.now += 10
    await store.append_events(TENANT, SESSION, "t1", 2, [b"c"], fence=began.fence)
    assert await store.read_events(TENANT, SESSION, "t1", -1) == [(0, b"a"), (1, b"\0\xff"), (2, b"c")]
    assert await store.read_events(TENANT, SESSION, "t1", 1) == [(2, b"c")]
    assert await store.read_events(TENANT, "other", "t1", -1) == []
    assert await store.purge_events(clock.now) == 2
    assert await store.read_events(TENANT, SESSION, "t1", -1) == [(2, b"c")]


# ---- for operators


async def test_the_last_turns_and_the_totals_span_tenants(store: Store, clock: Clock) -> None:
    for number, tenant in enumerate(("acme", "umbrella")):
        clock.now += 1
        new = session(tenant_id=tenant)
        await store.begin_turn(begin(f"t{number}", tenant_id=tenant, create=new))
    assert [record.turn.id for record in await store.recent_turns(1)] == ["t1"]
    totals = await store.overview()
    assert (totals.sessions, totals.running, totals.turns) == (2, 2, {"in_progress": 2})
    await store.ping()
    assert (await store.schema()).verdict == "current"
