"""The store of receipts, and of what places have still to forget; a part of `Store`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gateway.store import erase, erasures, forgettings, sweep
from gateway.store.access import Access
from gateway.store.audit_records import AuditLine
from gateway.store.erasure_records import NOBODYS, Forgetting, Place, PlaceState, Receipt, ReceiptPage
from gateway.store.forgettings import Standing
from gateway.store.records import RunningTurn


class ErasureStore(Access):
    _unscrubbed = True

    async def begin_user_erasure(
        self, tenant_id: str, user_ref: str, subject: str, *, line: AuditLine | None = None
    ) -> str:
        """The id of its receipt: of one that is not done yet, where there is one. `subject`: a keyed digest of the
        user's name. Raises UnstorableText."""
        work = partial(erasures.begin_user, tenant_id=tenant_id, user_ref=user_ref, subject=subject, now=self._clock())
        return await self._audited(work, line)

    async def running_turns(
        self, tenant_id: str, *, session_id: str | None = None, user_ref: str | None = None
    ) -> list[RunningTurn]:
        """That run now, at whichever gateway: of one session, or of an end user's."""
        return await self._read(
            lambda c: erasures.running_turns(c, tenant_id, session_id=session_id, user_ref=user_ref, now=self._clock())
        )

    async def user_of_erasure(self, tenant_id: str, erasure_id: str) -> str | None:
        """Whose rows are still to be erased; None: nobody's."""
        return await self._read(lambda c: erasures.user_of(c, tenant_id, erasure_id))

    async def erase_of_user(self, tenant_id: str, erasure_id: str) -> list[str] | None:
        """Erase some of the user's sessions -> which; None: there are none left."""
        gone = await self._write(
            lambda c: erasures.erase_of_user(c, tenant_id, erasure_id, sweep.ERASED, self._clock())
        )
        if gone is None:
            await self._scrub()
        return gone

    async def unfinished_erasures(self, before: float) -> list[tuple[str, str]]:
        """(tenant, receipt) of end users' erasures begun before `before` whose rows may not all be gone."""
        return await self._read(lambda c: erasures.unfinished(c, before, sweep.PART))

    async def get_receipt(self, tenant_id: str, erasure_id: str) -> Receipt | None:
        return await self._read(lambda c: erasures.read_receipt(c, tenant_id, erasure_id))

    async def list_receipts(
        self,
        tenant_id: str,
        *,
        limit: int = 20,
        cursor: str | None = None,
        subject: str | None = None,
        status: str | None = None,
    ) -> ReceiptPage:
        """Newest first. Raises ValueError for a cursor that was not made here."""
        return await self._read(lambda c: erasures.list_receipts(c, tenant_id, limit, cursor, subject, status))

    # ---- what places have to forget: of all tenants

    async def forget_later(self, tenant_id: str, session_id: str) -> None:
        """Have every place forget a session that is gone: something went on with it after it was erased."""
        await self._write(lambda c: erase.forget_later(c, tenant_id, session_id, NOBODYS, self._clock()))

    async def add_place(self, place: Place) -> None:
        """From now on erasures wait for it. Said twice, it stays as it is."""
        await self._write(lambda c: forgettings.add_place(c, place, self._clock()))

    async def see_places(self, names: Sequence[str], *, memory_s: float, replicas_s: float) -> None:
        """These are still there; what no gateway has seen for so long is taken for gone, and waited for no more."""
        now = self._clock()
        await self._write(lambda c: forgettings.see_places(c, names, now))
        since = {"memory_before": now - memory_s, "replicas_before": now - replicas_s}
        await self._write(lambda c: forgettings.drop_unseen(c, **since))
        await self._count(lambda c: forgettings.settle_gone(c, sweep.PART, self._clock()))

    async def leave_place(self, name: str) -> None:
        """What it held is gone with it."""
        await self._write(lambda c: forgettings.leave_place(c, name))

    async def due_places(self) -> frozenset[str]:
        return await self._read(lambda c: forgettings.due_places(c, self._clock()))

    async def claim_forgettings(
        self, place: str, limit: int, for_s: float, *, of: tuple[str, str] | None = None
    ) -> list[Forgetting]:
        """Some that are due at a place; for `for_s` nobody else takes them. `of`: (tenant, receipt) alone."""
        now = self._clock()
        return await self._write(lambda c: forgettings.claim(c, place, limit, now, now + for_s, of=of))

    async def put_off_forgetting(self, one: Forgetting, for_s: float, error: str | None) -> None:
        """It could not be done now."""
        await self._write(lambda c: forgettings.put_off(c, one, self._clock() + for_s, error))

    async def forgotten(self, one: Forgetting, state: PlaceState, gone: dict[str, int]) -> None:
        await self._write(lambda c: forgettings.done(c, one, state, gone, self._clock()))

    async def standing(self, tenant_id: str, session_id: str) -> Standing:
        return await self._read(lambda c: forgettings.standing(c, tenant_id, session_id, self._clock()))

    async def clean(self) -> bool:
        """Let the database's own files hold nothing of what was erased; may take minutes. False: not now."""
        self._unscrubbed = not await self._database.clean(erase.WORDS)
        return not self._unscrubbed

    async def _scrub(self) -> None:
        self._unscrubbed = not await self._database.scrub()
