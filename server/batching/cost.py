"""How long a batch takes: ``t(n) = a + b*n``, fitted to what was measured, the recent counting more."""

from __future__ import annotations

from collections import deque

DECAY = 0.98  # of a sample's weight per further sample
TRUSTED = 4  # samples before predictions count
HEADROOM = 1.2  # least factor on a prediction: who would be answered only just in time is better told so at once
RECENT = 32  # executions that are remembered one by one
EXCEEDED = 2  # so many of them took as long as the bound or longer
REVIEW = 8  # executions after which the line is fitted again, once there were many


class CostModel:
    """Least squares over (rows, seconds) with exponential forgetting, from five running sums.

    A line fitted to the mean says nothing of the spread, and lags where the machine has just become busier. So the last
    executions are remembered as they were, and :meth:`bound` is what all but a few of them have kept.
    """

    __slots__ = ("_fixed", "_per_row", "_recent", "_sn", "_snn", "_snt", "_st", "_stretch", "_sw", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self._sw = self._sn = self._snn = self._st = self._snt = 0.0
        self._fixed = self._per_row = 0.0
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._stretch: float | None = HEADROOM  # None: to be looked at again

    def add(self, rows: int, seconds: float) -> None:
        """Learn from one execution."""
        self.samples += 1
        self._recent.append((rows, seconds))
        self._sw = self._sw * DECAY + 1
        self._sn = self._sn * DECAY + rows
        self._snn = self._snn * DECAY + rows * rows
        self._st = self._st * DECAY + seconds
        self._snt = self._snt * DECAY + rows * seconds
        if self.samples < RECENT or self.samples % REVIEW == 0:
            self._fit()
            self._stretch = None

    def _fit(self) -> None:
        """Solve for a and b, both held at zero or more; with one batch size seen, all time is per row."""
        spread = self._sw * self._snn - self._sn * self._sn
        if spread <= 1e-9 * self._snn * self._sw:
            self._fixed, self._per_row = 0.0, self._st / max(self._sn, 1.0)
            return
        per_row = (self._sw * self._snt - self._sn * self._st) / spread
        fixed = (self._st - per_row * self._sn) / self._sw
        if per_row < 0:
            fixed, per_row = self._st / self._sw, 0.0
        elif fixed < 0:
            fixed, per_row = 0.0, self._snt / self._snn
        self._fixed, self._per_row = fixed, per_row

    @property
    def trusted(self) -> bool:
        """Whether enough was measured to predict from."""
        return self.samples >= TRUSTED

    @property
    def stretch(self) -> float:
        """How many times as long as predicted an execution may well take, ``HEADROOM`` or more."""
        if self._stretch is None:
            self._stretch = HEADROOM
            if self.samples >= REVIEW:
                ratios = sorted([seconds / (self.predict(rows) or 1.0) for rows, seconds in self._recent])
                self._stretch = max(HEADROOM, ratios[-EXCEEDED])
        return self._stretch

    def predict(self, rows: int) -> float:
        """Return the expected seconds for this many rows; 0 before anything was measured."""
        return self._fixed + self._per_row * rows

    def bound(self, rows: int) -> float:
        """Return the seconds within which this many rows are done, but for a few cases in a hundred."""
        return self.stretch * (self._fixed + self._per_row * rows)

    def rows_within(self, seconds: float, limit: int) -> int:
        """Return the most rows, at most ``limit``, whose bound is this time; 0 when not even one's is."""
        mean = seconds / self.stretch
        if self.predict(limit) <= mean:
            return limit
        if self._per_row <= 0:
            return 0
        return max(0, min(limit, int((mean - self._fixed) / self._per_row)))
