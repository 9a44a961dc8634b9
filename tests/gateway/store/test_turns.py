"""Two durable writes a turn: what each promises, on both databases."""

from __future__ import annotations

import asyncio

import pytest

from compression.conversation import Item
from gateway.store.records import (
    Begun,
    Busy,
    DuplicateId,
    HeadMoved,
    Known,
    LeaseLost,
    NoSession,
    SessionChanges,
    SessionFilter,
    UnknownTurn,
    UnstorableText,
)
from gateway.store.sessions import Store
from tests.gateway.store.conftest import Clock
from tests.gateway.store.values import OWNER, SESSION, TENANT, begin, finish, ids, said, session, tokens

pytestmark = pytest.mark.anyio


async def begun(store: Store, turn_id: str, head: str | None = None, **other: object) -> Begun:
    outcome = await store.begin_turn(begin(turn_id, head, **other))
    assert isinstance(outcome, Begun), outcome
    return outcome


async def answered(store: Store, turn_id: str, head: str | None = None, **other: object) -> None:
    await store.finish_turn(finish(turn_id, (await begun(store, turn_id, head)).fence, **other))


@pytest.fixture
async def open_session(store: Store) -> None:
    await store.create_session(session())


async def test_a_turn_comes_back_as_it_was_stored(store: Store) -> None:
    payload = {"type": "message", "role": "user", "content": "naïve \u0000 😀 \u2028", "z": 1, "a": [1.5, None, True]}
    began = await store.begin_turn(
        begin("t1", create=session(), input=(Item("message", payload),), idempotency_key="k", request_hash=b"h")
    )
    assert began == Begun(seq=1, fence=1, parent_id=None, turn_id="t1", made=True)
    kept = tokens(0, ids(1, 2), ids(3), open_answer=True)
    await store.finish_turn(
        finish(
            "t1",
            1,
            tokens=kept,
            meaning=b"m",
            usage={"prompt_tokens": 2},
            placement={"replica": "r"},
            metadata={"a": 1},
        )
    )
    record = await store.get_turn(TENANT, SESSION, "t1")
    assert record is not None
    assert record.turn.input[0].payload == payload
    assert list(record.turn.input[0].payload) == list(payload)
    assert record.turn.output == said("answer t1", "assistant")
    assert (record.turn.status, record.finish_reason, record.meaning) == ("completed", "stop", b"m")
    assert record.tokens == kept
    assert (record.usage, record.placement, record.metadata) == ({"prompt_tokens": 2}, {"replica": "r"}, {"a": 1})
    assert (record.idempotency_key, record.request_hash) == ("k", b"h")


@pytest.mark.usefixtures("open_session")
async def test_one_turn_at_a_time(store: Store, clock: Clock) -> None:
    await begun(store, "t1")
    clock.now += 1
    assert await store.begin_turn(begin("t2")) == Busy("t1", 4.0)
    assert await store.get_turn(TENANT, SESSION, "t2") is None


@pytest.mark.usefixtures("open_session")
async def test_the_lease_ends_with_the_answer_and_the_head_moves(store: Store) -> None:
    await answered(store, "t1")
    second = await begun(store, "t2", "t1")
    assert (second.seq, second.fence, second.parent_id) == (2, 2, "t1")


@pytest.mark.usefixtures("open_session")
async def test_a_turn_off_the_head_does_not_move_it(store: Store) -> None:
    await answered(store, "t1")
    began = await begun(store, "t2", parent=None)
    await store.finish_turn(finish("t2", began.fence, move_head=False))
    record = await store.get_session(TENANT, SESSION)
    assert record is not None
    assert record.head_turn_id == "t1"


async def test_no_session(store: Store) -> None:
    assert await store.begin_turn(begin("t1")) == NoSession()


@pytest.mark.usefixtures("open_session")
async def test_a_prompt_built_on_another_head_or_version_is_refused(store: Store) -> None:
    await answered(store, "t1")
    assert await store.begin_turn(begin("t2", None)) == HeadMoved("t1")
    await store.update_session(TENANT, SESSION, 1, SessionChanges({"system": "be brief"}))
    assert await store.begin_turn(begin("t2", "t1", expected_version=1)) == HeadMoved("t1")
    assert (await begun(store, "t2", "t1", expected_version=2)).seq == 2


@pytest.mark.usefixtures("open_session")
async def test_a_parent_must_be_a_turn_of_this_session(store: Store) -> None:
    await store.begin_turn(begin("other", session_id="s2", create=session("s2")))
    for parent in ("other", "nowhere"):
        with pytest.raises(UnknownTurn):
            await store.begin_turn(begin("t1", parent=parent))


