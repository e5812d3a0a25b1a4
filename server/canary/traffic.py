"""The traffic of a canary: assigns requests to versions, and observes their outcomes.

A trial replaces the route of requests without a version. Each of its two arms is a servable that reports all outcomes.
Shadow requests: the candidate also answers some requests of the stable version, so that the answers can be compared.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from time import monotonic
from typing import TypeAlias

import numpy as np

from lathe.server.backends.language import TextModel
from lathe.server.batching.entry import Entry, Outcome, State
from lathe.server.canary.guard import Guard, Observation, Verdict
from lathe.server.canary.plan import CanaryPlan
from lathe.server.errors import ServerError, Unavailable
from lathe.server.serving.servable import Servable
from lathe.server.serving.text_outcome import TextOutcome
from lathe.server.telemetry.logs import log_fields
from lathe.server.types import Array, Tensors

log = logging.getLogger(__name__)

OnVerdict: TypeAlias = Callable[[CanaryPlan, Verdict, str], None]
OnOutcome: TypeAlias = Callable[[Tensors, Outcome, float], None]  # inputs, outcome, seconds between them
OnText: TypeAlias = Callable[[TextOutcome], None]
MAX_SHADOWS_IN_FLIGHT = 16  # requests in flight at the candidate above which it gets no shadow requests
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 spread evenly, so each run of requests has its share


class Trial:
    """One candidate on trial: routes requests, and counts their outcomes.

    `decided` is called on the event loop with the plan, the guard's verdict and its reason.
    """

    def __init__(self, plan: CanaryPlan, stable: Servable, candidate: Servable, decided: OnVerdict) -> None:
        self.plan = plan
        self.stable = stable
        self.candidate = candidate
        texts = isinstance(stable.model, TextModel)
        self.guard = Guard(plan.weight, plan.tolerated, compares=plan.shadow > 0 and not texts, texts=texts)
        self.verdict, self.reason = Verdict.UNDECIDED, ""
        self._is_held = plan.holds
        self._decided = decided
        self._stable_arm = TrialArm(stable, self._stable_answered, self._stable_wrote)
        self._candidate_arm = TrialArm(candidate, self._candidate_answered, self._candidate_wrote)
        self._sequence = self._shadow_sequence = 0.0

    def route(self, key: str) -> Servable:
        """Return the arm (candidate or stable) for a request without a version; after a rollback the stable version.

        Requests with equal non-empty keys get the same arm; a key that got the candidate once keeps it in this trial.
        """
        if self.verdict is Verdict.ROLL_BACK:
            return self.stable
        if key:
            return (
                self._candidate_arm if _hash_point(key, self.plan.generation) < self.plan.weight else self._stable_arm
            )
        self._sequence = (self._sequence + _GOLDEN) % 1.0
        return self._candidate_arm if self._sequence < self.plan.weight else self._stable_arm

    def follow(self, plan: CanaryPlan) -> None:
        """Continue with `plan`, which is the same trial's in another step, and keep the evidence."""
        self.plan = plan
        self.guard.follow(plan.weight)

    def release(self) -> None:
        """End the `seconds` of the steps: from now on the candidate may go live, at once if it has passed already."""
        if self._is_held:
            self._is_held = False
            if self.verdict is not Verdict.ROLL_BACK:  # that is final
                self.verdict, self.reason = Verdict.UNDECIDED, ""
            self._update_verdict()

    def _stable_answered(self, inputs: Tensors, outcome: Outcome, seconds: float) -> None:
        self.guard.stable(observe(outcome, seconds))
        if not isinstance(outcome, Exception) and self._takes_shadow():
            self._shadow(inputs, outcome)

    def _candidate_answered(self, _inputs: Tensors, outcome: Outcome, seconds: float) -> None:
        self.guard.candidate(observe(outcome, seconds))
        self._update_verdict()

    def _stable_wrote(self, outcome: TextOutcome) -> None:
        self.guard.stable(observe_text(outcome))

    def _candidate_wrote(self, outcome: TextOutcome) -> None:
        self.guard.candidate(observe_text(outcome))
        self._update_verdict()

    def _takes_shadow(self) -> bool:
        self._shadow_sequence = (self._shadow_sequence + _GOLDEN) % 1.0
        return self.verdict is not Verdict.ROLL_BACK and self._shadow_sequence < self.plan.shadow

    def _shadow(self, inputs: Tensors, expected: Tensors) -> None:
        """Send a request that the stable version has answered to the candidate, too, and compare the answers.

        Does nothing while the candidate has more than 16 requests in flight, or if it refuses the request.
        """
        start = monotonic()

        def compare(outcome: Outcome) -> None:
            if not self.plan.weight:
                self.guard.candidate(observe(outcome, monotonic() - start))
            if not isinstance(outcome, Exception):
                self.guard.compared(is_different(expected, outcome, self.plan.rtol, self.plan.atol))
            self._update_verdict()

        if self.candidate.in_flight > MAX_SHADOWS_IN_FLIGHT:
            return  # the callers' own requests go first
        with suppress(ServerError):
            self.candidate.submit(Entry(inputs, self.candidate.signature.group_of(inputs), compare))

    def _update_verdict(self) -> None:
        """Report a new verdict of the guard; before the end of the steps' `seconds` (`release`) PROMOTE is only noted.

        A candidate that has passed but is not promoted is still compared, and may fail later.
        """
        passed = self.verdict is Verdict.PROMOTE and self.plan.promote and not self._is_held
        if self.verdict is Verdict.ROLL_BACK or passed:
            return
        verdict, reason = self.guard.verdict()
        if verdict in (self.verdict, Verdict.UNDECIDED):
            return
        self.verdict, self.reason = verdict, reason
        if self._is_held and verdict is Verdict.PROMOTE:
            return
        fields = log_fields(**self.candidate.ref.fields)
        log.warning("canary %s: %s: %s", self.candidate.ref, verdict.value, reason, extra=fields)
        self._decided(self.plan, verdict, reason)


