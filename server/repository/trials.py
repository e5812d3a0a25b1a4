"""Begins, advances and ends trials of candidates, by calls and by the guard's verdict.

A move of the live alias ends a trial, too: see `Aliases.moved`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from lathe.server.backends.language import TextModel
from lathe.server.canary.guard import Verdict
from lathe.server.canary.plan import CanaryPlan
from lathe.server.canary.steps import format_time
from lathe.server.canary.traffic import Trial
from lathe.server.errors import BadRequest, Conflict, NotFound, ServerError
from lathe.server.repository.aliases import Aliases
from lathe.server.repository.housekeeping import Housekeeping
from lathe.server.repository.live_models import LiveModel, LiveModels
from lathe.server.repository.loader import Loader
from lathe.server.repository.manifest import Signature
from lathe.server.repository.names import LIVE_ALIAS
from lathe.server.repository.store import Change, Origin, Outcome, Store
from lathe.server.telemetry.logs import log_fields

log = logging.getLogger(__name__)

GUARD = Origin("guard")
RETRY = 5.0  # seconds until a verdict that could not be stored is retried


class Trials:
    """Begins, advances and ends trials; each of these is a durable change like any other."""

    def __init__(self, store: Store, models: LiveModels, loader: Loader, housekeeping: Housekeeping) -> None:
        self._store = store
        self._models = models
        self._loader = loader
        self._housekeeping = housekeeping
        models.decided = self._on_verdict

    def current(self, name: str) -> tuple[CanaryPlan, Trial | None]:
        """Return a model's plan, and its trial if it is running in this server; raises NotFound without a plan."""
        model = self._models.known(name)
        if model.aliases.canary is None:
            raise NotFound(f"model {name!r} has no canary")
        return model.aliases.canary, model.trial

    def find(self, name: str) -> Trial | None:
        """Return the trial of a model's canary that is running in this server; None if there is none.

        Raises NotFound for an unknown model.
        """
        return self._models.known(name).trial

    async def start(self, name: str, plan: CanaryPlan, origin: Origin) -> Outcome:
        """Begin the trial of a version; raises BadRequest, NotFound, Conflict, or the error of loading it.

        BadRequest for a plan with values out of range; Conflict if no other version is live, another trial is running,
        inputs or outputs differ from the live version's, or the model was unloaded by a call.
        """
        model = self._models.check_changeable(self._models.known(name))
        origin = replace(origin, fingerprint=f"canary {plan.validate().to_json()}")
        return await self._loader.run_shielded(self._start(model, plan.asked(), origin))

    async def cancel(self, name: str, origin: Origin) -> Outcome:
        """End a trial without promotion; the live version gets all requests again. Raises NotFound, Conflict."""
        model = self._models.known(name)
        origin = replace(origin, fingerprint="cancel")
        if (found := await asyncio.to_thread(self._store.find_key, name, origin)) is not None:
            return found
        plan, _ = self.current(name)
        return await self._loader.run_shielded(self._end(model, plan, "cancelled", "", origin))

    async def advance(self, model: LiveModel, plan: CanaryPlan, since: str, origin: Origin) -> Outcome:
        """Begin a trial's next step, dated `since`; raises Conflict if that step has begun or the trial has ended."""
        number = plan.step + 1

        def change(state: Aliases) -> Aliases:
            if not plan.is_same_trial(state.canary) or state.canary != plan:
                raise Conflict(
                    f"step {number + 1} of the canary of version {plan.version} has begun, or the canary has ended"
                )
            return state.stepped(plan.at(number, since))

        reason = f"step {number + 1} of {len(plan.steps)}: {plan.steps[number].describe()}"
        return await self._loader.run_shielded(self._change(model, "step", plan.version, change, origin, reason))

    async def _start(self, model: LiveModel, plan: CanaryPlan, origin: Origin) -> Outcome:
        if (live := model.aliases.version(LIVE_ALIAS)) is not None:
            await self._loader.ensure(model, live)  # its signature must be known
        with model.pin(plan.version):
            candidate = await self._loader.ensure(model, plan.version)
            if plan.shadow and isinstance(candidate.model, TextModel):
                raise BadRequest(
                    f"shadow: expected 0 for a language model, whose texts are not compared, got {plan.shadow}"
                )
            signature = Signature.of(candidate.model.inputs, candidate.model.outputs)

            def change(state: Aliases) -> Aliases:
                self._check(model, plan, state, signature)
                return state.with_canary(replace(plan, since=format_time(time.time())) if plan.steps else plan)

            return await self._change(model, "canary", plan.version, change, origin)

    def _check(self, model: LiveModel, plan: CanaryPlan, state: Aliases, signature: Signature) -> None:
        live = state.version(LIVE_ALIAS)
        if live is None:
            raise Conflict(f"model {model.name!r} has no live version that a candidate could be compared with")
        if live == plan.version:
            raise Conflict(f"version {live} is live: a candidate must be another version")
        if state.canary is not None:
            raise Conflict(f"a canary of version {state.canary.version} is running: cancel the canary first")
        stable = model.signature(live)
        if stable is None:
            raise Conflict(f"version {live}, which is live, is not in memory: load the model first")
        if stable != signature:
            raise Conflict(
                f"inputs or outputs of version {plan.version} differ from those of version {live}, which is live: "
                f"{stable.describe()} became {signature.describe()}"
            )

    async def _end(self, model: LiveModel, plan: CanaryPlan, action: str, reason: str, origin: Origin) -> Outcome:
        def change(state: Aliases) -> Aliases:
            if not plan.is_same_trial(state.canary):
                raise Conflict(f"the canary of version {plan.version} has ended")
            return state.moved(LIVE_ALIAS, plan.version) if action == "promoted" else state.with_canary(None)

        return await self._change(model, action, plan.version, change, origin, reason)

    async def _change(
        self, model: LiveModel, action: str, version: int, change: Change, origin: Origin, reason: str = ""
    ) -> Outcome:
        async with model.lock:
            outcome = await asyncio.to_thread(
                self._store.change_trial, model.name, action, version, change, origin, reason
            )
            model.show(outcome.record.state)
        self._loader.spawn(self._housekeeping.tidy(model))
        return outcome

    def _on_verdict(self, model: LiveModel, plan: CanaryPlan, verdict: Verdict, reason: str) -> None:
        """End the trial in the background by the guard's verdict; without `plan.promote` a passed one stays on trial.

        The trial itself has stopped sending requests to a rejected candidate.
        """
        if verdict is Verdict.ROLL_BACK or plan.promote:
            action = "promoted" if verdict is Verdict.PROMOTE else "rolled_back"
            self._loader.spawn(self._end_with_retries(model, plan, action, reason))

    async def _end_with_retries(self, model: LiveModel, plan: CanaryPlan, action: str, reason: str) -> None:
        while plan.is_same_trial(model.aliases.canary):
            try:
                await self._end(model, plan, action, reason, GUARD)
            except Conflict as error:
                fields = log_fields(model=model.name, version=plan.version)
                log.info("%s", error.message, extra=fields)  # another server or a caller was first
                return
            except ServerError as error:
                fields = log_fields(model=model.name, version=plan.version, code=error.code)
                log.error("version %d could not be %s: %s", plan.version, action, error.message, extra=fields)
                await asyncio.sleep(RETRY)
