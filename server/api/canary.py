"""Trials of candidates over the management API."""

from __future__ import annotations

from fastapi import APIRouter, Request

from server.api.canary_schemas import CanaryAsked, CanaryState
from server.api.models import FAILURES, Key, Model, origin_of
from server.api.schemas import AuditEntry
from server.canary.plan import CanaryPlan
from server.canary.traffic import Trial
from server.repository import names
from server.repository.schedules import Schedules
from server.repository.trials import Trials


def canary_routes(trials: Trials, schedules: Schedules) -> APIRouter:
    """Return the routes below /api/v1/models/{model}/canary."""
    routes = APIRouter(prefix="/api/v1/models/{model}/canary", tags=["canary"], responses=FAILURES)

    def state(name: str, plan: CanaryPlan, trial: Trial | None) -> CanaryState:
        return CanaryState.of(plan, trial, schedules.left(name, plan) if plan.steps else None)

    @routes.post("", status_code=201)
    async def start(request: Request, model: Model, asked: CanaryAsked, idempotency_key: Key = None) -> CanaryState:
        """Give a version a share of the requests; it is promoted or rolled back on what it shows."""
        name = names.check_model(model)
        outcome = await trials.start(name, asked.plan, origin_of(request, idempotency_key))
        return state(name, outcome.record.state.canary or asked.plan, trials.find(name))

    @routes.get("")
    async def get(model: Model) -> CanaryState:
        """Return the trial under way and its evidence."""
        return state(names.check_model(model), *trials.current(model))

    @routes.delete("")
    async def cancel(request: Request, model: Model, idempotency_key: Key = None) -> AuditEntry:
        """End the trial; the live version answers everything again."""
        outcome = await trials.cancel(names.check_model(model), origin_of(request, idempotency_key))
        return AuditEntry.of(outcome.record)

    return routes
