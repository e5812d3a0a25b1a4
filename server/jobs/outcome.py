"""The state of a job after an attempt, as a pure function of how the attempt ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lathe.server.jobs.job import Job, JobState
from lathe.server.jobs.runner import Ending, EndKind

MAX_CRASHES = 3  # consecutive crashes without progress after which a job fails


@dataclass(frozen=True, slots=True)
class AttemptFiles:
    """The files that an attempt left in the job's folder."""

    checkpoint: int = 0  # progress that the next attempt keeps: `JobFolders.saved_progress`
    result: bool = False  # whether there is a result folder
    metrics: Mapping[str, Any] = field(default_factory=dict)


def after_attempt(job: Job, ending: Ending, found: AttemptFiles, now: float) -> Job:
    """Return the job after its process has ended at `now`: requeued, publishing or in a final state."""
    if job.cancelling:
        return job.end(JobState.CANCELLED, now, ran=job.ran + ending.seconds)
    match ending.end:
        case EndKind.DONE if found.result:
            return _after_result(job, ending, found, now)
        case EndKind.STOPPED:
            return job.requeue(now, ending.seconds)
        case EndKind.REFUSED:
            return job.end(JobState.FAILED, now, error=ending.reason, ran=job.ran + ending.seconds)
        case EndKind.DONE:
            return _after_crash(job, replace(ending, reason="its process ended without a result"), found, now)
    return _after_crash(job, ending, found, now)


def _after_result(job: Job, ending: Ending, found: AttemptFiles, now: float) -> Job:
    ran = job.ran + ending.seconds
    if job.order.publish is None:
        return job.end(JobState.SUCCEEDED, now, metrics=found.metrics, ran=ran)
    return replace(job, state=JobState.PUBLISHING, metrics=found.metrics, ran=ran)


def _after_crash(job: Job, ending: Ending, found: AttemptFiles, now: float) -> Job:
    """Return a crashed job requeued, or failed after `MAX_CRASHES` crashes in a row without progress.

    Progress is a new checkpoint or, in a sweep, also the end of a trial.
    """
    crashes = 1 if found.checkpoint > job.checkpoint else job.crashes + 1
    job = replace(job, crashes=crashes, checkpoint=found.checkpoint)
    if crashes < MAX_CRASHES:
        return job.requeue(now, ending.seconds)
    error = f"{ending.reason} ({crashes} times in a row, without progress in between)"
    return job.end(JobState.FAILED, now, error=error, ran=job.ran + ending.seconds)
