"""Trials of candidates over the management API."""

from __future__ import annotations

from fastapi import APIRouter, Request

from server.api.canary_schemas import CanaryAsked, CanaryState
from server.api.models import FAILURES, Key, Model, origin_of
from server.api.schemas import AuditEntry
from server.canary.plan import CanaryPlan
from server.repository import names
from server.repository.trials import Trials


def canary_routes(trials: Trials) -> APIRouter:
    """Return the routes below /api/v1/models/{model}/canary."""
    routes = APIRouter(prefix="/api/v1/models/{model}/canary", tags=["canary"], responses=FAILURES)

    @routes.post("", status_code=201)
    async def start(request: Request, model: Model, asked: CanaryAsked, idempotency_key: Key = None) -> CanaryState:
        """Give a version a share of the requests; it is promoted or rolled back on what it shows."""
        plan = CanaryPlan(**asked.model_dump())
        name = names.check_model(model)
        outcome = await trials.start(name, plan, origin_of(request, idempotency_key))
        return CanaryState.of(outcome.record.state.canary or plan, trials.find(name))

    @routes.get("")
    async def get(model: Model) -> CanaryState:
        """Return the trial under way and its evidence."""
        return CanaryState.of(*trials.current(names.check_model(model)))

    @routes.delete("")
    async def cancel(request: Request, model: Model, idempotency_key: Key = None) -> AuditEntry:
        """End the trial; the live version answers everything again."""
        outcome = await trials.cancel(names.check_model(model), origin_of(request, idempotency_key))
        return AuditEntry.of(outcome.record)

    return routes
