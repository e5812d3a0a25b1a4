"""GPUs in the metrics, under Triton's names, as NVIDIA's management library sees them (the extra `cuda` brings it).

They are the machine's, whoever uses them. What a GPU does not tell, such as the power of some, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

_WATT = 1000  # milliwatts; a joule has as many millijoules

# Triton's name, what it is, and how the library is asked for it
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
_COUNTERS = frozenset({"nv_energy_consumption"})  # Triton's names of counters have no ``_total``


class GpuMetrics(Collector):
    """All GPUs of the machine; none where there is no library or no driver."""

    def __init__(self, nvml: Any | None = None) -> None:
        """``nvml``: the module ``pynvml``, initialized; None for what :func:`management_library` finds."""
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
    """Return the initialized module; None without it, or without a driver."""
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
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        yield nvml.nvmlDeviceGetUUID(gpu), gpu


def _busy(nvml: Any, gpu: Any) -> float:
    return float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
