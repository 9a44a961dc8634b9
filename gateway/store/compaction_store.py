"""The store of compactions, views and pins; a part of `Store`. Every method takes the tenant."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from gateway.store import compactions, sweep, views
from gateway.store.access import Access
from gateway.store.compaction_records import CompactionRecord, NewCompaction, StandingView
from gateway.store.records import TurnRecord
from gateway.store.rows import encode, storable


class CompactionStore(Access):
    async def begin_compaction(self, new: NewCompaction) -> CompactionRecord | None:
        """None: no such session. Said twice by its owner, the row that runs is returned.

        Raises CompactionRunning (another's, its deadline not passed, and `new` does not supersede it), ViewMoved,
        UnknownTurn (the head), DuplicateId, ValueError where `base_id` names no committed compaction of the session.
        """
        work = partial(compactions.begin_compaction, new=new, now=self._clock())
        return await self._write(work, "begin_compaction")

    async def renew_compaction(self, tenant_id: str, session_id: str, id: str, deadline_s: float) -> bool:
        """Put its deadline off to `deadline_s` from now. False: it does not run any more, or is gone."""
        return await self._write(
            lambda c: compactions.renew_compaction(c, tenant_id, session_id, id, deadline_s, self._clock())
        )

    async def commit_compaction(
        self,
        tenant_id: str,
        session_id: str,
        id: str,
        *,
        view: Mapping[str, Any],
        plan: Mapping[str, Any],
        report: Mapping[str, Any],
        anchor_turn_id: str,
        expected_view: int,
    ) -> int:
        """Let `view` stand on every path through `anchor_turn_id`; returns the session's new view_version.

        Asks neither for the head nor for a lease. Said twice, it stays as it is. Raises CompactionOver (it does not run
        any more), ViewMoved (it still does: end it), UnknownTurn (the anchor).
        """
        work = partial(
            compactions.commit_compaction,
            tenant_id=tenant_id,
            session_id=session_id,
            id=id,
            view=encode(view),
            plan=encode(plan),
            report=encode(report),
            anchor_turn_id=_storable(anchor_turn_id),
            expected_view=expected_view,
            now=self._clock(),
        )
        return await self._write(work, "commit_compaction")

    async def end_compaction(
        self,
        tenant_id: str,
        session_id: str,
        id: str,
        *,
        status: Literal["failed", "skipped"],
        error: Mapping[str, Any] | None,
        report: Mapping[str, Any],
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        """No view comes of it. Has no effect on one that does not run any more. `plan` None: as it was."""
        work = partial(
            compactions.end_compaction,
            tenant_id=tenant_id,
            session_id=session_id,
            id=id,
            status=status,
            error=None if error is None else encode(error),
            report=encode(report),
            plan=None if plan is None else encode(plan),
            now=self._clock(),
        )
        await self._write(work, "end_compaction")

    async def note_compaction(
        self, new: NewCompaction, *, error: Mapping[str, Any] | None, report: Mapping[str, Any]
    ) -> CompactionRecord | None:
        """A `skipped` row in one go, whatever runs or stands. None: no such session. Raises DuplicateId."""
        said = None if error is None else encode(error)
        work = partial(compactions.note_compaction, new=new, error=said, report=encode(report), now=self._clock())
        return await self._write(work)

    async def revert_compaction(self, tenant_id: str, session_id: str, id: str) -> CompactionRecord | None:
        """Take back it and every committed one that builds on it. None: absent. Raises ValueError: not committed."""
        work = partial(
            compactions.revert_compaction, tenant_id=tenant_id, session_id=session_id, id=id, now=self._clock()
        )
        return await self._write(work, "revert_compaction")

    async def view_of(self, tenant_id: str, session_id: str, turn_id: str) -> StandingView:
        """What stands on the path to `turn_id`, with the pins and the view_version of the same instant.

        Costs as much as the path from `turn_id` up to the anchor, however long it is above; nothing but one row for a
        session in which nothing was ever compacted or pinned.
        """
        return await self._read(lambda c: views.view_of(c, tenant_id, session_id, turn_id))

    async def list_compactions(
        self, tenant_id: str, session_id: str, *, limit: int = 20, before: int | None = None
    ) -> tuple[CompactionRecord, ...]:
        """Newest first; with a number below `before` where that is given."""
        return await self._read(lambda c: views.list_compactions(c, tenant_id, session_id, limit, before))

    async def get_compaction(self, tenant_id: str, session_id: str, id: str) -> CompactionRecord | None:
        return await self._read(lambda c: views.get_compaction(c, tenant_id, session_id, id))

    async def pin_turn(
        self, tenant_id: str, session_id: str, turn_id: str, pinned: bool, *, expected_view: int | None = None
    ) -> TurnRecord | None:
        """The turn as it is now. None: absent. The view_version grows only where that changed something.

        Raises ViewMoved where another version than `expected_view` stands.
        """
        return await self._write(
            lambda c: compactions.pin_turn(c, tenant_id, session_id, turn_id, pinned, expected_view, self._clock())
        )

    async def lapse_compactions(self) -> int:
        """Fail what is past its deadline, whoever ran it; how many."""
        return await self._count(lambda c: sweep.lapse_compactions(c, self._clock()))


def _storable(text: str) -> str:
    storable(text)
    return text
