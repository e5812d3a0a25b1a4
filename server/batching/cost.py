"""How long a batch takes: ``t(n) = a + b*n``, fitted to what was measured, the recent counting more."""

from __future__ import annotations

DECAY = 0.98  # of a sample's weight per further sample
TRUSTED = 4  # samples before predictions count


class CostModel:
    """Least squares over (rows, seconds) with exponential forgetting; five running sums, no samples kept."""

    __slots__ = ("_fixed", "_per_row", "_sn", "_snn", "_snt", "_st", "_sw", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self._sw = self._sn = self._snn = self._st = self._snt = 0.0
        self._fixed = self._per_row = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Learn from one execution."""
        self.samples += 1
        self._sw = self._sw * DECAY + 1
        self._sn = self._sn * DECAY + rows
        self._snn = self._snn * DECAY + rows * rows
        self._st = self._st * DECAY + seconds
        self._snt = self._snt * DECAY + rows * seconds
        self._fit()

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

    def predict(self, rows: int) -> float:
        """Return the expected seconds for this many rows; 0 before anything was measured."""
        return self._fixed + self._per_row * rows

    def rows_within(self, seconds: float, limit: int) -> int:
        """Return the most rows, at most ``limit``, expected to be done in this time; 0 when not even one is."""
        if self.predict(limit) <= seconds:
            return limit
        if self._per_row <= 0:
            return 0
        return max(0, min(limit, int((seconds - self._fixed) / self._per_row)))
