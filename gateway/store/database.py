"""One database behind two verbs, read and write, each a plain function of a connection. Knows no table.

    SQLite      one writer thread (BEGIN IMMEDIATE), a few reader threads: one hop a transaction, whatever it holds;
                only ever into the file that bears the name
    PostgreSQL  asyncpg; the same functions through run_sync

A function given to `write` may run more than once: it must decide everything from what it reads.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import QueuePool

from gateway.failpoints import Failpoints
from gateway.store.records import StoreUnavailable

T = TypeVar("T")
Work = Callable[[Connection], T]

CLEANED_EVERY_S = 60.0  # a vacuum of PostgreSQL, at the most
CLEANED_WITHIN_S = 600.0
_FILE = "file"  # of a connection: which file it has open
READERS = 4  # threads; reads of SQLite hold the GIL most of the time, more would not help
TRIES = 5  # of a transaction that the database asks to repeat (deadlock, serialization, a lost race to insert)

# SQLite's primary result codes: BUSY LOCKED NOMEM READONLY INTERRUPT IOERR CORRUPT FULL CANTOPEN PROTOCOL NOTADB
_SQLITE_GONE = frozenset({5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 26})
_POSTGRES_AGAIN = frozenset({"40001", "40P01"})
# SQLSTATE classes: connection, insufficient resources, operator intervention, system error; 55P03 lock timeout,
# 25P03 a transaction that did nothing for too long, 55000 a database that takes no connections now
_POSTGRES_GONE = ("08", "53", "57", "58", "55000", "55P03", "25006", "25P03", "XX")


class Database(Protocol):
    async def read(self, work: Work[T]) -> T: ...

    async def write(self, work: Work[T], points: tuple[str, ...] = ()) -> T:
        """Run `work` in one transaction and return after its commit. Raises StoreUnavailable, or what `work` raised.

        `points`: each is a failpoint before_<point>_commit and after_<point>_commit.
        """
        ...

    async def scrub(self) -> bool:
        """Remove what was deleted from files beside the main one; False: could not now, try again."""
        ...

    async def clean(self, tables: Sequence[str]) -> bool:
        """The same, and what the database itself keeps of rows of these tables; may take minutes. False: try again."""
        ...

    async def close(self) -> None: ...


def connect(
    url: str,
    *,
    synchronous: Literal["FULL", "NORMAL"] = "FULL",
    busy_timeout_s: float = 5.0,
    failpoints: Failpoints | None = None,
) -> Database:
    """Open sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME. Connects at first use. Raises ValueError."""
    parsed, points = normalise(url), failpoints or Failpoints()
    if parsed.get_backend_name() == "sqlite":
        return SqliteDatabase(parsed, synchronous, busy_timeout_s, points)
    return PostgresDatabase(parsed, busy_timeout_s, points)


def normalise(url: str) -> URL:
    parsed = make_url(url)
    backend = parsed.get_backend_name()
    if backend == "postgres":  # the older spelling, still handed out by hosting providers
        backend = "postgresql"
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+asyncpg")
    if backend != "sqlite":
        raise ValueError(f"the store takes sqlite:///PATH or postgresql://..., not {backend}")
    if parsed.database in (None, "", ":memory:"):
        raise ValueError("the store needs a file: sqlite:///PATH (a database in memory is lost with its connection)")
    return parsed.set(drivername="sqlite")


def kind(error: BaseException) -> Literal["again", "gone", "duplicate", "other"]:
    """What an error from the database means to the caller of a transaction."""
    if isinstance(error, (OSError, TimeoutError, PoolTimeout)):
        return "gone"
    cause = error.orig if isinstance(error, DBAPIError) else error
    state = str(getattr(cause, "sqlstate", None) or "")
    if state in _POSTGRES_AGAIN or _constraint(cause) == "pk_sessions":
        return "again"  # the latter: another gateway made the same session between our read and our write
    if state.startswith(_POSTGRES_GONE) or getattr(error, "connection_invalidated", False):
        return "gone"
    if isinstance(cause, sqlite3.Error) and getattr(cause, "sqlite_errorcode", 0) & 0xFF in _SQLITE_GONE:
        return "gone"
    if isinstance(error, IntegrityError):
        return "duplicate"
    if not state and type(cause).__module__.startswith("asyncpg"):
        return "gone"  # asyncpg's own: the connection is closed, was never made, or is in an unknown state
    return "other"


def _constraint(cause: BaseException | None) -> object:
    """Name of the constraint that a PostgreSQL error is about; SQLAlchemy keeps asyncpg's own error as the cause."""
    return getattr(getattr(cause, "__cause__", None), "constraint_name", None)


def _unavailable(error: BaseException) -> StoreUnavailable:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return StoreUnavailable(f"the database did not take it: {str(cause) or type(cause).__name__}")


