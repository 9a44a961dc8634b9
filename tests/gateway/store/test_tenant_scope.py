"""Another tenant's object is absent, by every method that takes a tenant."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from gateway.store.compaction_records import CompactionOver, StandingView
from gateway.store.records import Begun, LeaseLost, NoSession, SessionChanges, UnknownTurn
from gateway.store.sessions import Store
from tests.gateway.store.conftest import Clock
from tests.gateway.store.test_keys import KEY
from tests.gateway.store.values import (
    OWNER,
    SESSION,
    TENANT,
    begin,
    committing,
    compact,
    compaction,
    finish,
    session,
)

pytestmark = pytest.mark.anyio
OTHER = "umbrella"


async def _refused(call: Awaitable[object], error: type[Exception]) -> bool:
    with pytest.raises(error):
        await call
    return True


async def _renew(store: Store) -> bool:
    held = [(OTHER, SESSION, 2)]
    return await store.renew_leases(OWNER, held) == held


async def _create(store: Store) -> bool:
    made = await store.create_session(session(tenant_id=OTHER))  # the id is free for them
    return made.version == 1 and await store.last_turn(OTHER, SESSION) is None


async def _branch(store: Store) -> bool:
    await store.create_session(session(tenant_id=OTHER))
    return await _refused(store.begin_turn(begin("x", tenant_id=OTHER, parent="t1")), UnknownTurn)


async def _begin(store: Store) -> bool:
    return await store.begin_turn(begin("x", tenant_id=OTHER)) == NoSession()


async def _same_key(store: Store) -> bool:
    keyed = {"idempotency_key": "k", "request_hash": b"h", "create": session(tenant_id=OTHER)}
    return isinstance(await store.begin_turn(begin("x", tenant_id=OTHER, **keyed)), Begun)


async def _begin_compaction(store: Store) -> bool:
    await store.create_session(session(tenant_id=OTHER))
    other = compaction("c2", "t1", 0, tenant_id=OTHER)
    return await _refused(store.begin_compaction(other), UnknownTurn)


async def _view(store: Store) -> bool:
    return await store.view_of(OTHER, SESSION, "t1") == StandingView(None, frozenset())


async def _update(store: Store) -> bool:
    return await store.update_session(OTHER, SESSION, None, SessionChanges({"title": "x"})) is None


# method -> whether the object was absent to OTHER; the running turn is t2 under fence 2, t1 is the answered head,
# c1 its committed compaction, c2 one that runs
CALLS: dict[str, list[Callable[[Store], Awaitable[object]]]] = {
    "create_session": [_create],
    "get_session": [lambda store: store.get_session(OTHER, SESSION)],
    "list_sessions": [lambda store: _sessions(store)],
    "update_session": [_update],
    "delete_session": [lambda store: store.delete_session(OTHER, SESSION)],
    "delete_response": [lambda store: store.delete_response(OTHER, SESSION, "t1")],
    "begin_turn": [_begin, _branch, _same_key],
    "finish_turn": [lambda store: _refused(store.finish_turn(finish("t2", 2, tenant_id=OTHER)), LeaseLost)],
    "release_turn": [lambda store: _refused(store.release_turn(OTHER, SESSION, "t2", 2), LeaseLost)],
    "find_turn": [lambda store: store.find_turn(OTHER, "t1")],
    "get_turn": [lambda store: store.get_turn(OTHER, SESSION, "t1")],
    "get_turn_by_seq": [lambda store: store.get_turn_by_seq(OTHER, SESSION, 1)],
    "find_idempotent": [lambda store: store.find_idempotent(OTHER, SESSION, "k")],
    "last_turn": [
        lambda store: store.last_turn(OTHER, SESSION),
        lambda store: store.last_turn(OTHER, SESSION, "t1"),
    ],
    "list_turns": [
        lambda store: store.list_turns(OTHER, SESSION),
        lambda store: store.list_turns(OTHER, SESSION, path_of="t1"),
    ],
    "path": [lambda store: store.path(OTHER, SESSION, "t1")],
    "path_ids": [lambda store: store.path_ids(OTHER, SESSION, "t1")],
    "find_meaning": [lambda store: store.find_meaning(OTHER, "u", [b"m"])],
    "find_meaning_in": [lambda store: store.find_meaning_in(OTHER, SESSION, [b"m"])],
    "renew_leases": [_renew],
    "request_cancel": [lambda store: store.request_cancel(OTHER, SESSION, "t2")],
    "append_events": [lambda store: _refused(store.append_events(OTHER, SESSION, "t2", 5, [b"x"]), LeaseLost)],
    "read_events": [lambda store: store.read_events(OTHER, SESSION, "t2", -1)],
    "begin_compaction": [
        lambda store: store.begin_compaction(compaction("x", "t1", 1, tenant_id=OTHER)),
        lambda store: _begin_compaction(store),
    ],
    "note_compaction": [
        lambda store: store.note_compaction(compaction("x", "t1", 1, tenant_id=OTHER), error=None, report={})
    ],
    "commit_compaction": [
        lambda store: _refused(store.commit_compaction(OTHER, SESSION, "c2", **committing("t1", 1)), CompactionOver)
    ],
    "renew_compaction": [lambda store: store.renew_compaction(OTHER, SESSION, "c2", 5.0)],
    "end_compaction": [
        lambda store: store.end_compaction(OTHER, SESSION, "c2", status="failed", error=None, report={})
    ],
    "revert_compaction": [lambda store: store.revert_compaction(OTHER, SESSION, "c1")],
    "view_of": [lambda store: _view(store)],
    "list_compactions": [lambda store: store.list_compactions(OTHER, SESSION)],
    "get_compaction": [lambda store: store.get_compaction(OTHER, SESSION, "c1")],
    "pin_turn": [lambda store: store.pin_turn(OTHER, SESSION, "t1", True)],
    "take_back_turn": [lambda store: store.take_back_turn(OTHER, "t2", 2)],
    "rehome": [lambda store: store.rehome(OTHER, SESSION, "t1", {"replica": "b"})],
    "list_keys": [lambda store: _keys(store)],
    "archive_session": [lambda store: store.archive_session(OTHER, SESSION)],
    "unarchive_session": [lambda store: store.unarchive_session(OTHER, SESSION)],
    "begin_user_erasure": [lambda store: _erase_user(store)],
    "running_turns": [
        lambda store: store.running_turns(OTHER, session_id=SESSION),
        lambda store: store.running_turns(OTHER, user_ref="u"),
    ],
    "user_of_erasure": [lambda store: _of_erasure(store, "user_of_erasure")],
    "erase_of_user": [lambda store: _of_erasure(store, "erase_of_user")],
    "get_receipt": [lambda store: _of_erasure(store, "get_receipt")],
    "list_receipts": [lambda store: _receipts(store)],
    "forget_later": [],  # of a session that is gone: reads none
    "standing": [lambda store: _standing(store)],
    "revoke_key": [lambda store: store.revoke_key(OTHER, KEY.id)],
    "touch_key": [lambda store: _touch(store)],
    "add_tenant": [],  # makes a tenant, reads none
    "list_limits": [lambda store: store.list_limits(OTHER)],
    "month_tokens": [lambda store: _tokens(store)],
    "get_tenant": [lambda store: store.get_tenant(OTHER)],
}
TAKE_COMMANDS = {
    "create_session",
    "begin_turn",
    "finish_turn",
    "renew_leases",
    "begin_compaction",
    "note_compaction",
}  # the tenant stands in the command


async def _sessions(store: Store) -> object:
    return (await store.list_sessions(OTHER)).sessions


async def _tokens(store: Store) -> bool:
    return await store.month_tokens(OTHER, None, 0) == 0


async def _keys(store: Store) -> object:
    return (await store.list_keys(OTHER)).keys


async def _erase_user(store: Store) -> bool:
    """Another tenant's end user of the same name."""
    erasure = await store.begin_user_erasure(OTHER, "u", "digest")
    return await store.erase_of_user(OTHER, erasure) is None