@pytest.mark.usefixtures("open_session")
async def test_a_lapsed_lease_leaves_an_incomplete_turn_and_a_free_session(store: Store, clock: Clock) -> None:
    first = await begun(store, "t1")
    clock.now += 5.0
    second = await begun(store, "t2", owner="other/1")
    assert second.fence == first.fence + 1
    lapsed = await store.get_turn(TENANT, SESSION, "t1")
    assert lapsed is not None
    assert lapsed.turn.status == "incomplete"
    with pytest.raises(LeaseLost):
        await store.finish_turn(finish("t1", first.fence))
    await store.finish_turn(finish("t2", second.fence))
    kept = await store.get_turn(TENANT, SESSION, "t1")
    assert kept is not None
    assert kept.turn.output == ()


@pytest.mark.usefixtures("open_session")
async def test_a_late_answer_counts_while_nobody_took_the_session(store: Store, clock: Clock) -> None:
    first = await begun(store, "t1")
    clock.now += 60.0
    await store.finish_turn(finish("t1", first.fence))
    record = await store.last_turn(TENANT, SESSION)
    assert record is not None
    assert (record.turn.id, record.turn.status) == ("t1", "completed")


@pytest.mark.usefixtures("open_session")
async def test_a_finish_said_twice_stays_as_it_is(store: Store) -> None:
    first = await begun(store, "t1")
    await store.finish_turn(finish("t1", first.fence))
    await store.finish_turn(finish("t1", first.fence))
    record = await store.get_turn(TENANT, SESSION, "t1")
    assert record is not None
    assert len(record.turn.output) == 1


@pytest.mark.usefixtures("open_session")
async def test_a_lost_fence_fails_alone_in_its_batch(store: Store) -> None:
    for number in range(6):
        await store.create_session(session(f"b{number}"))
    fences = [(await begun(store, f"b{n}t", session_id=f"b{n}")).fence for n in range(6)]
    fences[3] += 1
    results = await asyncio.gather(
        *(store.finish_turn(finish(f"b{n}t", fences[n], session_id=f"b{n}")) for n in range(6)), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None)] * 3 + [LeaseLost] + [type(None)] * 2


@pytest.mark.usefixtures("open_session")
async def test_a_clashing_id_fails_alone_in_its_batch(store: Store) -> None:
    await answered(store, "t1")
    for number in range(3):
        await store.create_session(session(f"b{number}"))
    names = ["new0", "t1", "new2"]
    results = await asyncio.gather(
        *(store.begin_turn(begin(names[n], session_id=f"b{n}")) for n in range(3)), return_exceptions=True
    )
    assert [type(result) for result in results] == [Begun, DuplicateId, Begun]


@pytest.mark.usefixtures("open_session")
async def test_many_commands_for_one_session_in_one_batch(store: Store) -> None:
    results = await asyncio.gather(*(store.begin_turn(begin(f"t{n}")) for n in range(10)))
    assert [type(result) for result in results] == [Begun] + [Busy] * 9


@pytest.mark.usefixtures("open_session")
async def test_a_released_turn_leaves_no_trace(store: Store) -> None:
    first = await begun(store, "t1", idempotency_key="k", request_hash=b"h")
    await store.release_turn(TENANT, SESSION, "t1", first.fence)
    assert await store.get_turn(TENANT, SESSION, "t1") is None
    assert (await begun(store, "t2", idempotency_key="k", request_hash=b"h")).seq == 1
    with pytest.raises(LeaseLost):
        await store.release_turn(TENANT, SESSION, "t1", first.fence)


async def test_a_session_made_for_a_released_turn_goes_with_it(store: Store) -> None:
    made = await begun(store, "t1", create=session(origin="chat", metadata={"a": "b"}))
    await store.release_turn(TENANT, SESSION, "t1", made.fence)
    assert await store.get_session(TENANT, SESSION) is None


# ---- idempotency


@pytest.mark.usefixtures("open_session")
async def test_a_key_attaches_to_the_running_turn_and_replays_the_answered_one(store: Store) -> None:
    keyed = {"idempotency_key": "k", "request_hash": b"h"}
    first = await begun(store, "t1", **keyed)
    running = await store.begin_turn(begin("t2", **keyed))
    assert isinstance(running, Known)
    assert (running.turn.turn.id, running.turn.turn.status, running.same_request) == ("t1", "in_progress", True)
    await store.finish_turn(finish("t1", first.fence))
    done = await store.begin_turn(begin("t3", **keyed))
    assert isinstance(done, Known)
    assert done.turn.turn.output == said("answer t1", "assistant")
    other = await store.begin_turn(begin("t4", idempotency_key="k", request_hash=b"other"))
    assert isinstance(other, Known)
    assert not other.same_request


