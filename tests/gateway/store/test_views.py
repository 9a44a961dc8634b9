"""Which view stands on a path: the one at the first anchor on the way up, found at the cost of the way there."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import sqlite3
import uuid
from collections.abc import Sequence
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine

from gateway.store import views
from gateway.store.compaction_records import CompactionRecord, StandingView
from gateway.store.sessions import Store, open_store
from tests.gateway.store.conftest import Clock
from tests.gateway.store.values import SESSION, TENANT, committing, compact, compaction, talk

pytestmark = pytest.mark.anyio


async def standing(store: Store, turn_id: str) -> str | None:
    found = (await store.view_of(TENANT, SESSION, turn_id)).compaction
    return found and found.id


async def test_a_view_stands_on_the_paths_through_its_anchor(store: Store) -> None:
    await talk(store, *(f"t{number}" for number in range(1, 7)))
    await compact(store, "c1", "t2", "t6")
    await compact(store, "c2", "t4", "t6")
    assert [await standing(store, f"t{number}") for number in range(1, 7)] == [None, "c1", "c1", "c2", "c2", "c2"]
    await talk(store, "e1", "e2", parent="t3")  # an edit below the second anchor
    assert await standing(store, "e2") == "c1"
    await talk(store, "f1", parent="t1")  # and one below both
    assert await standing(store, "f1") is None
    assert await standing(store, "t6") == "c2"


async def test_of_two_views_at_one_anchor_the_newest_stands(store: Store) -> None:
    await talk(store, "t1", "t2")
    await compact(store, "c1", "t1", "t2")
    await compact(store, "c2", "t1", "t2")
    assert await standing(store, "t2") == "c2"
    await store.revert_compaction(TENANT, SESSION, "c2")
    assert await standing(store, "t2") == "c1"
    await store.revert_compaction(TENANT, SESSION, "c1")
    assert await standing(store, "t2") is None


async def test_a_view_made_on_one_branch_does_not_undo_what_was_compacted_on_another(store: Store) -> None:
    """It is newer, and its anchor is on both paths, but further up than that of the other branch's own view."""
    await talk(store, *(f"t{number}" for number in range(1, 7)))
    await compact(store, "c1", "t5", "t6")
    await talk(store, "e1", parent="t3")
    await compact(store, "c2", "t2", "e1")
    assert await standing(store, "e1") == "c2"
    assert await standing(store, "t6") == "c1"


async def test_only_what_is_committed_stands(store: Store) -> None:
    await talk(store, "t1")
    await store.begin_compaction(compaction("c1", "t1", 0))
    assert await store.view_of(TENANT, SESSION, "t1") == StandingView(None, frozenset())
    await store.end_compaction(TENANT, SESSION, "c1", status="failed", error=None, report={})
    await store.note_compaction(compaction("c2", "t1", 0), error=None, report={})
    assert await standing(store, "t1") is None


async def test_a_turn_that_is_not_there_or_of_another_session_is_seen_raw(store: Store) -> None:
    await talk(store, "t1")
    await compact(store, "c1", "t1", "t1")
    await talk(store, "u1", session_id="s2")
    assert await standing(store, "nowhere") is None
    assert await standing(store, "u1") is None
    assert (await store.view_of(TENANT, "s2", "t1")).compaction is None


