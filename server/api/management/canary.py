"""The management routes of canaries."""

from __future__ import annotations

from fastapi import APIRouter, Request

from lathe.server.api.management.canary_schemas import CanaryAsked, CanaryState
from lathe.server.api.management.models import FAILURES, IdempotencyKey, ModelName, origin_of
from lathe.server.api.management.schemas import AuditEntry
from lathe.server.canary.plan import CanaryPlan
from lathe.server.canary.traffic import Trial
from lathe.server.repository import names
from lathe.server.repository.canary_schedules import CanarySchedules
from lathe.server.repository.trials import Trials


def canary_routes(trials: Trials, schedules: CanarySchedules) -> APIRouter:
    """The routes below /api/v1/models/{model}/canary."""
    routes = APIRouter(prefix="/api/v1/models/{model}/canary", tags=["canary"], responses=FAILURES)

    def state(name: str, plan: CanaryPlan, trial: Trial | None) -> CanaryState:
        return CanaryState.of(plan, trial, schedules.left(name, plan) if plan.steps else None)

    @routes.post("", status_code=201)
    async def start(
        request: Request, model: ModelName, asked: CanaryAsked, idempotency_key: IdempotencyKey = None
    ) -> CanaryState:
        """Start a canary: a version gets a share of the requests, and is promoted or rolled back by its results."""
        name = names.check_model(model)
        outcome = await trials.start(name, asked.plan, origin_of(request, idempotency_key))
        return state(name, outcome.record.state.canary or asked.plan, trials.find(name))

    @routes.get("")
    async def get(model: ModelName) -> CanaryState:
        """Return the running canary and its evidence."""
        return state(names.check_model(model), *trials.current(model))

    @routes.delete("")
    async def cancel(request: Request, model: ModelName, idempotency_key: IdempotencyKey = None) -> AuditEntry:
        """Cancel the canary; the live version answers all requests again."""
        outcome = await trials.cancel(names.check_model(model), origin_of(request, idempotency_key))
        return AuditEntry.of(outcome.record)

    return routes
