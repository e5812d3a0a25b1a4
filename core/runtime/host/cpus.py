"""The number of processors that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """The processors of this process's affinity, or the container's CPU quota, rounded up, if lower. At least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """The container's CPU quota in processors, such as 1.5, from cgroup v2 or v1; None if there is none."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if limit in ("max", "-1"):
        return None
    return int(limit) / int(period)
