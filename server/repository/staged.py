"""How much the uploads that are under way take of the disk, all together."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from server.errors import QuotaExceeded, StorageFull
from server.places import OWN
from server.repository.space import Space

_AGAIN = 10.0  # seconds after which a refused upload may be tried again


class StagingBudget:
    """A bound on the bytes of all uploads; usable from any thread.

    A party with several uploads at once may have half of it, so that others find room; the server's own work may have
    all of it.
    """

    def __init__(
        self, limit: int, what: str, kept: Callable[[], int] | None = None, space: Space | None = None
    ) -> None:
        """``limit``: bytes; ``what`` is uploaded, for those who are refused; ``kept``: the bytes of the limit that are
        taken by what was uploaded before. That may be anybody's, so uploads then are not shared out. ``space``: the
        disk, of which a part is kept free whatever the limit is."""
        self._limit = limit
        self._what = what
        self._kept = kept
        self._space = space
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()  # by party
        self._uploads: Counter[str] = Counter()

    def begin(self, party: str) -> StagingClaim:
        """Count an upload, which has no bytes yet; raises StorageFull where there is no space for one."""
        if self._space is not None:
            self._space.check()
        with self._lock:
            self._uploads[party] += 1
        return StagingClaim(self, party)

    def add(self, party: str, size: int) -> None:
        """Count bytes before they are written; raises StorageFull, QuotaExceeded, and then counts nothing."""
        if self._space is not None:
            self._space.check()
        with self._lock:
            kept, total, own = self._kept() if self._kept else 0, self._bytes.total(), self._bytes[party]
            if kept + total + size > self._limit:
                before = f"{kept} bytes are kept and " if kept else ""
                raise StorageFull(
                    f"{self._what}: {before}{total} bytes of uploads under way leave less than {size} of the "
                    f"{self._limit} allowed"
                )
            is_shared = self._kept is None and party != OWN and self._uploads[party] > 1
            if is_shared and own + size > self._limit // 2:
                raise QuotaExceeded(
                    f"{self._what}: {self._uploads[party]} of your uploads are under way, expected at most "
                    f"{self._limit // 2} bytes of them together",
                    retry_after=_AGAIN,
                )
            self._bytes[party] += size

    def end(self, party: str, size: int) -> None:
        """Forget an upload of ``size`` bytes."""
        with self._lock:
            self._bytes[party] -= size
            self._uploads[party] -= 1
            if not self._uploads[party]:
                del self._bytes[party], self._uploads[party]


class StagingClaim:
    """What one upload takes."""

    def __init__(self, budget: StagingBudget, party: str) -> None:
        self._budget = budget
        self._party = party
        self._size = 0
        self._is_over = False

    def add(self, size: int) -> None:
        """Raises StorageFull or QuotaExceeded, before anything is written."""
        self._budget.add(self._party, size)
        self._size += size

    def release(self) -> None:
        """The upload is over; harmless when repeated."""
        if not self._is_over:
            self._is_over = True
            self._budget.end(self._party, self._size)
