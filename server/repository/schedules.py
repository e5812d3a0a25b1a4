"""Roll-outs go on by themselves: from step to step, and in the end to where the guard decides.

Which step it is, and since when, is durable. While a server runs, its monotonic clock counts, so that setting the
system's clock neither shortens nor stretches a step; a server that starts reads from the system's clock how much of the
step is left, and then counts by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from server.canary.guard import Verdict
from server.canary.plan import SCHEDULED, CanaryPlan
from server.canary.schedule import moment, remaining, written
from server.errors import Conflict, ServerError
from server.repository.live import LiveModel, LiveModels
from server.repository.store import Origin
from server.repository.trials import RETRY, Trials
from server.telemetry.logs import about

log = logging.getLogger(__name__)

SCHEDULE = Origin("schedule")
LOOK = 0.5  # seconds between two looks at what is due
_Stretch: TypeAlias = tuple[int, int]  # a trial by its generation, and its step


@dataclass(frozen=True)
class Clocks:
    """Seconds by the clock that is never set, and since 1970 by the one that may be."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


@dataclass
class _Timer:
    stretch: _Stretch
    ends: float  # monotonic seconds
    not_before: float = field(default=0.0)  # another attempt, after one that failed


class Schedules:
    """The one who moves trials from step to step; all methods run on the event loop."""

    def __init__(self, models: LiveModels, trials: Trials, clocks: Clocks | None = None) -> None:
        self._models = models
        self._trials = trials
        self._clocks = clocks or Clocks()
        self._timers: dict[str, _Timer] = {}

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK)

    async def look(self) -> None:
        """Do what is due now."""
        scheduled = {model.name: model for model in self._models if model.aliases.canary and model.aliases.canary.steps}
        for name in self._timers.keys() - scheduled.keys():
            del self._timers[name]
        for model in scheduled.values():
            try:
                await self._look_at(model)
            except Exception:  # the others' roll-outs go on
                log.exception("a roll-out could not be moved on", extra=about(model=model.name))

    async def _look_at(self, model: LiveModel) -> None:
        plan = model.aliases.canary
        if plan is not None and plan.steps and self.left(model.name, plan) <= 0.0:
            await self._due(model, plan)

    def left(self, name: str, plan: CanaryPlan) -> float:
        """Return the seconds until the present step of a model's trial ends, or its first one begins."""
        return max(self._timer(name, plan).ends - self._clocks.monotonic(), 0.0)

    def _timer(self, name: str, plan: CanaryPlan) -> _Timer:
        stretch = (plan.generation, plan.step)
        timer = self._timers.get(name)
        if timer is None or timer.stretch != stretch:
            timer = self._timers[name] = _Timer(stretch, self._clocks.monotonic() + self._left_by_the_wall(plan))
        return timer

    def _left_by_the_wall(self, plan: CanaryPlan) -> float:
        now = self._clocks.wall()
        if plan.step == SCHEDULED:
            return max(moment("start_at", plan.start_at) - now, 0.0)
        return remaining(moment("since", plan.since), plan.steps[plan.step].seconds, now)

    async def _due(self, model: LiveModel, plan: CanaryPlan) -> None:
        """A step's time is over."""
        timer, now = self._timer(model.name, plan), self._clocks.monotonic()
        if plan.step == len(plan.steps) - 1:
            if model.trial is not None:
                model.trial.release()
            return
        if not _may_move(model, plan) or now < timer.not_before:
            return
        try:
            await self._trials.advance(model, plan, written(self._clocks.wall()), SCHEDULE)
        except Conflict as error:
            log.info("%s", error.message, extra=about(model=model.name, version=plan.version))  # another was first
        except ServerError as error:
            timer.not_before = now + RETRY
            fields = about(model=model.name, version=plan.version, code=error.code)
            log.error("step %d could not begin: %s", plan.step + 2, error.message, extra=fields)


def _may_move(model: LiveModel, plan: CanaryPlan) -> bool:
    """Whether the next step may begin: both versions are in memory, none is judged, and enough was seen."""
    trial = model.trial
    if trial is None or plan.step == SCHEDULED:
        return plan.step == SCHEDULED and model.can_try(plan)
    return trial.verdict is not Verdict.ROLL_BACK and trial.guard.requests >= plan.steps[plan.step].requests
