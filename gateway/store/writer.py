"""Group commit: what waits when the writer comes by goes into one transaction, and every caller hears of the commit.

No timer: alone, a command is written at once; under load, a batch is what gathered during the commit before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gateway.store.batch import Outcome, run_batch
from gateway.store.commands import Append, Begin, Command, Finish
from gateway.store.database import TRIES, Database, T, Work, kind
from gateway.store.records import DuplicateId, StoreUnavailable

BATCH = 256  # commands; bounds how long a commit can take


@dataclass(frozen=True, slots=True)
class _Waiting:
    command: Command
    outcome: asyncio.Future[Outcome]


class Writer:
    """Owns one task. `start` before use; `close` writes what still waits."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="store-writer")

    async def submit(self, command: Command) -> Outcome:
        """The command's outcome after its commit. Raises what the outcome is, where it is an exception.

        A caller that is cancelled while its Begin still waits leaves nothing behind; any other command is written
        nevertheless, and so is a Begin whose transaction has started: shield the call to learn of its outcome.
        """
        if self._closing or self._task is None:
            raise StoreUnavailable("the store is closed")
        waiting = _Waiting(command, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._wake.set()
        outcome = await waiting.outcome
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while batch := self._take():
                await self._write(batch)
            if self._closing:
                return

    async def _write(self, batch: list[_Waiting]) -> None:
        """A function of its own: when it returns, nothing refers to what was written."""
        outcomes = await self._outcomes([waiting.command for waiting in batch])
        for waiting, outcome in zip(batch, outcomes, strict=True):
            if not waiting.outcome.done():
                waiting.outcome.set_result(outcome)

    def _take(self) -> list[_Waiting]:
        taken: list[_Waiting] = []
        while self._waiting and len(taken) < BATCH:
            waiting = self._waiting.popleft()
            if not (waiting.outcome.cancelled() and isinstance(waiting.command, Begin)):
                taken.append(waiting)
        return taken

    async def _outcomes(self, commands: Sequence[Command]) -> Sequence[Outcome]:
        """All in one transaction. Where the database refuses a row for being a second one, each in its own."""
        try:
            work = partial(run_batch, commands=commands, clock=self._clock)
            return await write(self._database, work, _points(commands))
        except StoreUnavailable as error:
            return [StoreUnavailable(*error.args) for _ in commands]
        except Exception as error:  # noqa: BLE001 - it becomes the outcome of the command that caused it
            if len(commands) > 1:
                return [outcome for command in commands for outcome in await self._outcomes([command])]
            return [DuplicateId("that id is taken") if kind(error) == "duplicate" else error]


def _points(commands: Sequence[Command]) -> tuple[str, ...]:
    names = {Begin: "begin", Finish: "finish", Append: "append"}
    return tuple(name for kind_, name in names.items() if any(isinstance(command, kind_) for command in commands))


async def write(database: Database, work: Work[T], points: tuple[str, ...] = ()) -> T:
    """`database.write`, run again where the database asks for it. Raises StoreUnavailable after TRIES."""
    for attempt in range(TRIES):
        try:
            return await database.write(work, points)
        except Exception as error:
            if kind(error) != "again":
                raise
            if attempt == TRIES - 1:
                raise StoreUnavailable(f"the database asked {TRIES} times to run the transaction again") from error
    raise AssertionError("unreachable: the last try returns or raises")
