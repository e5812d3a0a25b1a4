"""The budget of disk space for all uploads that are in progress."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from lathe.server.errors import QuotaExceeded, StorageFull
from lathe.server.fair_slots import SERVER_ITSELF
from lathe.server.repository.disk_space import DiskSpace

_RETRY_AFTER = 10.0  # Retry-After of a refused upload, in seconds


class StagingBudget:
    """A limit on the bytes of all uploads in progress; usable from any thread.

    A party (the caller that an upload is counted for) with several uploads at once may use half of it, so that others
    find space; the server's own work may use all of it.
    """

    def __init__(
        self, limit: int, what: str, kept: Callable[[], int] | None = None, space: DiskSpace | None = None
    ) -> None:
        """`limit`: in bytes. `what`: the kind of upload, for errors. `space`: a reserve on disk, also checked.

        `kept` returns the bytes of the limit that completed uploads occupy. These may be of any party, so with `kept`
        the limit of one half per party does not apply.
        """
        self._limit = limit
        self._what = what
        self._kept = kept
        self._space = space
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()  # by party
        self._uploads: Counter[str] = Counter()

    def begin(self, party: str) -> StagingClaim:
        """Count a new upload, of 0 bytes so far; raises StorageFull if the disk's reserve is used up."""
        if self._space is not None:
            self._space.check()
        with self._lock:
            self._uploads[party] += 1
        return StagingClaim(self, party)

    def add(self, party: str, size: int) -> None:
        """Count `size` bytes before they are written; raises StorageFull, QuotaExceeded, and then counts nothing."""
        if self._space is not None:
            self._space.check()
        with self._lock:
            kept, total, own = self._kept() if self._kept else 0, self._bytes.total(), self._bytes[party]
            if kept + total + size > self._limit:
                stored = f"{kept} stored bytes and " if kept else ""
                raise StorageFull(
                    f"{self._what}: {stored}{total} bytes of uploads in progress leave less than {size} of the "
                    f"{self._limit} allowed"
                )
            is_shared = self._kept is None and party != SERVER_ITSELF and self._uploads[party] > 1
            if is_shared and own + size > self._limit // 2:
                raise QuotaExceeded(
                    f"{self._what}: {self._uploads[party]} of your uploads are in progress, expected at most "
                    f"{self._limit // 2} bytes together",
                    retry_after=_RETRY_AFTER,
                )
            self._bytes[party] += size

    def end(self, party: str, size: int) -> None:
        """End an upload of `size` bytes."""
        with self._lock:
            self._bytes[party] -= size
            self._uploads[party] -= 1
            if not self._uploads[party]:
                del self._bytes[party], self._uploads[party]


class StagingClaim:
    """The part of the budget that one upload uses."""

    def __init__(self, budget: StagingBudget, party: str) -> None:
        self._budget = budget
        self._party = party
        self._size = 0
        self._is_released = False

    def add(self, size: int) -> None:
        """Count `size` bytes that are about to be written; raises StorageFull or QuotaExceeded."""
        self._budget.add(self._party, size)
        self._size += size

    def release(self) -> None:
        """End the upload; idempotent."""
        if not self._is_released:
            self._is_released = True
            self._budget.end(self._party, self._size)