@pytest.mark.usefixtures("open_session")
@pytest.mark.parametrize("ending", ["lapse", "failed", "cut off"])
async def test_an_unanswered_turn_is_reopened_by_its_key(store: Store, clock: Clock, ending: str) -> None:
    keyed = {"idempotency_key": "k", "request_hash": b"h"}
    first = await begun(store, "t1", **keyed)
    await store.append_events(TENANT, SESSION, "t1", 0, [b"old"], fence=first.fence)
    if ending == "lapse":
        clock.now += 5.0
    else:
        status = "failed" if ending == "failed" else "incomplete"
        partial = {"status": status, "finish_reason": None, "tokens": tokens(0, ids(1), ids(2)), "move_head": False}
        await store.finish_turn(finish("t1", first.fence, **partial))
    again = await begun(store, "t2", **keyed)
    assert again == Begun(seq=1, fence=2, parent_id=None, reopened=True, turn_id="t1")
    assert await store.read_events(TENANT, SESSION, "t1", -1) == []
    with pytest.raises(LeaseLost):
        await store.append_events(TENANT, SESSION, "t1", 1, [b"late"], fence=first.fence)
    await store.finish_turn(finish("t1", again.fence, tokens=tokens(0, ids(1), ids(3))))
    turns = await store.list_turns(TENANT, SESSION)
    assert [(turn.turn.id, turn.turn.status, len(turn.turn.input), len(turn.turn.output)) for turn in turns] == [
        ("t1", "completed", 1, 1)
    ]


@pytest.mark.usefixtures("open_session")
@pytest.mark.parametrize("reason", ["length", "cancelled"])
async def test_an_incomplete_answer_with_a_reason_is_an_answer(store: Store, reason: str) -> None:
    keyed = {"idempotency_key": "k", "request_hash": b"h"}
    first = await begun(store, "t1", **keyed)
    await store.finish_turn(finish("t1", first.fence, status="incomplete", finish_reason=reason))
    assert isinstance(await store.begin_turn(begin("t2", "t1", **keyed)), Known)


@pytest.mark.usefixtures("open_session")
async def test_a_retry_is_built_on_what_the_turn_was_built_on(store: Store) -> None:
    keyed = {"idempotency_key": "k", "request_hash": b"h"}
    await answered(store, "t1")
    second = await begun(store, "t2", "t1", **keyed)
    await store.finish_turn(finish("t2", second.fence, status="incomplete", finish_reason=None))  # and it is the head
    assert await store.begin_turn(begin("t3", "t2", **keyed)) == HeadMoved("t1")
    assert (await begun(store, "t3", "t1", **keyed)).reopened
    record = await store.get_session(TENANT, SESSION)
    assert record is not None
    assert record.head_turn_id == "t1"


@pytest.mark.usefixtures("open_session")
async def test_a_retry_after_the_conversation_went_on_is_a_new_turn_at_its_end(store: Store) -> None:
    keyed = {"idempotency_key": "k", "request_hash": b"h"}
    first = await begun(store, "t1", **keyed)
    await store.finish_turn(finish("t1", first.fence, status="failed", finish_reason=None, move_head=False))
    await answered(store, "t2")
    assert await store.begin_turn(begin("t3", None, **keyed)) == HeadMoved("t2")
    assert (await begun(store, "t3", "t2", **keyed)) == Begun(seq=3, fence=3, parent_id="t2", turn_id="t3")
    found = await store.find_idempotent(TENANT, SESSION, "k")
    assert found is not None
    assert found.turn.id == "t3"


@pytest.mark.usefixtures("open_session")
async def test_a_retry_of_a_turn_that_another_builds_on_is_a_branch_beside_it(store: Store) -> None:
    keyed = {"parent": "t1", "idempotency_key": "k", "request_hash": b"h"}
    await answered(store, "t1")
    second = await begun(store, "t2", "t1", **keyed)
    await store.finish_turn(finish("t2", second.fence, status="incomplete", finish_reason=None))
    await answered(store, "t3", "t2")
    assert await begun(store, "t4", "t1", **keyed) == Begun(seq=4, fence=4, parent_id="t1", turn_id="t4")
    before = await store.path(TENANT, SESSION, "t3")
    assert [(record.turn.id, len(record.turn.output)) for record in before] == [("t1", 1), ("t2", 1), ("t3", 1)]