async def _of_erasure(store: Store, method: str) -> object:
    erasure = await store.begin_user_erasure(TENANT, "nobody", "digest")
    return await getattr(store, method)(OTHER, erasure)


async def _receipts(store: Store) -> object:
    await store.begin_user_erasure(TENANT, "nobody", "digest")
    return (await store.list_receipts(OTHER)).receipts


async def _standing(store: Store) -> bool:
    return await store.standing(OTHER, SESSION) == "gone"


async def _touch(store: Store) -> bool:
    store.touch_key(OTHER, KEY.id)
    await store.flush_keys()
    return True


def test_every_method_that_takes_a_tenant_is_tried() -> None:
    methods = inspect.getmembers(Store, inspect.isfunction)
    scoped = {name for name, method in methods if "tenant_id" in inspect.signature(method).parameters}
    assert scoped | TAKE_COMMANDS == CALLS.keys()


@pytest.mark.parametrize(("name", "place"), [(name, n) for name, calls in CALLS.items() for n in range(len(calls))])
async def test_absent(store: Store, clock: Clock, name: str, place: int) -> None:
    await store.add_key(KEY)
    await store.create_session(session(user_ref="u"))
    await store.begin_turn(begin("t1", idempotency_key="k", request_hash=b"h"))
    await store.finish_turn(finish("t1", 1, meaning=b"m"))
    await compact(store, "c1", "t1", "t1")
    await store.begin_compaction(compaction("c2", "t1", 1, "c1"))
    await store.begin_turn(begin("t2", "t1"))
    await store.append_events(TENANT, SESSION, "t2", 0, [b"e"])
    before = await everything(store)
    answer = await CALLS[name][place](store)
    assert answer is True or not answer
    assert await everything(store) == before


async def everything(store: Store) -> object:
    """All that the owner sees."""
    return (
        await store.get_session(TENANT, SESSION),
        [replace(turn, model=turn.model) for turn in await store.list_turns(TENANT, SESSION)],
        await store.read_events(TENANT, SESSION, "t2", -1),
        await store.list_keys(TENANT),
        await store.list_compactions(TENANT, SESSION),
        await store.view_of(TENANT, SESSION, "t2"),
        await store.cancelled_turns(OWNER),
    )
