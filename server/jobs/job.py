"""What a job is: what was asked, which never changes, and how far it has come. Frozen; no I/O.

queued -> running -> publishing -> succeeded | failed
queued | running -> cancelled,  running -> failed | succeeded (nothing to publish)
running -> queued: pre-empted, the server stopped, or the process crashed and may try again
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter


class JobState(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"  # waits for a slot; may have run before
    RUNNING = "running"  # has a process, or is about to
    PUBLISHING = "publishing"  # the result is there; it becomes a version
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will happen."""
        return self in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}


@dataclass(frozen=True, slots=True)
class DatasetPin:
    """The data, as named by the caller and as it was then."""

    name: str
    digest: str  # sha256, hexadecimal


@dataclass(frozen=True, slots=True)
class ModelPin:
    """The version that a job starts from or looks at; an alias was resolved when the job came."""

    name: str
    version: int
    digest: str  # sha256, hexadecimal


@dataclass(frozen=True, slots=True)
class Publish:
    """What becomes of the result."""

    model: str
    alias: str | None = None  # to move, if the gate lets it
    allow_signature_change: bool = False
    gate: Mapping[str, Any] | None = None  # as `server.jobs.gate` reads it


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What a job may take."""

    seconds: float  # of running, all attempts together
    memory: int  # bytes resident


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for."""

    id: str
    owner: str  # the name of who submitted it; empty where no keys are used
    kind: str  # a row of `server.jobs.kinds`
    recipe: Mapping[str, Any]
    dataset: DatasetPin
    model: ModelPin | None
    publish: Publish | None
    priority: int
    limits: JobLimits
    submitted: float  # seconds since 1970, as all times here
    key: str | None = None  # the Idempotency-Key it came with
    fingerprint: str = ""  # what makes two submissions the same
    owner_id: str = ""  # whose it is; jobs of releases before there were any have only the name

    @property
    def account(self) -> str:
        """Whom the job counts for: an identity, or a mere name, which is no identity; empty where no keys are used."""
        return self.owner_id or (f"name:{self.owner}" if self.owner else "")


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a result."""

    model: str
    version: int | None  # None: not published
    moved_alias: bool
    decision: Mapping[str, Any] = field(default_factory=dict)  # the gate's, with its reasons


@dataclass(frozen=True, slots=True)
class Job:
    """An order and what has become of it."""

    order: Order
    state: JobState = JobState.QUEUED
    queued: float = 0.0  # since when it has been waiting
    started: float | None = None  # the first time
    finished: float | None = None
    attempts: int = 0  # starts of its process
    crashes: int = 0  # in a row, without a checkpoint in between
    checkpoint: int = 0  # the newest one's number of updates when it last crashed
    ran: float = 0.0  # seconds, ended attempts together
    cancelling: bool = False  # asked for, not yet done
    error: str = ""  # why it failed
    metrics: Mapping[str, Any] = field(default_factory=dict)  # of the result
    result: Finished | None = None  # where it was published, if it was to be

    @property
    def id(self) -> str:
        """The job's name in every path and route."""
        return self.order.id

    def start(self, now: float) -> Job:
        """Return it with a process about to run."""
        started = self.started if self.started is not None else now
        return replace(self, state=JobState.RUNNING, started=started, attempts=self.attempts + 1)

    def requeue(self, now: float, ran: float = 0.0) -> Job:
        """Return it waiting again, after an attempt of ``ran`` seconds."""
        return replace(self, state=JobState.QUEUED, queued=now, ran=self.ran + ran)

    def end(self, state: JobState, now: float, **facts: Any) -> Job:
        """Return it in a final state."""
        return replace(self, state=state, finished=now, cancelling=False, **facts)


ID = re.compile("[0-9a-f]{20}")
_JOB = TypeAdapter(Job)


def new_id(now: float) -> str:
    """Return a name that nobody can guess; names sort as their jobs came."""
    return f"{int(now * 1000):012x}{secrets.token_hex(4)}"


def is_id(text: str) -> bool:
    """Whether it may name a job, and so a folder."""
    return ID.fullmatch(text) is not None


def to_json(job: Job) -> bytes:
    """Return the document that is kept of a job."""
    return _JOB.dump_json(job)


def from_json(document: bytes | str) -> Job:
    """Read a kept document; raises ValueError when it is not one."""
    return _JOB.validate_json(document)
