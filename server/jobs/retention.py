"""Which jobs are not kept any longer: pure."""

from __future__ import annotations

from collections.abc import Iterable

from server.jobs.job import Job


def surplus(jobs: Iterable[Job], kept: int) -> list[Job]:
    """Return the jobs that ended first, so that ``kept`` that have ended remain."""
    ended = sorted((job for job in jobs if job.state.is_final), key=lambda job: (job.finished or 0.0, job.id))
    return ended[: max(0, len(ended) - kept)]
