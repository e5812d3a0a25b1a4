"""The requests of a canary: who gets which version, and what is seen of both.

A trial replaces the route of the requests that name no version. Each of its two arms is a servable that watches what
passes through; what the stable version answered may be handed to the candidate as well, to be compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from time import monotonic
from typing import TypeAlias

import numpy as np

from server.batching.entry import Entry, Outcome, State
from server.canary.guard import Guard, Observation, Verdict
from server.canary.plan import CanaryPlan
from server.errors import ServerError, Unavailable
from server.scheduling.servable import Servable
from server.telemetry.logs import about
from server.types import Array, Tensors

log = logging.getLogger(__name__)

Decided: TypeAlias = Callable[[CanaryPlan, Verdict, str], None]
Seen: TypeAlias = Callable[[Tensors, Outcome, float], None]  # what came in, what went out, seconds between
SHADOWS = 16  # requests of the candidate, waiting or running, beyond which it gets no copies
_GOLDEN = 0.6180339887498949  # steps of it fall evenly into [0, 1): each run of requests has its share of candidates


class Trial:
    """One candidate under test. ``decided`` is called once, on the event loop, when the guard has made up its mind."""

    def __init__(self, plan: CanaryPlan, stable: Servable, candidate: Servable, decided: Decided) -> None:
        self.plan = plan
        self.stable = stable
        self.candidate = candidate
        self.guard = Guard(plan.weight, plan.tolerated, compares=plan.shadow > 0)
        self.verdict, self.reason = Verdict.UNDECIDED, ""
        self._held = plan.holds
        self._decided = decided
        self._stable_arm = Arm(stable, self._stable_answered)
        self._candidate_arm = Arm(candidate, self._candidate_answered)
        self._walk = self._shadow_walk = 0.0

    def route(self, key: str) -> Servable:
        """Return what answers a request; one with a key is answered by the same version as long as the trial lasts."""
        if self.verdict is Verdict.ROLL_BACK:
            return self.stable
        if key:
            return self._candidate_arm if _point(key, self.plan.generation) < self.plan.weight else self._stable_arm
        self._walk = (self._walk + _GOLDEN) % 1.0
        return self._candidate_arm if self._walk < self.plan.weight else self._stable_arm

    def follow(self, plan: CanaryPlan) -> None:
        """Go on as the plan says now: in another step of its schedule."""
        self.plan = plan
        self.guard.follow(plan.weight)

    def release(self) -> None:
        """The last step's time is over: the candidate goes live once it has passed, if it has at once."""
        if self._held:
            self._held = False
            if self.verdict is not Verdict.ROLL_BACK:  # that is final
                self.verdict, self.reason = Verdict.UNDECIDED, ""
            self._judge()

    def _stable_answered(self, inputs: Tensors, outcome: Outcome, seconds: float) -> None:
        self.guard.stable(observe(outcome, seconds))
        if not isinstance(outcome, Exception) and self._wants_copy():
            self._shadow(inputs, outcome)

    def _candidate_answered(self, _inputs: Tensors, outcome: Outcome, seconds: float) -> None:
        self.guard.candidate(observe(outcome, seconds))
        self._judge()

    def _wants_copy(self) -> bool:
        self._shadow_walk = (self._shadow_walk + _GOLDEN) % 1.0
        return self.verdict is Verdict.UNDECIDED and self._shadow_walk < self.plan.shadow

    def _shadow(self, inputs: Tensors, expected: Tensors) -> None:
        """Let the candidate answer a request that the stable version has answered."""
        start = monotonic()

        def compare(outcome: Outcome) -> None:
            if not self.plan.weight:
                self.guard.candidate(observe(outcome, monotonic() - start))
            if not isinstance(outcome, Exception):
                self.guard.compared(differ(expected, outcome, self.plan.rtol, self.plan.atol))
            self._judge()

        if self.candidate.in_flight > SHADOWS:
            return  # what callers sent goes first
        with suppress(ServerError):
            self.candidate.submit(Entry(inputs, self.candidate.signature.group_of(inputs), compare))

    def _judge(self) -> None:
        """Decide once; a candidate that has passed and stays one may still fail later."""
        passed = self.verdict is Verdict.PROMOTE and self.plan.promote and not self._held
        if self.verdict is Verdict.ROLL_BACK or passed:
            return
        verdict, reason = self.guard.verdict()
        if verdict in (self.verdict, Verdict.UNDECIDED):
            return
        self.verdict, self.reason = verdict, reason
        if self._held and verdict is Verdict.PROMOTE:
            return
        fields = about(**self.candidate.ref.fields)
        log.warning("canary %s: %s: %s", self.candidate.ref, verdict.value, reason, extra=fields)
        self._decided(self.plan, verdict, reason)


class Arm(Servable):
    """A loaded version as the requests of a trial see it: same queue, same statistics, every outcome seen."""

    def __init__(self, servable: Servable, seen: Seen) -> None:
        super().__init__(servable.ref, servable.model, servable.batcher)
        self._saw = seen
        self.signature = servable.signature
        self.rules = servable.rules

    def submit(self, entry: Entry) -> None:
        """Queue the request; its caller is told first, then the trial."""
        inputs, tell, start = entry.inputs, entry.done, monotonic()

        def done(outcome: Outcome) -> None:
            tell(outcome)
            self._saw(inputs, outcome, monotonic() - start)

        entry.done = done
        try:
            super().submit(entry)
        except ServerError as error:
            self._saw(inputs, error, monotonic() - start)
            raise

    def cancel(self, entry: Entry) -> None:
        """The caller gave up: to the trial that is an answer that failed, whichever version it was waiting for."""
        inputs, waited, answered = entry.inputs, monotonic() - entry.since, entry.state is State.DONE
        super().cancel(entry)
        if not answered:
            self._saw(inputs, Unavailable("the caller left before the answer"), waited)


def observe(outcome: Outcome, seconds: float) -> Observation:
    """Return what the guard is told. What the caller did wrong is not the version's failure."""
    if isinstance(outcome, Exception):
        return Observation(not isinstance(outcome, ServerError) or outcome.http_status >= 500, True, seconds)
    return Observation(False, all(_is_finite(array) for array in outcome.values()), seconds)


def differ(expected: Tensors, got: Tensors, rtol: float, atol: float) -> bool:
    """Whether any element of any tensor is beyond the tolerance; NaN agrees with NaN, strings and integers exactly."""
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


def _point(key: str, generation: int) -> float:
    """A number in [0, 1) that a key always has within a trial, and another one in the next trial."""
    digest = blake2b(key.encode(), digest_size=8, salt=generation.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") / 2**64
