"""Compactions: begun one at a time, committed where their view still stands, reverted; pins; on both databases."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.store.compaction_records import (
    CompactionOver,
    CompactionRecord,
    CompactionRunning,
    StandingView,
    ViewMoved,
)
from gateway.store.records import Begun, DuplicateId, HeadMoved, UnknownTurn, UnstorableText
from gateway.store.sessions import Store
from tests.gateway.store.conftest import Clock
from tests.gateway.store.values import (
    SESSION,
    TENANT,
    begin,
    committing,
    compact,
    compaction,
    finish,
    session,
    talk,
)

pytestmark = pytest.mark.anyio


async def got(store: Store, id: str) -> CompactionRecord:
    record = await store.get_compaction(TENANT, SESSION, id)
    assert record is not None
    return record


async def version(store: Store) -> int:
    record = await store.get_session(TENANT, SESSION)
    assert record is not None
    return record.view_version


async def commit(store: Store, id: str, anchor: str, expected_view: int, **other: Any) -> int:
    return await store.commit_compaction(TENANT, SESSION, id, **committing(anchor, expected_view, **other))


async def fail(store: Store, id: str, **other: Any) -> None:
    ended: dict[str, Any] = {"status": "failed", "error": {"code": "empty_summary"}, "report": {"problems": ["empty"]}}
    await store.end_compaction(TENANT, SESSION, id, **(ended | other))


async def test_a_compaction_comes_back_as_it_was_begun_and_committed(store: Store, clock: Clock) -> None:
    await talk(store, "t1", "t2", "t3")
    new = compaction("c1", "t3", 0, plan={"ranges": [["t1", "é\0"]]}, deadline_s=30.0, trigger="manual")
    begun = await store.begin_compaction(new)
    assert begun is not None
    assert begun == await got(store, "c1")
    assert (begun.number, begun.status, begun.trigger, begun.head_turn_id) == (1, "running", "manual", "t3")
    assert (begun.plan, begun.view, begun.report, begun.error) == ({"ranges": [["t1", "é\0"]]}, None, {}, None)
    assert (begun.created_at, begun.deadline_at, begun.completed_at) == (clock.now, clock.now + 30.0, None)
    assert (begun.anchor_turn_id, begun.anchor_seq, begun.base_id) == (None, None, None)
    clock.now += 2
    view = {"segments": [{"id": "g1", "text": "Zürich\0\u2028"}]}
    assert await commit(store, "c1", "t2", 0, view=view, plan={"way": "extract"}, report={"tokens_after": 9}) == 1
    done = await got(store, "c1")
    assert (done.status, done.view, done.plan, done.report) == (
        "committed",
        view,
        {"way": "extract"},
        {"tokens_after": 9},
    )
    assert (done.anchor_turn_id, done.anchor_seq, done.completed_at) == ("t2", 2, clock.now)
    assert await version(store) == 1
    assert await store.view_of(TENANT, SESSION, "t3") == StandingView(done, frozenset(), 1)


async def test_one_runs_at_a_time_until_its_deadline(store: Store, clock: Clock) -> None:
    await talk(store, "t1")
    await store.begin_compaction(compaction("c1", "t1", 0, deadline_s=60.0))
    with pytest.raises(CompactionRunning) as refused:
        await store.begin_compaction(compaction("c2", "t1", 0))
    assert (refused.value.id, refused.value.until) == ("c1", clock.now + 60)
    clock.now += 60
    second = await store.begin_compaction(compaction("c2", "t1", 0))
    assert second is not None
    assert (second.number, second.status) == (2, "running")
    first = await got(store, "c1")
    assert first.error is not None
    assert (first.status, first.error["code"], first.completed_at) == ("failed", "interrupted", clock.now)


async def test_one_that_says_that_it_is_at_work_keeps_its_place_and_one_that_is_over_is_told(
    store: Store, clock: Clock
) -> None:
    await talk(store, "t1")
    await store.begin_compaction(compaction("c1", "t1", 0, deadline_s=60.0))
    clock.now += 50
    assert await store.renew_compaction(TENANT, SESSION, "c1", 60.0)
    clock.now += 50
    assert await store.lapse_compactions() == 0
    with pytest.raises(CompactionRunning):
        await store.begin_compaction(compaction("c2", "t1", 0))
    clock.now += 10
    assert await store.lapse_compactions() == 1
    assert not await store.renew_compaction(TENANT, SESSION, "c1", 60.0)
    assert (await got(store, "c1")).status == "failed"
    assert not await store.renew_compaction(TENANT, SESSION, "nowhere", 60.0)


async def test_one_that_supersedes_ends_the_one_that_runs_and_says_so(store: Store) -> None:
    await talk(store, "t1", "t2")
    await store.begin_compaction(compaction("c1", "t2", 0))
    await store.begin_compaction(compaction("c2", "t2", 0, owner="other/1", supersedes=True))
    first = await got(store, "c1")
    assert first.error is not None
    assert (first.status, first.error["code"]) == ("failed", "superseded")
    with pytest.raises(CompactionOver):
        await commit(store, "c1", "t1", 0)
    assert await commit(store, "c2", "t1", 0) == 1


async def test_after_one_ended_the_next_begins(store: Store) -> None:
    await talk(store, "t1")
    await store.begin_compaction(compaction("c1", "t1", 0))
    await fail(store, "c1", plan={"way": "trim"})
    ended = await got(store, "c1")
    assert (ended.status, ended.error, ended.report) == ("failed", {"code": "empty_summary"}, {"problems": ["empty"]})
    assert (ended.plan, ended.view) == ({"way": "trim"}, None)
    assert await store.begin_compaction(compaction("c2", "t1", 0)) is not None
    assert await version(store) == 0


async def test_one_on_a_view_that_moved_is_refused_at_its_begin_and_at_its_commit(store: Store) -> None:
    await talk(store, "t1", "t2")
    await store.begin_compaction(compaction("c1", "t2", 0))
    await store.pin_turn(TENANT, SESSION, "t1", True)
    with pytest.raises(ViewMoved) as refused:
        await commit(store, "c1", "t2", 0)
    assert refused.value.current == 1
    assert (await got(store, "c1")).status == "running"
    await fail(store, "c1", status="skipped", error={"code": "view_moved"})
    with pytest.raises(ViewMoved):
        await store.begin_compaction(compaction("c2", "t2", 0))
    assert [each.status for each in await store.list_compactions(TENANT, SESSION)] == ["skipped"]
    assert await version(store) == 1


async def test_said_twice_a_begin_and_a_commit_stay_as_they_are(store: Store) -> None:
    await talk(store, "t1")
    first = await store.begin_compaction(compaction("c1", "t1", 0))
    assert await store.begin_compaction(compaction("c1", "t1", 0)) == first
    with pytest.raises(CompactionRunning):
        await store.begin_compaction(compaction("c1", "t1", 0, owner="gw/2"))
    assert await commit(store, "c1", "t1", 0) == 1
    await store.pin_turn(TENANT, SESSION, "t1", True)
    assert await commit(store, "c1", "t1", 0) == 1
    assert await version(store) == 2
    with pytest.raises(CompactionOver) as over:
        await commit(store, "c1", "t1", 0, view={"segments": []})
    assert over.value.status == "committed"


async def test_one_that_ended_is_not_committed_and_does_not_end_again(store: Store) -> None:
    await talk(store, "t1")
    await store.begin_compaction(compaction("c1", "t1", 0))
    await fail(store, "c1")
    before = await got(store, "c1")
    with pytest.raises(CompactionOver) as over:
        await commit(store, "c1", "t1", 0)
    assert over.value.status == "failed"
    await fail(store, "c1", status="skipped", error=None)
    assert await got(store, "c1") == before
    await compact(store, "c2", "t1", "t1")
    await fail(store, "c2")
    assert (await got(store, "c2")).status == "committed"


async def test_a_late_commit_counts_while_nobody_has_failed_it(store: Store, clock: Clock) -> None:
    await talk(store, "t1")
    await store.begin_compaction(compaction("c1", "t1", 0, deadline_s=1.0))
    clock.now += 10
    assert await commit(store, "c1", "t1", 0) == 1


async def test_what_it_names_must_be_of_its_session(store: Store) -> None:
    await talk(store, "t1")
    await talk(store, "u1", session_id="s2")
    assert await store.begin_compaction(compaction("c1", "t1", 0, session_id="nowhere")) is None
    with pytest.raises(UnknownTurn):
        await store.begin_compaction(compaction("c1", "u1", 0))
    with pytest.raises(ValueError, match="no view of compaction 'c9'"):
        await store.begin_compaction(compaction("c1", "t1", 0, base="c9"))
    await store.begin_compaction(compaction("c1", "t1", 0))
    with pytest.raises(UnknownTurn):
        await commit(store, "c1", "u1", 0)
    with pytest.raises(CompactionOver) as over:
        await store.commit_compaction(TENANT, "s2", "c1", **committing("u1", 0))
    assert over.value.status is None
    with pytest.raises(DuplicateId):
        await store.begin_compaction(compaction("c1", "u1", 0, session_id="s2"))
    with pytest.raises(UnstorableText):
        await store.begin_compaction(compaction("c\0", "u1", 0, session_id="s2"))


async def test_a_reverted_one_is_no_base(store: Store) -> None:
    await talk(store, "t1")
    await compact(store, "c1", "t1", "t1")
    await store.revert_compaction(TENANT, SESSION, "c1")
    with pytest.raises(ValueError, match="no view of compaction 'c1'"):
        await store.begin_compaction(compaction("c2", "t1", 2, base="c1"))


# ---- turns meanwhile


async def test_a_turn_that_was_begun_before_the_commit_ends_after_it(store: Store) -> None:
    await talk(store, "t1", "t2")
    await store.begin_compaction(compaction("c1", "t2", 0))
    begun = await store.begin_turn(begin("t3", "t2", expected_view=0))
    assert isinstance(begun, Begun)
    assert await commit(store, "c1", "t1", 0) == 1
    await store.finish_turn(finish("t3", begun.fence))
    record = await store.get_session(TENANT, SESSION)
    assert record is not None
    assert (record.head_turn_id, record.view_version, record.status) == ("t3", 1, "idle")
    standing = await store.view_of(TENANT, SESSION, "t3")
    assert standing.compaction is not None
    assert standing.compaction.id == "c1"


async def test_a_prompt_built_through_another_view_is_refused(store: Store) -> None:
    await talk(store, "t1")
    await compact(store, "c1", "t1", "t1")
    assert await store.begin_turn(begin("t2", "t1", expected_view=0)) == HeadMoved("t1")
    assert await store.begin_turn(begin("t2", "t1", expected_view=2)) == HeadMoved("t1")
    branch = begin("t2", parent="t1", expected_view=0)
    assert await store.begin_turn(branch) == HeadMoved("t1")
    assert isinstance(await store.begin_turn(begin("t2", "t1", expected_view=1)), Begun)


async def test_a_session_that_is_made_with_the_turn_asks_for_no_view(store: Store) -> None:
    assert isinstance(await store.begin_turn(begin("t1", create=session(), expected_view=0)), Begun)
    assert await version(store) == 0


# ---- the end of the view


async def test_a_revert_takes_back_what_builds_on_it_and_nothing_else(store: Store) -> None:
    await talk(store, "t1", "t2", "t3", "t4")
    await compact(store, "c1", "t1", "t4")
    await compact(store, "c2", "t2", "t4")
    await talk(store, "b1", parent="t1")
    await compact(store, "c3", "b1", "b1")  # on another branch, on c1
    await compact(store, "c4", "t3", "t4")  # on c2
    reverted = await store.revert_compaction(TENANT, SESSION, "c2")
    assert reverted == await got(store, "c2")
    statuses = {each.id: each.status for each in await store.list_compactions(TENANT, SESSION)}
    assert statuses == {"c1": "committed", "c2": "reverted", "c3": "committed", "c4": "reverted"}
    assert await version(store) == 5
    standing = await store.view_of(TENANT, SESSION, "t4")
    assert standing.compaction is not None
    assert standing.compaction.id == "c1"
    with pytest.raises(ValueError, match="is reverted"):
        await store.revert_compaction(TENANT, SESSION, "c2")
    assert await store.revert_compaction(TENANT, SESSION, "nowhere") is None
    await store.revert_compaction(TENANT, SESSION, "c1")
    assert {each.status for each in await store.list_compactions(TENANT, SESSION)} == {"reverted"}


async def test_one_that_runs_on_a_reverted_view_is_not_committed(store: Store) -> None:
    await talk(store, "t1", "t2")
    await compact(store, "c1", "t1", "t2")
    await store.begin_compaction(compaction("c2", "t2", 1, "c1"))
    await store.revert_compaction(TENANT, SESSION, "c1")
    with pytest.raises(ViewMoved):
        await commit(store, "c2", "t2", 1)
    with pytest.raises(ValueError, match="is running"):
        await store.revert_compaction(TENANT, SESSION, "c2")


async def test_an_erased_session_takes_its_compactions_with_it(store: Store) -> None:
    await talk(store, "t1")
    await compact(store, "c1", "t1", "t1")
    await store.begin_compaction(compaction("c2", "t1", 1, "c1"))
    receipt = await store.delete_session(TENANT, SESSION)
    assert receipt is not None
    assert receipt.erased == {
        "compactions": 2,
        "events": 0,
        "handovers": 0,
        "items": 2,
        "turns": 1,
        "session_metadata": 0,
        "sessions": 1,
    }
    assert await store.get_compaction(TENANT, SESSION, "c1") is None
    with pytest.raises(CompactionOver):
        await commit(store, "c2", "t1", 1)
    await talk(store, "t1")
    again = await store.begin_compaction(compaction("c1", "t1", 0))
    assert again is not None
    assert again.number == 1


async def test_an_expired_session_is_absent(store: Store, clock: Clock) -> None:
    await store.create_session(session(expires_at=clock.now + 10))
    await talk(store, "t1")
    clock.now += 10
    assert await store.begin_compaction(compaction("c1", "t1", 0)) is None
    assert await store.note_compaction(compaction("c1", "t1", 0), error=None, report={}) is None
    assert await store.pin_turn(TENANT, SESSION, "t1", True) is None


# ---- lists, notes, pins


async def test_a_note_is_a_skipped_row_whatever_runs(store: Store) -> None:
    await talk(store, "t1")
    await store.begin_compaction(compaction("c1", "t1", 0))
    noted = await store.note_compaction(
        compaction("c2", "t1", 7), error={"code": "floor"}, report={"tokens_before": 9000}
    )
    assert noted is not None
    assert noted == await got(store, "c2")
    assert (noted.number, noted.status, noted.error) == (2, "skipped", {"code": "floor"})
    assert noted.completed_at == noted.created_at
    assert await store.note_compaction(compaction("c3", "t1", 0, session_id="s9"), error=None, report={}) is None
    assert (await got(store, "c1")).status == "running"
    assert await version(store) == 0


async def test_pages_of_compactions_go_from_the_newest_down(store: Store) -> None:
    await talk(store, "t1")
    for number in range(1, 6):
        await store.note_compaction(compaction(f"c{number}", "t1", 0), error=None, report={})
    first = await store.list_compactions(TENANT, SESSION, limit=2)
    assert [each.number for each in first] == [5, 4]
    assert [each.id for each in await store.list_compactions(TENANT, SESSION, before=4)] == ["c3", "c2", "c1"]


async def test_a_pin_moves_the_view_where_it_changes_something(store: Store) -> None:
    await talk(store, "t1", "t2")
    pinned = await store.pin_turn(TENANT, SESSION, "t1", True)
    assert pinned is not None
    assert pinned == await store.get_turn(TENANT, SESSION, "t1")
    assert pinned.pinned
    assert len(pinned.turn.input) == 1
    assert await version(store) == 1
    await store.pin_turn(TENANT, SESSION, "t1", True)
    await store.pin_turn(TENANT, SESSION, "t2", False)
    assert await version(store) == 1
    assert await store.view_of(TENANT, SESSION, "t2") == StandingView(None, frozenset({"t1"}), 1)
    assert [turn.pinned for turn in await store.path(TENANT, SESSION, "t2")] == [True, False]
    assert [turn.pinned for turn in await store.list_turns(TENANT, SESSION)] == [True, False]
    last = await store.last_turn(TENANT, SESSION, "t1")
    assert last is not None
    assert last.pinned
    unpinned = await store.pin_turn(TENANT, SESSION, "t1", False)
    assert unpinned is not None
    assert not unpinned.pinned
    assert await version(store) == 2
    assert await store.pin_turn(TENANT, SESSION, "nowhere", True) is None
    assert await store.pin_turn(TENANT, "s9", "t1", True) is None


async def test_a_pin_on_a_view_that_moved_is_refused(store: Store) -> None:
    await talk(store, "t1", "t2")
    await store.pin_turn(TENANT, SESSION, "t1", True, expected_view=0)
    with pytest.raises(ViewMoved):
        await store.pin_turn(TENANT, SESSION, "t2", True, expected_view=0)
    assert [turn.pinned for turn in await store.path(TENANT, SESSION, "t2")] == [True, False]
    await store.pin_turn(TENANT, SESSION, "t2", True, expected_view=1)
    assert await version(store) == 2


async def test_a_turn_that_a_compaction_has_seen_does_not_run_again_in_its_place(store: Store) -> None:
    keyed = {"idempotency_key": "k", "request_hash": b"h"}
    await talk(store, "t1")
    first = await store.begin_turn(begin("t2", "t1", **keyed))
    assert isinstance(first, Begun)
    await store.finish_turn(finish("t2", first.fence, status="incomplete", finish_reason=None))
    view = await compact(store, "c1", "t2", "t2")
    assert await store.begin_turn(begin("t3", "t2", **keyed)) == HeadMoved("t1")
    again = await store.begin_turn(begin("t3", "t1", **keyed))
    assert isinstance(again, Begun)
    assert (again.reopened, again.turn_id, again.parent_id) == (False, "t3", "t1")
    await store.finish_turn(finish("t3", again.fence))
    assert (await store.view_of(TENANT, SESSION, "t3")).compaction is None
    assert (await store.view_of(TENANT, SESSION, "t2")).compaction is not None
    assert view == 1


async def test_no_compaction_begins_of_a_turn_that_runs_again(store: Store) -> None:
    keyed = {"idempotency_key": "k", "request_hash": b"h"}
    await talk(store, "t1")
    first = await store.begin_turn(begin("t2", "t1", **keyed))
    assert isinstance(first, Begun)
    await store.finish_turn(finish("t2", first.fence, status="incomplete", finish_reason=None))
    again = await store.begin_turn(begin("t3", "t1", **keyed))
    assert isinstance(again, Begun)
    assert again.reopened
    with pytest.raises(ViewMoved):  # its snapshot has the answer that was
        await store.begin_compaction(compaction("c1", "t2", 0))
