"""A process that runs two turns and dies where TURNKEEP_FAILPOINT says: python -m tests.gateway.store.victim URL EPOCH.

Prints one line for every write that was acknowledged. With an idempotency key for each turn it can be run again.
"""

from __future__ import annotations

import asyncio
import sys

from gateway.store.records import Begun, Known
from gateway.store.sessions import open_store
from tests.gateway.store.values import begin, finish, said, session


async def run(url: str, epoch: str) -> None:
    async with open_store(url) as store:
        await store.void_leases("gw", epoch)
        head: str | None = None
        for number in (1, 2):
            outcome = await store.begin_turn(
                begin(
                    f"t{number}-{epoch}",
                    head,
                    owner=f"gw/{epoch}",
                    input=said(f"ask {number}"),
                    idempotency_key=f"k{number}",
                    request_hash=b"h",
                    create=session(),
                )
            )
            print("begun", number, flush=True)
            if isinstance(outcome, Known):
                head = outcome.turn.turn.id
                continue
            assert isinstance(outcome, Begun), outcome
            await store.finish_turn(
                finish(outcome.turn_id, outcome.fence, output=said(f"answer {number}", "assistant"))
            )
            print("finished", number, flush=True)
            head = outcome.turn_id


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
