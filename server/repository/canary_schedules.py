"""Advances scheduled canaries (progressive rollouts) from step to step; after all `seconds` the guard decides.

The current step and its start are durable. A running server measures a step by its monotonic clock, so that setting the
system's clock neither shortens nor stretches it. A server that starts computes the rest of the step from the system's
clock once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from lathe.server.canary.guard import Verdict
from lathe.server.canary.plan import SCHEDULED, CanaryPlan
from lathe.server.canary.steps import format_time, parse_time, seconds_left
from lathe.server.errors import Conflict, ServerError
from lathe.server.repository.live_models import LiveModel, LiveModels
from lathe.server.repository.store import Origin
from lathe.server.repository.trials import RETRY, Trials
from lathe.server.telemetry.logs import log_fields

log = logging.getLogger(__name__)

SCHEDULE = Origin("schedule")
CHECK_INTERVAL = 0.5  # seconds between two checks for steps that are due
_StepKey: TypeAlias = tuple[int, int]  # the generation of a trial, and its step


@dataclass(frozen=True)
class Clocks:
    """The monotonic clock, and the system's clock in seconds since 1970."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


@dataclass
class _Timer:
    step_key: _StepKey
    ends: float  # monotonic seconds
    not_before: float = field(default=0.0)  # the earliest retry after a failed attempt, in monotonic seconds


class CanarySchedules:
    """Advances trials from step to step; all methods run on the event loop."""

    def __init__(self, models: LiveModels, trials: Trials, clocks: Clocks | None = None) -> None:
        self._models = models
        self._trials = trials
        self._clocks = clocks or Clocks()
        self._timers: dict[str, _Timer] = {}

    async def run(self) -> None:
        """Check for due steps periodically, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(CHECK_INTERVAL)

    async def look(self) -> None:
        """Begin the steps that are due now, and let a guard decide after the last `seconds`; errors are logged."""
        scheduled = {model.name: model for model in self._models if model.aliases.canary and model.aliases.canary.steps}
        for name in self._timers.keys() - scheduled.keys():
            del self._timers[name]
        for model in scheduled.values():
            try:
                await self._look_at(model)
            except Exception:  # the rollouts of other models continue
                log.exception("a rollout could not be advanced", extra=log_fields(model=model.name))

    async def _look_at(self, model: LiveModel) -> None:
        plan = model.aliases.canary
        if plan is not None and plan.steps and self.left(model.name, plan) <= 0.0:
            await self._advance(model, plan)

    def left(self, name: str, plan: CanaryPlan) -> float:
        """Return the seconds, at least 0, until the present step of a model's trial ends, or its first step begins."""
        return max(self._timer(name, plan).ends - self._clocks.monotonic(), 0.0)

    def _timer(self, name: str, plan: CanaryPlan) -> _Timer:
        step_key = (plan.generation, plan.step)
        timer = self._timers.get(name)
        if timer is None or timer.step_key != step_key:
            timer = self._timers[name] = _Timer(
                step_key, self._clocks.monotonic() + self._seconds_left_by_wall_clock(plan)
            )
        return timer

    def _seconds_left_by_wall_clock(self, plan: CanaryPlan) -> float:
        now = self._clocks.wall()
        if plan.step == SCHEDULED:
            return max(parse_time("start_at", plan.start_at) - now, 0.0)
        return seconds_left(parse_time("since", plan.since), plan.steps[plan.step].seconds, now)

    async def _advance(self, model: LiveModel, plan: CanaryPlan) -> None:
        """After the `seconds` of the present step: begin the next step if `_can_advance` allows it.

        If no later step has `seconds`, the guard may make the candidate live from now on. A step that fails to begin is
        tried again later.
        """
        timer, now = self._timer(model.name, plan), self._clocks.monotonic()
        if model.trial is not None and not any(step.seconds for step in plan.steps[plan.step + 1 :]):
            model.trial.release()
        if plan.step == len(plan.steps) - 1 or not _can_advance(model, plan) or now < timer.not_before:
            return
        try:
            await self._trials.advance(model, plan, format_time(self._clocks.wall()), SCHEDULE)
        except Conflict as error:
            log.info(
                "%s", error.message, extra=log_fields(model=model.name, version=plan.version)
            )  # another server was first
        except ServerError as error:
            timer.not_before = now + RETRY
            fields = log_fields(model=model.name, version=plan.version, code=error.code)
            log.error("step %d could not begin: %s", plan.step + 2, error.message, extra=fields)


def _can_advance(model: LiveModel, plan: CanaryPlan) -> bool:
    """Whether the next step may begin: the trial runs, no rollback is due, and the present step has its requests.

    For the first step: whether the trial can run (`LiveModel.can_run_trial`).
    """
    trial = model.trial
    if trial is None or plan.step == SCHEDULED:
        return plan.step == SCHEDULED and model.can_run_trial(plan)
    return trial.verdict is not Verdict.ROLL_BACK and trial.guard.requests >= plan.steps[plan.step].requests
