"""The audit log in the store; on both databases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.store import sweep
from gateway.store.audit_records import CLI, OPERATOR, SWEEP, AuditFilter, AuditLine
from gateway.store.records import UnstorableText
from gateway.store.replica_records import NewReplica, NoReplica
from gateway.store.sessions import Store
from tests.gateway.store.conftest import Clock
from tests.gateway.store.values import SESSION, TENANT, begin, session

pytestmark = pytest.mark.anyio

LINE = AuditLine("key.create", "tk-abc", "acme", CLI, request_id=None, details={"admin": True})


async def lines(store: Store, **filter: object) -> list[AuditLine]:
    page = await store.list_audit(limit=100, filter=AuditFilter(**filter))  # type: ignore[arg-type]
    assert page.next_cursor is None
    return [record.line for record in page.records]


async def test_lines_come_back_as_they_were_the_newest_first(store: Store, clock: Clock) -> None:
    later = replace(LINE, action="replica.add", object="a", tenant_id=OPERATOR, request_id="req_1", outcome="refused")
    await store.note(LINE)
    clock.now += 1
    await store.note(later)
    page = await store.list_audit()
    assert [record.line for record in page.records] == [later, LINE]
    assert [record.at for record in page.records] == [clock.now, clock.now - 1]


async def test_they_are_found_by_tenant_action_and_time(store: Store, clock: Clock) -> None:
    begun = clock.now
    made = [LINE, replace(LINE, tenant_id=OPERATOR), replace(LINE, action="key.revoke")]
    for line in made:
        await store.note(line)
        clock.now += 10
    assert await lines(store, tenant_id="acme") == [made[2], made[0]]
    assert await lines(store, tenant_id=OPERATOR) == [made[1]]
    assert await lines(store, action="key.revoke") == [made[2]]
    assert await lines(store, since=begun + 10) == [made[2], made[1]]
    assert await lines(store, until=begun + 10) == [made[0]]


async def test_pages_go_on_where_the_one_before_ended_also_within_one_instant(store: Store) -> None:
    for number in range(7):
        await store.note(replace(LINE, object=str(number)))
    seen, cursor = [], None
    while True:
        page = await store.list_audit(limit=3, cursor=cursor)
        seen += [record.line.object for record in page.records]
        if (cursor := page.next_cursor) is None:
            break
    assert sorted(seen) == [str(number) for number in range(7)]
    with pytest.raises(ValueError, match="not made here"):
        await store.list_audit(cursor="x")


async def test_what_no_database_keeps_is_refused(store: Store) -> None:
    with pytest.raises(UnstorableText):
        await store.note(replace(LINE, object="a\0"))
    assert await lines(store) == []


async def test_old_lines_are_swept(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "PART", 2)
    for number in range(5):
        await store.note(replace(LINE, object=str(number)))
        clock.now += 1
    assert await store.purge_audit(clock.now - 2) == 3
    assert [line.object for line in await lines(store)] == ["4", "3"]


async def test_an_erased_session_has_its_line_in_the_same_transaction_and_an_absent_one_has_none(store: Store) -> None:
    line = AuditLine("session.delete", SESSION, TENANT, "tk-abc", "req_1")
    assert await store.delete_session(TENANT, SESSION, line=line) is None
    assert await lines(store) == []
    await store.create_session(session())
    with pytest.raises(UnstorableText):
        await store.delete_session(TENANT, SESSION, line=replace(line, object="\0"))
    assert await store.get_session(TENANT, SESSION) is not None
    await store.delete_session(TENANT, SESSION, line=line)
    assert await lines(store) == [line]


@pytest.mark.parametrize("finder", ["sweep", "create", "turn"])
async def test_a_session_whose_time_is_over_has_its_line_whoever_comes_upon_it(
    store: Store, clock: Clock, finder: str
) -> None:
    await store.create_session(session(expires_at=clock.now + 1))
    clock.now += 5
    if finder == "sweep":
        await store.erase_expired()
    elif finder == "create":
        await store.create_session(session())
    else:
        await store.begin_turn(begin("t1", create=session()))
    assert await lines(store) == [AuditLine("session.expire", SESSION, TENANT, SWEEP)]


async def test_a_replica_s_line_is_written_with_what_is_done_and_not_without_it(store: Store) -> None:
    line = AuditLine("replica.add", "a", OPERATOR, "tk-abc", "req_1")
    await store.add_replica(NewReplica("a", "http://a", None, {}), limit=1, line=line)
    await store.set_replica_state("a", "draining", reason="", added=True, line=replace(line, action="replica.drain"))
    assert await store.remove_replica("a", line=replace(line, action="replica.remove"))
    assert not await store.remove_replica("a", line=replace(line, action="replica.remove"))
    with pytest.raises(NoReplica):
        await store.set_replica_state("a", "active", reason="", added=True, line=line)
    assert sorted(found.action for found in await lines(store)) == ["replica.add", "replica.drain", "replica.remove"]
