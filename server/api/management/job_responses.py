"""Response schemas of jobs; the clients parse answers with them."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from pydantic import Field

from lathe.server.api.management.schemas import ResponseBody
from lathe.server.jobs.job import JobState

if TYPE_CHECKING:
    from lathe.server.jobs.job import Job, Publication


class Pinned(ResponseBody):
    """The version or content that a name referred to when the job was submitted."""

    name: str
    version: int | None = Field(default=None, description="The version of a model; null for a dataset.")
    digest: str = Field(description="sha256, in hexadecimal.")


class JobResult(ResponseBody):
    """The result of a job, and whether it was published."""

    model: str
    version: int | None = Field(description="Null if it was not published.")
    moved_alias: bool = Field(description="Whether the alias moved to it.")
    decision: dict[str, Any] = Field(description="The gate's decision, with its reasons.")

    @classmethod
    def of(cls, result: Publication) -> JobResult:
        return cls(
            model=result.model,
            version=result.version,
            moved_alias=result.moved_alias,
            decision=dict(result.decision),
        )


class JobSummary(ResponseBody):
    """One job."""

    id: str
    kind: str
    state: JobState
    owner: str = Field(description="The name of the key that submitted it; empty without keys.")
    owner_id: str = Field(
        default="", description="The owner's id: `key:<id>` or `jwt:<issuer>:<subject>`; empty without keys."
    )
    dataset: Pinned
    model: Pinned | None
    publish: str | None = Field(description="The model that gets a new version.")
    priority: int
    submitted: str
    started: str | None
    finished: str | None
    ran: float = Field(description="Running time in seconds so far, summed over all attempts.")
    attempts: int = Field(description="How often its process was started.")
    cancelling: bool = Field(description="Whether it is being cancelled.")
    error: str = Field(description="Why it failed; empty if it did not.")
    result: JobResult | None

    @classmethod
    def of(cls, job: Job, ran: float) -> JobSummary:
        """Return the response; `ran` is the running time in seconds, with that of an attempt under way."""
        return cls(**_facts(job, ran))


class JobDetail(JobSummary):
    """One job with its recipe and its progress."""

    recipe: dict[str, Any]
    seconds: float = Field(description="The limit of its running time, in seconds.")
    memory: int = Field(description="The limit of its memory, in bytes.")
    progress: dict[str, Any] | None = Field(description="The last event that its process reported.")
    metrics: dict[str, Any] = Field(
        description="The result's `metrics` and facts about it, at most 256 KiB; `left_out` names fields beyond that."
    )

    @classmethod
    def detail(cls, job: Job, ran: float, progress: dict[str, Any] | None) -> JobDetail:
        order = job.order
        return cls(
            **_facts(job, ran),
            recipe=dict(order.recipe),
            seconds=order.limits.seconds,
            memory=order.limits.memory,
            progress=progress,
            metrics=dict(job.metrics),
        )


class JobAccepted(JobDetail):
    """A job that was submitted."""

    replayed: bool = Field(description="Whether an earlier request with the same Idempotency-Key submitted it.")

    @classmethod
    def accepted(cls, job: Job, replayed: bool) -> JobAccepted:
        return cls(**JobDetail.detail(job, job.ran, None).model_dump(), replayed=replayed)


def _facts(job: Job, ran: float) -> dict[str, Any]:
    order, model = job.order, job.order.model
    return {
        "id": order.id,
        "kind": order.kind,
        "state": job.state,
        "owner": order.owner,
        "owner_id": order.owner_id,
        "dataset": Pinned(name=order.dataset.name, digest=order.dataset.digest),
        "model": Pinned(name=model.name, version=model.version, digest=model.digest) if model else None,
        "publish": order.publish.model if order.publish else None,
        "priority": order.priority,
        "submitted": _time(order.submitted),
        "started": _time(job.started),
        "finished": _time(job.finished),
        "ran": round(ran, 3),
        "attempts": job.attempts,
        "cancelling": job.cancelling,
        "error": job.error,
        "result": JobResult.of(job.result) if job.result else None,
    }


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
