"""The cost model of batches: `t(n) = a + b*n` seconds, fitted to measured executions, recent ones weighted higher.

`a` is the fixed time of an execution, and `b` the time per unit of work. `n` is the work of a batch: its rows; for a
model with further dynamic dimensions, the rows times their extents (see `BatchGroup` in signature.py). So batches of
long texts also predict batches of short texts.
"""

from __future__ import annotations

from collections import deque

DECAY = 0.98  # factor on a sample's weight for each further sample
MIN_SAMPLES = 4  # samples before predictions are used
HEADROOM = 1.2  # least factor on a prediction: a request that would only just be in time is better refused at once
RECENT = 32  # executions that are stored one by one
EXCEEDED = 2  # of the stored executions, the number that took as long as the bound or longer: 2 of 32
FARTHEST = 64  # times the largest measured work: the most that times are extrapolated to for a refusal
REFIT_INTERVAL = 8  # executions between two fits, after the first `RECENT`


class CostModel:
    """Least squares over (work, seconds) with exponential forgetting, from running sums.

    A fitted mean does not describe the spread, and lags when the machine becomes busier. Therefore the last 32
    executions are stored, and `bound` scales the prediction so that all but `EXCEEDED` of them lie below it.
    """

    __slots__ = ("_recent", "_rows", "_sn", "_snn", "_snt", "_st", "_stretch", "_sw", "each", "fixed", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self._sw = self._sn = self._snn = self._st = self._snt = self._rows = 0.0
        self.fixed = self.each = 0.0  # a and b: seconds per execution, and per unit of work
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)  # (work, seconds)
        self._stretch: float | None = HEADROOM  # None: to be computed again

    def add(self, rows: int, seconds: float, work: float | None = None) -> None:
        """Learn from one execution; `work` defaults to the rows."""
        n = rows if work is None else work
        self.samples += 1
        self._recent.append((n, seconds))
        self._sw = self._sw * DECAY + 1
        self._sn = self._sn * DECAY + n
        self._snn = self._snn * DECAY + n * n
        self._st = self._st * DECAY + seconds
        self._snt = self._snt * DECAY + n * seconds
        self._rows = self._rows * DECAY + rows
        if self.samples < RECENT or self.samples % REFIT_INTERVAL == 0:
            self._fit()
            self._stretch = None

    def _fit(self) -> None:
        """Solve for a and b, neither below zero. If all samples have the same work, a is 0."""
        spread = self._sw * self._snn - self._sn * self._sn
        if spread <= 1e-9 * self._snn * self._sw:
            self.fixed, self.each = 0.0, self._st / max(self._sn, 1.0)
            return
        each = (self._sw * self._snt - self._sn * self._st) / spread
        fixed = (self._st - each * self._sn) / self._sw
        if each < 0:
            fixed, each = self._st / self._sw, 0.0
        elif fixed < 0:
            fixed, each = 0.0, self._snt / self._snn
        self.fixed, self.each = fixed, each

    @property
    def is_trusted(self) -> bool:
        """Whether there are enough samples for predictions."""
        return self.samples >= MIN_SAMPLES

    @property
    def bound_factor(self) -> float:
        """The factor from the predicted time to the bound, at least `HEADROOM`.

        It is the second largest ratio of measured to predicted time among the stored executions; `HEADROOM` before 8
        executions.
        """
        if self._stretch is None:
            self._stretch = HEADROOM
            if self.samples >= REFIT_INTERVAL:
                ratios = sorted([seconds / (self.predict(work) or 1.0) for work, seconds in self._recent])
                self._stretch = max(HEADROOM, ratios[-EXCEEDED])
        return self._stretch

    @property
    def largest_work(self) -> float:
        """The most work of one of the last executions; 0 before the first."""
        return max([work for work, _ in self._recent], default=0)

    def mean_work(self, rows: int) -> float:
        """The mean work of `rows` rows; `rows` before the first execution."""
        return rows * self._sn / self._rows if self._rows else rows

    def is_expected_within(self, work: float, seconds: float) -> bool:
        """Whether there are enough samples for a prediction, and it is at most this time."""
        return self.samples >= MIN_SAMPLES and self.fixed + self.each * work <= seconds

    def predict(self, work: float) -> float:
        """The expected seconds for this work; 0 before the first measurement."""
        return self.fixed + self.each * work

    def bound(self, work: float) -> float:
        """The seconds within which this work is done in all but about 6% of the cases (`EXCEEDED` of `RECENT`).

        0 before the first measurement.
        """
        return self.bound_factor * (self.fixed + self.each * work)

    def least_bound(self, work: float) -> float:
        """`bound` of the work, or of `FARTHEST` times the largest work of the last executions, if that is less.

        Executions of one row do not show whether many rows take longer. So a request is not refused for a time that is
        only extrapolated.
        """
        return self.bound(min(work, FARTHEST * self.largest_work))
