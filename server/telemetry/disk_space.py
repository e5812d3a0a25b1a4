"""Metrics of disk space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class MonitoredDisk(Protocol):
    """A folder's file system; `kept` bytes of it are kept free. `free`: the free bytes, None if unknown."""

    name: str
    kept: int

    @property
    def free(self) -> int | None: ...


class SpaceMetrics(Collector):
    """Collects the free bytes of each folder, if known, and whether uploads are refused."""

    def __init__(self, spaces: Sequence[MonitoredDisk]) -> None:
        self._spaces = spaces

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        free = GaugeMetricFamily("lathe_disk_free_bytes", "Free on the disk of a folder", labels=("folder",))
        full = GaugeMetricFamily("lathe_disk_full", "1 while uploads are refused for want of space", labels=("folder",))
        for space in self._spaces:
            found = space.free
            if found is not None:
                free.add_metric((space.name,), found)
                full.add_metric((space.name,), found < space.kept)
        yield from (free, full)