# ---- against a naive search


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Steps: ("turn", parent, _) | ("compact", head, how far up its anchor lies) | ("revert", which, _)."""
    what = st.sampled_from(["turn", "turn", "turn", "compact", "compact", "revert"])
    step = st.tuples(what, st.integers(0, 30), st.integers(0, 4))
    return draw(st.lists(step, min_size=4, max_size=24))


def naive(path: Sequence[str], rows: Sequence[CompactionRecord]) -> str | None:
    for turn_id in reversed(path):
        at = [row for row in rows if row.status == "committed" and row.anchor_turn_id == turn_id]
        if at:
            return max(at, key=lambda row: row.number).id
    return None


def test_the_walk_finds_what_a_search_of_the_whole_path_finds(url: str) -> None:
    with asyncio.Runner() as runner:
        opened = open_store(url, clock=Clock(), synchronous="NORMAL")
        store = runner.run(opened.__aenter__())

        @settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
        @given(histories())
        def holds(steps: list[tuple[str, int, int]]) -> None:
            runner.run(replay(store, steps))

        try:
            holds()
        finally:
            runner.run(opened.__aexit__(None, None, None))


async def replay(store: Store, steps: list[tuple[str, int, int]]) -> None:
    session_id, numbers = uuid.uuid4().hex, itertools.count()
    turns: list[str] = []
    for what, pick, up in steps:
        if what == "turn" or not turns:
            parent = turns[-1 - pick % min(4, len(turns))] if turns else None
            turns.append(f"{session_id}-{next(numbers)}")
            await talk(store, turns[-1], parent=parent, session_id=session_id)
        elif what == "compact":
            await compact_at(store, session_id, f"c{next(numbers)}-{session_id}", turns[pick % len(turns)], up)
        else:
            await revert(store, session_id, pick)
    rows = await store.list_compactions(TENANT, session_id, limit=100)
    for turn_id in turns:
        path = [record.turn.id for record in await store.path(TENANT, session_id, turn_id)]
        found = (await store.view_of(TENANT, session_id, turn_id)).compaction
        assert (found and found.id) == naive(path, rows)


async def compact_at(store: Store, session_id: str, id: str, head: str, up: int) -> None:
    """The anchor lies at most `up` turns above the head, and no higher than that of the view it builds on."""
    stands = await store.view_of(TENANT, session_id, head)
    path = [record.turn.id for record in await store.path(TENANT, session_id, head)]
    lowest = 0 if stands.compaction is None else path.index(str(stands.compaction.anchor_turn_id))
    anchor = path[max(lowest, len(path) - 1 - up)]
    base = stands.compaction and stands.compaction.id
    await store.begin_compaction(compaction(id, head, stands.view_version, base, session_id=session_id))
    await store.commit_compaction(TENANT, session_id, id, **committing(anchor, stands.view_version))


async def revert(store: Store, session_id: str, pick: int) -> None:
    rows = await store.list_compactions(TENANT, session_id, limit=100)
    committed = [row for row in rows if row.status == "committed"]
    if committed:
        await store.revert_compaction(TENANT, session_id, committed[pick % len(committed)].id)


# ---- what it costs


@pytest.fixture
def grown(migrated_sqlite: Path, tmp_path: Path) -> dict[int, Path]:
    """Databases with a path of 40 and of 4,000 turns; a view at every tenth turn but the last nine."""
    return {length: _grow(migrated_sqlite, tmp_path / f"{length}.db", length) for length in (40, 4000)}


def _grow(empty: Path, path: Path, length: int) -> Path:
    shutil.copy(empty, path)
    turns = [(f"t{seq}", f"t{seq - 1}" if seq > 1 else None, seq) for seq in range(1, length + 1)]
    anchors = [(number, f"t{number * 10}", number * 10) for number in range(1, (length - 9) // 10 + 1)]
    with sqlite3.connect(path) as connection:
        connection.execute(
            "INSERT INTO sessions (tenant_id, id, version, model, tools, metadata, policy, origin, next_seq,"
            " created_at, updated_at, fence, cancel_requested, view_version)"
            " VALUES ('acme', 's1', 1, 'm', '[]', '{}', '{}', 'api', 9999, 0, 0, 0, 0, 1)"
        )
        connection.executemany(
            "INSERT INTO turns (tenant_id, id, session_id, parent_id, seq, status, model, fence, attempt,"
            " on_disconnect, created_at, user_ref, open_answer, usage, placement, prefix_report, metadata) VALUES"
            " ('acme', ?, 's1', ?, ?, 'completed', 'm', 1, 1, 'finish', 0, '', 0, '{}', '{}', '{}', '{}')",
            turns,
        )
        connection.executemany(
            'INSERT INTO compactions (tenant_id, id, session_id, number, status, "trigger", head_turn_id,'
            " anchor_turn_id, anchor_seq, owner, created_at, deadline_at, report, plan, view) VALUES"
            " ('acme', 'c' || ?1, 's1', ?1, 'committed', 'manual', 't', ?2, ?3, 'gw/1', 0, 0, '{}', '{}', '{}')",
            anchors,
        )
    connection.close()
    return path


def steps_of(path: Path, turn_id: str) -> tuple[int, str | None]:
    """Instructions of SQLite's machine that `view_of` takes, and what it found."""
    engine, count = create_engine(f"sqlite:///{path}"), itertools.count()
    with engine.connect() as connection:
        raw = connection.connection.driver_connection
        assert isinstance(raw, sqlite3.Connection)
        raw.set_progress_handler(lambda: next(count) < 0, 1)
        found = views.view_of(connection, TENANT, SESSION, turn_id).compaction
        raw.set_progress_handler(None, 1)
    engine.dispose()
    return next(count), found and found.id


def test_the_cost_is_that_of_the_turns_since_the_anchor_not_of_the_history(grown: dict[int, Path]) -> None:
    short, found = steps_of(grown[40], "t39")
    assert found == "c3"
    long, found = steps_of(grown[4000], "t3999")
    assert found == "c399"
    assert long <= short * 1.1
    nothing_above, found = steps_of(grown[4000], "t9")
    assert found is None
    assert nothing_above <= short, "it stops where no anchor can be any more"
