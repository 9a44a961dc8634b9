"""A process that runs two turns, compacts the first, and dies where TURNKEEP_FAILPOINT says.

    python -m tests.gateway.store.victim URL EPOCH

Prints one line for every write that was acknowledged. With an idempotency key for each turn it can be run again; what
is compacted already is left as it is.
"""

from __future__ import annotations

import asyncio
import sys

from gateway.store.records import Begun, Known
from gateway.store.sessions import open_store
from tests.gateway.store.values import SESSION, TENANT, begin, committing, compaction, finish, said, session


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
        standing = await store.view_of(TENANT, SESSION, str(head))
        if standing.compaction is not None:
            return
        id, expected = f"c-{epoch}", standing.view_version
        await store.begin_compaction(compaction(id, str(head), expected, owner=f"gw/{epoch}"))
        print("compacting", 1, flush=True)
        anchor = (await store.path(TENANT, SESSION, str(head)))[0].turn.id
        await store.commit_compaction(TENANT, SESSION, id, **committing(anchor, expected))
        print("compacted", 1, flush=True)


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
