"""Retention of ended jobs."""

from __future__ import annotations

from collections.abc import Iterable

from lathe.server.jobs.job import Job


def expired_jobs(jobs: Iterable[Job], kept: int) -> list[Job]:
    """Return the ended jobs beyond the newest `kept`, oldest end first."""
    ended = sorted((job for job in jobs if job.state.is_final), key=lambda job: (job.finished or 0.0, job.id))
    return ended[: max(0, len(ended) - kept)]
