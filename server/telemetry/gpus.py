"""Metrics of GPUs under Triton's names, read from NVIDIA's management library (NVML, in the extra `cuda`).

They cover the whole machine, not only this process. Readings that a GPU does not support are omitted, and so are GPUs
that cannot be reached at the start, which are logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

_WATT = 1000  # milliwatts per watt, and millijoules per joule

# Triton's name, the help text, and the call that reads the value
READINGS: tuple[tuple[str, str, Callable[[Any, Any], float]], ...] = (
    ("nv_gpu_utilization", "Share of the time that kernels ran, 0 to 1", lambda nvml, gpu: _busy(nvml, gpu) / 100),
    ("nv_gpu_memory_total_bytes", "Memory", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    ("nv_gpu_memory_used_bytes", "Memory in use", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    ("nv_gpu_power_usage", "Power in watts", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / _WATT),
    (
        "nv_gpu_power_limit",
        "Most power in watts",
        lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / _WATT,
    ),
    (
        "nv_energy_consumption",
        "Energy in joules since the driver was loaded",
        lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / _WATT,
    ),
)
_COUNTERS = frozenset({"nv_energy_consumption"})  # exposed without the suffix `_total`, as Triton does


class GpuMetrics(Collector):
    """Collects the readings of all GPUs of the machine; nothing without NVML or a driver."""

    def __init__(self, nvml: Any | None = None) -> None:
        """`nvml`: the initialized module `pynvml`, default that of `management_library`."""
        library = nvml or management_library()
        self._gpus = {} if library is None else dict(_gpus(library))
        self._nvml: Any = library

    def collect(self) -> Iterator[Metric]:
        for name, text, read in READINGS if self._gpus else ():
            kind = UnknownMetricFamily if name in _COUNTERS else GaugeMetricFamily
            family = kind(name, text, labels=["gpu_uuid"])
            for uuid, gpu in self._gpus.items():
                try:
                    family.add_metric([uuid], read(self._nvml, gpu))
                except self._nvml.NVMLError:
                    continue
            if family.samples:
                yield family


def management_library() -> Any | None:
    """Return the module `pynvml`, initialized; None if it is not installed or there is no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _gpus(nvml: Any) -> Iterator[tuple[str, Any]]:
    """Yield UUID and handle of each GPU; those that cannot be reached, such as a lost one, are logged and left out."""
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        log.warning("GPUs have no metrics: %s", error)
        return
    for index in range(count):
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(gpu)
        except nvml.NVMLError as error:
            log.warning("GPU %d has no metrics: %s", index, error)
        else:
            yield uuid, gpu


def _busy(nvml: Any, gpu: Any) -> float:
    return float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
