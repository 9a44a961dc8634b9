"""A running turn changes hands: offered by who holds it, taken once, or taken back."""

from __future__ import annotations

import asyncio

import pytest

from gateway.store.handovers import Offer
from gateway.store.records import Begun, LeaseLost
from gateway.store.sessions import Store
from tests.gateway.store.conftest import Clock
from tests.gateway.store.values import OWNER, SESSION, TENANT, begin, finish, session

pytestmark = pytest.mark.anyio
OTHER = "gateway-2/epoch"


async def running(store: Store) -> Offer:
    began = await store.begin_turn(begin("t1", create=session()))
    assert isinstance(began, Begun)
    return Offer(TENANT, SESSION, "t1", began.fence, OWNER, b"state")


async def test_it_is_taken_once_and_the_fence_keeps_the_former_holder_out(store: Store, clock: Clock) -> None:
    offer = await running(store)
    assert await store.offer_turns([offer]) == {"t1"}
    assert await store.offered_turns(OWNER) == []
    assert await store.offered_turns(OTHER) == [offer]
    assert await store.still_offered(OWNER) == {(TENANT, "t1")}
    both = await asyncio.gather(*(store.take_turns(OTHER, [offer], 5.0) for _ in range(2)))
    (taken,) = [one for some in both for one in some]
    assert (taken.offer, taken.fence, taken.cancelled) == (offer, offer.fence + 1, False)
    assert await store.still_offered(OWNER) == set()
    assert not await store.take_back_turn(TENANT, "t1", offer.fence)
    with pytest.raises(LeaseLost):
        await store.finish_turn(finish("t1", offer.fence))
    with pytest.raises(LeaseLost):
        await store.append_events(TENANT, SESSION, "t1", 1, [b"x"], fence=offer.fence)
    assert await store.renew_leases(OWNER, [(TENANT, SESSION, offer.fence)]) == [(TENANT, SESSION, offer.fence)]
    assert await store.renew_leases(OTHER, [(TENANT, SESSION, taken.fence)]) == []
    turn = await store.get_turn(TENANT, SESSION, "t1")
    assert turn is not None
    assert (turn.fence, turn.attempt, turn.turn.status) == (taken.fence, 1, "in_progress")
    await store.finish_turn(finish("t1", taken.fence))
    await store.void_leases(OWNER.partition("/")[0], "a later life")
    ended = await store.get_turn(TENANT, SESSION, "t1")
    assert ended is not None
    assert ended.turn.status == "completed"


async def test_what_is_taken_back_or_ended_is_not_there_to_take(store: Store, clock: Clock) -> None:
    offer = await running(store)
    assert await store.offer_turns([offer]) == {"t1"}
    assert await store.take_back_turn(TENANT, "t1", offer.fence)
    assert await store.take_turns(OTHER, [offer], 5.0) == []
    assert await store.offer_turns([offer]) == {"t1"}
    clock.now += 60
    await store.lapse_leases()
    assert await store.take_turns(OTHER, [offer], 5.0) == []
    assert await store.purge_handovers(clock.now - 30) == 1
    assert await store.offered_turns(OTHER) == []


async def test_a_turn_that_is_lost_cannot_be_offered_and_a_wish_to_stop_it_goes_with_it(store: Store) -> None:
    offer = await running(store)
    await store.request_cancel(TENANT, SESSION, "t1")
    assert await store.offer_turns([offer]) == {"t1"}
    (taken,) = await store.take_turns(OTHER, [offer], 5.0)
    assert taken.cancelled
    assert await store.offer_turns([offer]) == set()


async def test_a_deleted_session_takes_the_offer_with_it(store: Store) -> None:
    offer = await running(store)
    assert await store.offer_turns([offer]) == {"t1"}
    receipt = await store.delete_session(TENANT, SESSION)
    assert receipt is not None
    assert receipt.erased["handovers"] == 1
    assert await store.take_turns(OTHER, [offer], 5.0) == []
