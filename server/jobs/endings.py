"""What follows from how an attempt ended: a pure function from a running job to what it is next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from server.jobs.job import Job, JobState
from server.jobs.runner import End, Ending

CRASHES = 3  # in a row, without a new checkpoint in between, after which a job has failed


@dataclass(frozen=True, slots=True)
class Found:
    """What an attempt has left in the job's folder."""

    checkpoint: int = 0  # updates of the newest one
    result: bool = False
    metrics: Mapping[str, Any] = field(default_factory=dict)


def after(job: Job, ending: Ending, found: Found, now: float) -> Job:
    """Return the job once its process has ended."""
    if job.cancelling:
        return job.end(JobState.CANCELLED, now, ran=job.ran + ending.seconds)
    match ending.end:
        case End.DONE if found.result:
            return _done(job, ending, found, now)
        case End.STOPPED:
            return job.requeue(now, ending.seconds)
        case End.REFUSED:
            return job.end(JobState.FAILED, now, error=ending.reason, ran=job.ran + ending.seconds)
        case End.DONE:
            return _crashed(job, replace(ending, reason="its process ended without a result"), found, now)
    return _crashed(job, ending, found, now)


def _done(job: Job, ending: Ending, found: Found, now: float) -> Job:
    ran = job.ran + ending.seconds
    if job.order.publish is None:
        return job.end(JobState.SUCCEEDED, now, metrics=found.metrics, ran=ran)
    return replace(job, state=JobState.PUBLISHING, metrics=found.metrics, ran=ran)


def _crashed(job: Job, ending: Ending, found: Found, now: float) -> Job:
    """Try again from the last checkpoint, unless it goes nowhere."""
    crashes = 1 if found.checkpoint > job.checkpoint else job.crashes + 1
    job = replace(job, crashes=crashes, checkpoint=found.checkpoint)
    if crashes < CRASHES:
        return job.requeue(now, ending.seconds)
    error = f"{ending.reason} ({crashes} times in a row, without a checkpoint in between)"
    return job.end(JobState.FAILED, now, error=error, ran=job.ran + ending.seconds)