@pytest.mark.usefixtures("open_session")
async def test_a_forgotten_key_may_be_used_anew(store: Store, clock: Clock) -> None:
    first = await begun(store, "t1", idempotency_key="k", request_hash=b"h")
    await store.finish_turn(finish("t1", first.fence))
    clock.now += 100
    assert await store.forget_keys(clock.now) == 1
    assert (await begun(store, "t2", "t1", idempotency_key="k", request_hash=b"other")).seq == 2


# ---- leases and cancelling


@pytest.mark.usefixtures("open_session")
async def test_a_renewed_lease_holds_and_a_lost_one_is_named(store: Store, clock: Clock) -> None:
    first = await begun(store, "t1")
    clock.now += 4.0
    held, gone = (TENANT, SESSION, first.fence), (TENANT, SESSION, first.fence - 1)
    assert await store.renew_leases(OWNER, [held, gone, (TENANT, "nowhere", 1)], 5.0) == [gone, (TENANT, "nowhere", 1)]
    clock.now += 4.0
    assert isinstance(await store.begin_turn(begin("t2")), Busy)
    assert await store.renew_leases("other/1", [held]) == [held]


async def test_a_restarted_gateway_voids_its_own_leases_alone(store: Store) -> None:
    for name, owner in (("a", "gw/1"), ("b", "gw/2"), ("c", "gw-other/1"), ("d", "g_/1")):
        await begun(store, f"{name}t", session_id=name, owner=owner, create=session(name))
    assert [(turn.session_id, turn.turn_id) for turn in await store.void_leases("gw", "2")] == [("a", "at")]
    assert await store.void_leases("g%", "2") == []
    turn = await store.get_turn(TENANT, "a", "at")
    assert turn is not None
    assert turn.turn.status == "incomplete"
    assert (await begun(store, "next", session_id="a")).seq == 2
    assert isinstance(await store.begin_turn(begin("no", session_id="c")), Busy)


@pytest.mark.usefixtures("open_session")
async def test_the_sweep_ends_what_nobody_renewed(store: Store, clock: Clock) -> None:
    await begun(store, "t1")
    assert await store.lapse_leases() == []
    clock.now += 5.0
    assert [turn.turn_id for turn in await store.lapse_leases()] == ["t1"]
    record = await store.get_session(TENANT, SESSION)
    assert record is not None
    assert record.status == "idle"


@pytest.mark.usefixtures("open_session")
async def test_a_cancel_reaches_the_owner_and_ends_with_the_turn(store: Store) -> None:
    assert not await store.request_cancel(TENANT, SESSION, "t1")
    first = await begun(store, "t1")
    assert await store.request_cancel(TENANT, SESSION, "t1")
    assert [turn.turn_id for turn in await store.cancelled_turns(OWNER)] == ["t1"]
    assert await store.cancelled_turns("other/1") == []
    await store.finish_turn(finish("t1", first.fence))
    assert await store.cancelled_turns(OWNER) == []
    await begun(store, "t2", "t1")
    assert await store.cancelled_turns(OWNER) == []


# ---- what cannot be stored


@pytest.mark.usefixtures("open_session")
@pytest.mark.parametrize("bad", ["a\0b", "\ud800"])
async def test_text_that_one_database_would_refuse_is_refused_by_both(store: Store, bad: str) -> None:
    with pytest.raises(UnstorableText):
        await store.begin_turn(begin("t1", idempotency_key=bad))
    with pytest.raises(UnstorableText):
        await store.create_session(session("s2", title=bad))
    assert (await begun(store, "t1")).seq == 1


@pytest.mark.usefixtures("open_session")
async def test_a_lone_surrogate_in_an_item_fails_its_turn_alone(store: Store) -> None:
    with pytest.raises(TypeError):
        await store.begin_turn(begin("t1", input=said("\ud800")))
    assert await store.list_turns(TENANT, SESSION) == ()


async def test_a_lease_from_before_the_clock_stepped_back_is_over(store: Store, clock: Clock) -> None:
    """Everywhere alike: nobody is told that the session is busy, and the next turn takes it."""
    await store.begin_turn(begin("t1", create=session()))
    for by_s, status in ((0.0, "running"), (-60.0, "running"), (-3600.0, "idle")):
        clock.now += by_s
        found = await store.get_session(TENANT, SESSION)
        assert found is not None
        assert found.status == status
        for asked in ("running", "idle"):
            page = await store.list_sessions(TENANT, filter=SessionFilter(status=asked))
            assert [one.id for one in page.sessions] == ([SESSION] if asked == status else [])
    assert isinstance(await store.begin_turn(begin("t2")), Begun)
    before = await store.get_turn(TENANT, SESSION, "t1")
    assert before is not None
    assert before.turn.status == "incomplete"
