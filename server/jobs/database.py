"""The database of jobs: SQLite with a rollback journal; each change is synced before it is acknowledged.

One thread does all accesses, so that the event loop never waits for the disk. The database is an index with the jobs'
progress and can be rebuilt: the order and the outcome of each job are also in its folder.
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

from lathe.server.errors import ServerError, StorageFull, Unavailable
from lathe.server.jobs.job import Job, from_json, to_json

T = TypeVar("T")

MIGRATIONS: tuple[tuple[str, ...], ...] = (  # the n-th migrates schema n-1 to schema n; append only
    (
        "CREATE TABLE jobs (id TEXT PRIMARY KEY, owner TEXT NOT NULL, state TEXT NOT NULL, submitted REAL NOT NULL, "
        "idempotency_key TEXT, document TEXT NOT NULL)",
        "CREATE UNIQUE INDEX jobs_key ON jobs (owner, idempotency_key) WHERE idempotency_key IS NOT NULL",
    ),
    (
        "UPDATE jobs SET owner = 'name:' || owner WHERE owner <> ''",
    ),  # from schema 2 on owners are identities; old names get a prefix
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
    """The database of one server. Raises Unavailable if it cannot be used, StorageFull if the disk is full."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._engine: Engine | None = None
        self._thread = ThreadPoolExecutor(1, "jobs-database")

    async def open(self) -> list[Job]:
        """Open, migrate and check the database; returns all jobs in it."""
        return await self._run(self._open)

    async def save(self, job: Job) -> None:
        """Insert or update a job; durable on return."""
        await self._run(lambda: self._save(job))

    async def remove(self, job_id: str) -> None:
        """Remove a job; durable on return."""
        await self._run(lambda: self._write(_JOBS.delete().where(_JOBS.c.id == job_id)))

    async def close(self) -> None:
        """Close the database; `open` can open it again."""
        await self._run(self._dispose)

    def stop_thread(self) -> None:
        """End the thread; the store cannot be used afterwards."""
        self._thread.shutdown()

    async def _run(self, work: Callable[[], T]) -> T:
        def translated() -> T:
            with database_errors():
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, translated)

    # on the database thread

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
        connection.isolation_level = None  # no implicit transactions: `begin` below starts them
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
        raise Unavailable("the jobs database is damaged: it holds an invalid job") from error


@contextmanager
def database_errors() -> Iterator[None]:
    """A context manager that turns a DBAPIError into StorageFull if the disk is full, otherwise Unavailable."""
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
