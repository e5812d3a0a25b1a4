"""A job: its order, which never changes, and its state. Immutable values without I/O.

queued -> running -> publishing -> succeeded | failed
queued | running | publishing -> cancelled,  running -> failed | succeeded (nothing to publish)
running -> queued: pre-empted, the server stopped, or the process crashed and is retried
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
    """The state of a job. The description of this module lists the transitions."""

    QUEUED = "queued"  # waits for a slot; may have run before
    RUNNING = "running"  # has a process, or will get one now
    PUBLISHING = "publishing"  # its result is being made a version
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}


@dataclass(frozen=True, slots=True)
class DatasetPin:
    """The dataset of a job: its name and its digest at submission."""

    name: str  # the digest, if it had no name
    digest: str  # sha256, hexadecimal


@dataclass(frozen=True, slots=True)
class ModelPin:
    """The version that a job starts from or evaluates; an alias is resolved at submission."""

    name: str
    version: int
    digest: str  # sha256, hexadecimal


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """How the result is published."""

    model: str
    alias: str | None = None  # the alias to move if the gate passes
    allow_signature_change: bool = False
    gate: Mapping[str, Any] | None = None  # see `lathe.server.jobs.gate.Gate`


@dataclass(frozen=True, slots=True)
class JobLimits:
    """The resource limits of a job."""

    seconds: float  # running time of all attempts together
    memory: int  # bytes of resident memory


@dataclass(frozen=True, slots=True)
class Order:
    """A submitted job, as it was requested."""

    id: str
    owner: str  # name of the API key that submitted it; empty without keys
    kind: str  # a key of `lathe.server.jobs.kinds.KINDS`
    recipe: Mapping[str, Any]
    dataset: DatasetPin
    model: ModelPin | None
    publish: PublishRequest | None
    priority: int
    limits: JobLimits
    submitted: float  # seconds since 1970, like all times here
    key: str | None = None  # the Idempotency-Key of the submission
    fingerprint: str = ""  # hash of the request; equal for equal submissions
    owner_id: str = ""  # the submitter's identity; empty in jobs of releases without identities

    @property
    def account(self) -> str:
        """The account the job counts for: the identity, `name:` and the name for old jobs, or empty without keys."""
        return self.owner_id or (f"name:{self.owner}" if self.owner else "")


@dataclass(frozen=True, slots=True)
class Publication:
    """How a result was published."""

    model: str
    version: int | None  # None: not published
    moved_alias: bool
    decision: Mapping[str, Any] = field(default_factory=dict)  # the gate's decision document


@dataclass(frozen=True, slots=True)
class Job:
    """An order and its progress."""

    order: Order
    state: JobState = JobState.QUEUED
    queued: float = 0.0  # time of the last entry into the queue
    started: float | None = None  # time of the first start
    finished: float | None = None
    attempts: int = 0  # starts of its process
    crashes: int = 0  # consecutive, without progress in between
    checkpoint: int = 0  # progress at the last crash: `JobFolders.saved_progress`
    ran: float = 0.0  # seconds of all ended attempts
    cancelling: bool = False  # a cancellation is requested but not done
    error: str = ""  # why it failed
    metrics: Mapping[str, Any] = field(default_factory=dict)  # of the result
    result: Publication | None = None  # the publication, if one was requested

    @property
    def id(self) -> str:
        """The job's name in every path and route."""
        return self.order.id

    def start(self, now: float) -> Job:
        """Return the job in state RUNNING, with one more attempt."""
        started = self.started if self.started is not None else now
        return replace(self, state=JobState.RUNNING, started=started, attempts=self.attempts + 1)

    def requeue(self, now: float, ran: float = 0.0) -> Job:
        """Return the job in state QUEUED again, after an attempt of `ran` seconds."""
        return replace(self, state=JobState.QUEUED, queued=now, ran=self.ran + ran)

    def end(self, state: JobState, now: float, **facts: Any) -> Job:
        """Return the job in a final `state` since `now`, with the fields in `facts` replaced."""
        return replace(self, state=state, finished=now, cancelling=False, **facts)


ID = re.compile("[0-9a-f]{20}")
_JOB = TypeAdapter(Job)


def new_id(now: float) -> str:
    """Return a new id: 12 hexadecimal digits of the time in ms, so that ids sort by age, and 8 random ones."""
    return f"{int(now * 1000):012x}{secrets.token_hex(4)}"


def is_id(text: str) -> bool:
    """Whether a text has the form of a job id, and so may name a folder."""
    return ID.fullmatch(text) is not None


def to_json(job: Job) -> bytes:
    """Serialize a job."""
    return _JOB.dump_json(job)


def from_json(document: bytes | str) -> Job:
    """Parse a serialized job; raises ValueError."""
    return _JOB.validate_json(document)