class SqliteDatabase:
    def __init__(self, url: URL, synchronous: str, busy_timeout_s: float, failpoints: Failpoints) -> None:
        self._failpoints = failpoints
        self._writing = _sqlite_engine(url, synchronous, busy_timeout_s, "BEGIN IMMEDIATE", connections=1)
        self._reading = _sqlite_engine(url, synchronous, busy_timeout_s, "BEGIN", connections=READERS)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")

    async def read(self, work: Work[T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._run, self._reading, work, ())

    async def write(self, work: Work[T], points: tuple[str, ...] = ()) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._run, self._writing, work, points)

    def _run(self, engine: Engine, work: Work[T], points: tuple[str, ...]) -> T:
        try:
            with engine.connect() as connection:
                if connection.info[_FILE] != _file_at(engine.url):
                    connection.invalidate()  # what it would write, nobody would ever read
                    raise StoreUnavailable("the database's file was moved, or another was put in its place")
                try:
                    with connection.begin():
                        result = work(connection)
                        for point in points:
                            self._failpoints.hit(f"before_{point}_commit")
                except DBAPIError as error:
                    if kind(error) == "gone":
                        connection.invalidate()  # the file may have been replaced: open it anew next time
                    raise
        except DBAPIError as error:
            if kind(error) == "gone":
                raise _unavailable(error) from error
            raise
        for point in points:
            self._failpoints.hit(f"after_{point}_commit")
        return result

    async def scrub(self) -> bool:
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._truncate_wal)

    async def clean(self, tables: Sequence[str]) -> bool:
        return await self.scrub()

    def _truncate_wal(self) -> bool:
        """Copy the write-ahead log into the database and empty it: old versions of erased rows stand there."""
        try:
            raw = self._writing.raw_connection()
            try:
                busy = raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                raw.close()
        except (DBAPIError, sqlite3.Error):
            return False
        return busy is not None and not busy[0]

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._writer.shutdown()
        self._readers.shutdown()
        self._reading.dispose()
        self._writing.dispose()


def _sqlite_engine(url: URL, synchronous: str, busy_timeout_s: float, begin: str, *, connections: int) -> Engine:
    def opened() -> sqlite3.Connection:
        """An existing file: one that is missing is away, and an empty one in its place would be in its way."""
        name = f"file:{quote(os.path.abspath(url.database or ''))}?mode=rw"
        return sqlite3.connect(name, uri=True, timeout=busy_timeout_s, check_same_thread=False)

    engine = create_engine(url, creator=opened, poolclass=QueuePool, pool_size=connections, max_overflow=0)

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, record: Any) -> None:
        record.info[_FILE] = _file_at(url)
        connection.isolation_level = None  # we say BEGIN ourselves
        for pragma in (
            "journal_mode = WAL",
            f"synchronous = {synchronous}",
            "foreign_keys = ON",
            "secure_delete = ON",  # deleted content is overwritten with zeros
            "temp_store = MEMORY",  # sorting leaves no text in files
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def start(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


def _file_at(url: URL) -> tuple[int, int] | None:
    """Which file it is, whatever its name: device and inode. None: there is none."""
    try:
        found = os.stat(url.database or "")
    except OSError:
        return None
    return found.st_dev, found.st_ino


def private_file(url: URL) -> None:
    """Make the folder and the empty database file, readable by its owner alone, unless it exists."""
    path = Path(url.database or "")
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


class PostgresDatabase:
    def __init__(self, url: URL, busy_timeout_s: float, failpoints: Failpoints) -> None:
        self._failpoints = failpoints
        self._limit_s = busy_timeout_s
        self._cleaned_s = -CLEANED_EVERY_S
        self._engine = postgres_engine(url, busy_timeout_s)
        self._reading = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    async def read(self, work: Work[T]) -> T:
        return await self._run(self._reading, work, ())

    async def write(self, work: Work[T], points: tuple[str, ...] = ()) -> T:
        return await self._run(self._engine, work, points)

    async def _run(self, engine: AsyncEngine, work: Work[T], points: tuple[str, ...]) -> T:
        try:
            async with asyncio.timeout(2 * self._limit_s), engine.connect() as connection, connection.begin():
                result = await connection.run_sync(work)
                for point in points:
                    self._failpoints.hit(f"before_{point}_commit")
        except Exception as error:
            if kind(error) == "gone":
                raise _unavailable(error) from error
            raise
        for point in points:
            self._failpoints.hit(f"after_{point}_commit")
        return result

    async def scrub(self) -> bool:
        return True  # PostgreSQL overwrites dead rows in its own time, `clean` bids it to

    async def clean(self, tables: Sequence[str]) -> bool:
        """VACUUM: the room of dead rows is free to be written over. Log segments and backups are the operator's."""
        now = time.monotonic()
        if now - self._cleaned_s < CLEANED_EVERY_S:
            return False
        self._cleaned_s = now
        try:
            async with self._engine.connect() as connection:
                raw = await connection.get_raw_connection()
                statement = f"VACUUM (SKIP_LOCKED) {', '.join(tables)}"
                await raw.driver_connection.execute(statement, timeout=CLEANED_WITHIN_S)  # type: ignore[union-attr]
        except Exception as error:
            if kind(error) in ("gone", "again"):
                return False
            raise
        return True

    async def close(self) -> None:
        await self._engine.dispose()


def postgres_engine(url: URL, busy_timeout_s: float) -> AsyncEngine:
    return create_async_engine(
        url,
        pool_size=8,
        max_overflow=0,
        pool_timeout=busy_timeout_s,
        pool_pre_ping=True,  # a server that was restarted costs a new connection, not a failed turn
        connect_args={
            "timeout": busy_timeout_s,
            "command_timeout": busy_timeout_s,
            "server_settings": {
                "application_name": "turnkeep",
                "lock_timeout": f"{int(busy_timeout_s * 1000)}",
                # a gateway that freezes in a transaction lets go before those that wait for its locks give up
                "idle_in_transaction_session_timeout": f"{int(busy_timeout_s * 500)}",
            },
        },
    )
