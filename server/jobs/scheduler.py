"""The scheduler of jobs: a pure function of the waiting jobs, the running jobs and each owner's recent usage.

Waiting jobs are ordered by level (the priority, plus 1 per `seconds_per_level` of waiting), highest first; then by the
owner's number of running jobs, fewest first; then by the owner's recent usage (fair share), least first; then by age. A
running job is pre-empted by a job whose priority is above the level at which the running one was started. So waiting
alone never pre-empts a job, and a job that was started after a long wait is not pre-empted by jobs it overtook.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

HALF_LIFE = 3600.0  # seconds in which an owner's recorded usage decays by half


@dataclass(frozen=True, slots=True)
class Policy:
    """The slots of a server, and the weights of scheduling."""

    slots: int = 1  # jobs that run at a time
    device_slots: int = 1  # jobs that run at a time on each GPU
    seconds_per_level: float = 600.0  # seconds of waiting that raise the level by 1
    min_run_seconds: float = 5.0  # seconds that a job runs before it can be pre-empted


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A queued job."""

    id: str
    owner: str
    priority: int
    since: float  # time of its last entry into the queue
    submitted: float
    device: str = ""  # the GPU that it uses; "" for none

    def level(self, now: float, aging: float) -> int:
        """Return the priority, plus 1 for each `aging` seconds of waiting."""
        return self.priority + int(max(0.0, now - self.since) / aging)


@dataclass(frozen=True, slots=True)
class ActiveJob:
    """A job that has a slot; `level` is its level at the start."""

    id: str
    owner: str
    level: int
    started: float
    leaving: bool = False  # it is being pre-empted or cancelled
    device: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The ids of the jobs to start and to stop now."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


class RecentUsage:
    """Each owner's recent usage in seconds, with exponential decay (`HALF_LIFE`)."""

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}  # owner -> usage in seconds, and the time of that value

    def charge(self, owner: str, seconds: float, now: float) -> None:
        """Add the running time of an owner's job."""
        self._used[owner] = (self.used(owner, now) + seconds, now)

    def used(self, owner: str, now: float) -> float:
        """Return an owner's decayed usage in seconds."""
        seconds, then = self._used.get(owner, (0.0, now))
        return seconds * math.exp2(-max(0.0, now - then) / HALF_LIFE)


def plan_jobs(
    now: float, waiting: Iterable[WaitingJob], active: Iterable[ActiveJob], used: Mapping[str, float], policy: Policy
) -> Plan:
    """Return the jobs to start in free slots, and those to pre-empt; `used`: usage by owner, 0 if missing."""
    active = list(active)
    owner_jobs = Counter(job.owner for job in active)  # a job that starts counts for the next ones' order
    device_jobs = Counter(job.device for job in active)
    free = max(0, policy.slots - len(active))

    def order(job: WaitingJob) -> tuple[float, int, float, float, str]:
        return (
            -job.level(now, policy.seconds_per_level),
            owner_jobs[job.owner],
            used.get(job.owner, 0.0),
            job.submitted,
            job.id,
        )

    remaining, runnable = list(waiting), list[WaitingJob]()
    blocked: list[WaitingJob] = []  # jobs whose GPU has no free slot
    while len(runnable) < free + len(active):
        full = [job for job in remaining if job.device and device_jobs[job.device] >= policy.device_slots]
        if full:
            blocked += sorted(full, key=order)
            remaining = [job for job in remaining if not job.device or device_jobs[job.device] < policy.device_slots]
        if not remaining:
            break
        first = min(remaining, key=order)
        remaining.remove(first)
        runnable.append(first)
        owner_jobs[first.owner] += 1
        device_jobs[first.device] += 1
    start, rest = runnable[:free], runnable[free:]
    leaving_slots = sum(job.leaving for job in active)  # slots that will be free soon
    stop = _victims(now, rest[leaving_slots:], active, policy)
    for device in {job.device for job in blocked}:
        device_active = [job for job in active if job.device == device and job.id not in stop]
        device_waiting = [job for job in blocked if job.device == device]
        stop += _victims(now, device_waiting[sum(job.leaving for job in device_active) :], device_active, policy)
    return Plan(tuple(job.id for job in start), tuple(stop))


def _victims(now: float, rest: Iterable[WaitingJob], active: list[ActiveJob], policy: Policy) -> list[str]:
    """Return the ids of the jobs to pre-empt for `rest`: lowest level first, at equal level the latest started first.

    At most one for each job in `rest`, and only if the priority of that job is above the level of the running one.
    """
    preemptible = [job for job in active if not job.leaving and now - job.started >= policy.min_run_seconds]
    preemptible.sort(key=lambda job: (job.level, -job.started))
    victims: list[str] = []
    for candidate in rest:
        if len(victims) < len(preemptible) and candidate.priority > preemptible[len(victims)].level:
            victims.append(preemptible[len(victims)].id)
    return victims
