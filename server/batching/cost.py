"""How long a batch takes: ``t(n) = a + b*n``, fitted to what was measured, the recent counting more.

``n`` is a batch's work: its rows, and of a model whose inputs vary in other dimensions, too, rows times those (see
:class:`~server.batching.signature.Group`). A batch of long texts so tells something of one of short texts.
"""

from __future__ import annotations

from collections import deque

DECAY = 0.98  # of a sample's weight per further sample
TRUSTED = 4  # samples before predictions count
HEADROOM = 1.2  # least factor on a prediction: who would be answered only just in time is better told so at once
RECENT = 32  # executions that are remembered one by one
EXCEEDED = 2  # so many of them took as long as the bound or longer
REVIEW = 8  # executions after which the line is fitted again, once there were many


class CostModel:
    """Least squares over (work, seconds) with exponential forgetting, from running sums.

    A line fitted to the mean says nothing of the spread, and lags where the machine has just become busier. So the last
    executions are remembered as they were, and :meth:`bound` is what all but a few of them have kept.
    """

    __slots__ = ("_recent", "_rows", "_sn", "_snn", "_snt", "_st", "_stretch", "_sw", "each", "fixed", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self._sw = self._sn = self._snn = self._st = self._snt = self._rows = 0.0
        self.fixed = self.each = 0.0  # seconds: of any execution, and of each unit of work
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._stretch: float | None = HEADROOM  # None: to be looked at again

    def add(self, rows: int, seconds: float, work: float | None = None) -> None:
        """Learn from one execution; without ``work`` it is the rows."""
        n = rows if work is None else work
        self.samples += 1
        self._recent.append((n, seconds))
        self._sw = self._sw * DECAY + 1
        self._sn = self._sn * DECAY + n
        self._snn = self._snn * DECAY + n * n
        self._st = self._st * DECAY + seconds
        self._snt = self._snt * DECAY + n * seconds
        self._rows = self._rows * DECAY + rows
        if self.samples < RECENT or self.samples % REVIEW == 0:
            self._fit()
            self._stretch = None

    def _fit(self) -> None:
        """Solve for a and b, both held at zero or more; with one size of batch seen, all time is the work's."""
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
    def trusted(self) -> bool:
        """Whether enough was measured to predict from."""
        return self.samples >= TRUSTED

    @property
    def stretch(self) -> float:
        """How many times as long as predicted an execution may well take, ``HEADROOM`` or more."""
        if self._stretch is None:
            self._stretch = HEADROOM
            if self.samples >= REVIEW:
                ratios = sorted([seconds / (self.predict(work) or 1.0) for work, seconds in self._recent])
                self._stretch = max(HEADROOM, ratios[-EXCEEDED])
        return self._stretch

    @property
    def largest(self) -> float:
        """The most work that one of the last executions had."""
        return max([work for work, _ in self._recent], default=0)

    def work_of(self, rows: int) -> float:
        """Return what so many rows are in the mean."""
        return rows * self._sn / self._rows if self._rows else rows

    def predict(self, work: float) -> float:
        """Return the expected seconds for so much work; 0 before anything was measured."""
        return self.fixed + self.each * work

    def bound(self, work: float) -> float:
        """Return the seconds within which so much work is done, but for a few cases in a hundred."""
        return self.stretch * (self.fixed + self.each * work)