class TrialArm(Servable):
    """A loaded version on trial: it has the version's queue and statistics, and reports each outcome to `seen`.

    It reports each text to `wrote`. It has no response cache.
    """

    def __init__(self, servable: Servable, seen: OnOutcome, wrote: OnText) -> None:
        super().__init__(servable.ref, servable.model, servable.batcher)
        self._report = seen
        self._wrote = wrote
        self.signature = servable.signature
        self.rules = servable.rules

    @property
    def watches_texts(self) -> bool:
        return True

    def report_text(self, outcome: TextOutcome) -> None:
        """Report how a text has ended."""
        self._wrote(outcome)

    def submit(self, entry: Entry) -> None:
        """Queue the request; its caller gets the outcome first, then the trial."""
        inputs, finish, start = entry.inputs, entry.done, monotonic()

        def done(outcome: Outcome) -> None:
            finish(outcome)
            self._report(inputs, outcome, monotonic() - start)

        entry.done = done
        try:
            super().submit(entry)
        except ServerError as error:
            self._report(inputs, error, monotonic() - start)
            raise

    def cancel(self, entry: Entry) -> None:
        """Cancel a request whose caller left; unless it is answered, the trial counts that as a failure of the arm."""
        inputs, waited, answered = entry.inputs, monotonic() - entry.since, entry.state is State.DONE
        super().cancel(entry)
        if not answered:
            self._report(inputs, Unavailable("the caller left before the answer"), waited)


def observe(outcome: Outcome, seconds: float) -> Observation:
    """Return the observation of an outcome for the guard.

    Errors of the caller (HTTP status below 500) are not failures of the version; errors count as finite.
    """
    if isinstance(outcome, Exception):
        return Observation(not isinstance(outcome, ServerError) or outcome.http_status >= 500, True, seconds)
    return Observation(False, all(_is_finite(array) for array in outcome.values()), seconds)


def observe_text(outcome: TextOutcome) -> Observation:
    """Return the observation of a text for the guard. Its log-probability is not finite if a logit was not."""
    finite = outcome.log_probability is None or math.isfinite(outcome.log_probability)
    return Observation(outcome.failed, finite, outcome.token_seconds, outcome.log_probability if finite else None)


def is_different(expected: Tensors, got: Tensors, rtol: float, atol: float) -> bool:
    """Whether a shape differs, or an element by more than the tolerance; strings and integers must be equal.

    NaN equals NaN.
    """
    return any(not _agree(array, got[name], rtol, atol) for name, array in expected.items())


def _agree(expected: Array, got: Array, rtol: float, atol: float) -> bool:
    if expected.shape != got.shape:
        return False
    if expected.dtype.kind not in "fV":
        return bool(np.array_equal(expected, got))
    wide = np.float64 if expected.dtype == np.float64 else np.float32
    return bool(np.allclose(got.astype(wide), expected.astype(wide), rtol, atol, equal_nan=True))


def _is_finite(array: Array) -> bool:
    if array.dtype.kind not in "fV":
        return True
    return bool(np.isfinite(array if array.dtype.kind == "f" else array.astype(np.float32)).all())


def _hash_point(key: str, generation: int) -> float:
    """Return a number in [0, 1), the same for a key within a trial; another trial gives another number."""
    digest = blake2b(key.encode(), digest_size=8, salt=generation.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") / 2**64
