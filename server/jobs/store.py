"""The database of jobs: SQLite, rollback journal, every change synced before it is acknowledged.

One thread writes (and reads, once, at opening); the event loop never waits for the disk. The database is an index with
the jobs' progress: what was asked and how it ended is also in each job's folder, so it can be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Column, Connection, Engine, Float, MetaData, String, Table, create_engine, event, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from server.errors import ServerError, StorageFull, Unavailable
from server.jobs.job import Job, from_json, to_json

T = TypeVar("T")

MIGRATIONS: tuple[tuple[str, ...], ...] = (  # the n-th brings a database of schema n-1 to schema n; never edited
    (
        "CREATE TABLE jobs (id TEXT PRIMARY KEY, owner TEXT NOT NULL, state TEXT NOT NULL, submitted REAL NOT NULL, "
        "idempotency_key TEXT, document TEXT NOT NULL)",
        "CREATE UNIQUE INDEX jobs_key ON jobs (owner, idempotency_key) WHERE idempotency_key IS NOT NULL",
    ),
    ("UPDATE jobs SET owner = 'name:' || owner WHERE owner <> ''",),  # an owner is an identity, no mere name
)
_JOBS = Table(
    "jobs",
    MetaData(),
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("state", String, nullable=False),
    Column("submitted", Float, nullable=False),
    Column("idempotency_key", String),
    Column("document", String, nullable=False),
)


class JobStore:
    """The jobs of one server. Raises Unavailable when the database cannot be used, StorageFull for a full disk."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._engine: Engine | None = None
        self._thread = ThreadPoolExecutor(1, "jobs-database")

    async def open(self) -> list[Job]:
        """Bring the database to the newest schema, check it, and return every job in it."""
        return await self._run(self._open)

    async def save(self, job: Job) -> None:
        """Write a job, new or changed; durable on return."""
        await self._run(lambda: self._save(job))

    async def remove(self, job_id: str) -> None:
        """Remove a job; durable on return."""
        await self._run(lambda: self._write(_JOBS.delete().where(_JOBS.c.id == job_id)))

    async def close(self) -> None:
        """Close the database; `open` opens it again."""
        await self._run(self._dispose)

    def shut(self) -> None:
        """End the thread, for good."""
        self._thread.shutdown()

    async def _run(self, work: Callable[[], T]) -> T:
        def guarded() -> T:
            with database_errors():
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    # on the writer's thread

    def _open(self) -> list[Job]:
        self._dispose()
        self._engine = _connect(self._file)
        with self._engine.begin() as connection:
            _migrate(connection)
            if (found := connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()) != "ok":
                raise Unavailable(f"the jobs database is damaged: {found}")
            return [_read(document) for document in connection.scalars(select(_JOBS.c.document))]

    def _save(self, job: Job) -> None:
        order = job.order
        row = {
            "id": order.id,
            "owner": order.account,
            "state": job.state.value,
            "submitted": order.submitted,
            "idempotency_key": order.key,
            "document": to_json(job).decode(),
        }
        self._write(insert(_JOBS).values(row).on_conflict_do_update(index_elements=["id"], set_=row))

    def _write(self, statement: Any) -> None:
        if self._engine is None:
            raise Unavailable("the jobs database is not open")
        with self._engine.begin() as connection:
            connection.execute(statement)

    def _dispose(self) -> None:
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None


def _connect(file: Path) -> Engine:
    engine = create_engine(f"sqlite:///{file}", poolclass=NullPool, connect_args={"timeout": 5.0})

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions begin where this file says so
        connection.execute("PRAGMA journal_mode=DELETE")  # WAL can corrupt before SQLite 3.51.3
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _migrate(connection: Connection) -> None:
    version = int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
    if version > len(MIGRATIONS):
        raise Unavailable(
            f"the jobs database has schema {version}, this Lathe knows up to {len(MIGRATIONS)}: a newer one wrote it"
        )
    for number, statements in enumerate(MIGRATIONS[version:], version + 1):
        for statement in statements:
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql(f"PRAGMA user_version={number}")


def _read(document: str) -> Job:
    try:
        return from_json(document)
    except ValueError as error:
        raise Unavailable("the jobs database is damaged: it holds a job that does not read") from error


@contextmanager
def database_errors() -> Iterator[None]:
    """Turn what SQLite and SQLAlchemy raise into errors for callers."""
    try:
        yield
    except DBAPIError as error:
        raise _translate(error) from error


def _translate(error: DBAPIError) -> ServerError:
    name = getattr(error.orig, "sqlite_errorname", "")
    if name == "SQLITE_FULL":
        return StorageFull("the disk that holds the jobs database is full")
    if name in {"SQLITE_CORRUPT", "SQLITE_NOTADB"}:
        return Unavailable(
            "the jobs database is damaged: move it away, and the jobs are listed again from their folders"
        )
    return Unavailable(f"the jobs database cannot be used ({name or type(error).__name__})")
