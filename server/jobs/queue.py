"""Which job runs next: a pure function of what waits, what runs and what each owner has had.

The order among waiting jobs: the higher level first (the priority, one more for each ``aging`` seconds of waiting);
then the owner with fewer jobs running; then the one who has used less of late; then who came first. A running job makes
room for one whose priority is above the level it was started at, so waiting alone never interrupts anybody, and whoever
was started after a long wait is not interrupted by those it overtook.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

HALF_LIFE = 3600.0  # seconds after which half of what an owner has used is forgotten


@dataclass(frozen=True, slots=True)
class Policy:
    """How places are given."""

    slots: int = 1  # jobs at a time
    device_slots: int = 1  # of them, on each GPU
    aging: float = 600.0  # seconds of waiting that weigh as much as one step of priority
    least_run: float = 5.0  # seconds a job runs before it has to make room


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued job."""

    id: str
    owner: str
    priority: int
    since: float  # when it was queued
    submitted: float
    device: str = ""  # where it computes, besides the processors

    def level(self, now: float, aging: float) -> int:
        """Return the priority that waiting has earned it."""
        return self.priority + int(max(0.0, now - self.since) / aging)


@dataclass(frozen=True, slots=True)
class Active:
    """A job that has a slot; ``level`` is what it was started at."""

    id: str
    owner: str
    level: int
    started: float
    leaving: bool = False  # has been told to make room, or is to be cancelled
    device: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


class Shares:
    """What each owner has used of late, in seconds; older use counts less."""

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}  # owner -> seconds, as of when

    def charge(self, owner: str, seconds: float, now: float) -> None:
        """Add what an owner's job has taken."""
        self._used[owner] = (self.used(owner, now) + seconds, now)

    def used(self, owner: str, now: float) -> float:
        """Return what counts against an owner."""
        seconds, then = self._used.get(owner, (0.0, now))
        return seconds * math.exp2(-max(0.0, now - then) / HALF_LIFE)


def plan(
    now: float, waiting: Iterable[Waiting], active: Iterable[Active], used: Mapping[str, float], policy: Policy
) -> Plan:
    """Return which jobs start in free slots, and which make room; ``used`` is by owner, nothing where missing."""
    active = list(active)
    counted = Counter(job.owner for job in active)  # what starts counts for those behind it
    taken = Counter(job.device for job in active)
    free = max(0, policy.slots - len(active))

    def turn(job: Waiting) -> tuple[float, int, float, float, str]:
        return -job.level(now, policy.aging), counted[job.owner], used.get(job.owner, 0.0), job.submitted, job.id

    left, able = list(waiting), list[Waiting]()
    held_up: list[Waiting] = []  # their devices have no room
    while len(able) < free + len(active):
        full = [job for job in left if job.device and taken[job.device] >= policy.device_slots]
        if full:
            held_up += sorted(full, key=turn)
            left = [job for job in left if not job.device or taken[job.device] < policy.device_slots]
        if not left:
            break
        chosen = min(left, key=turn)
        left.remove(chosen)
        able.append(chosen)
        counted[chosen.owner] += 1
        taken[chosen.device] += 1
    start, rest = able[:free], able[free:]
    room = sum(job.leaving for job in active)  # slots that will be free soon
    stop = _victims(now, rest[room:], active, policy)
    for device in {job.device for job in held_up}:
        there = [job for job in active if job.device == device and job.id not in stop]
        waits = [job for job in held_up if job.device == device]
        stop += _victims(now, waits[sum(job.leaving for job in there) :], there, policy)
    return Plan(tuple(job.id for job in start), tuple(stop))


def _victims(now: float, rest: Iterable[Waiting], active: list[Active], policy: Policy) -> list[str]:
    """Who makes room for jobs that found none: the lowest level first, of equals whoever has run least."""
    able = [job for job in active if not job.leaving and now - job.started >= policy.least_run]
    able.sort(key=lambda job: (job.level, -job.started))
    victims: list[str] = []
    for candidate in rest:
        if len(victims) < len(able) and candidate.priority > able[len(victims)].level:
            victims.append(able[len(victims)].id)
    return victims
