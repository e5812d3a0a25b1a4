"""GPUs in the metrics, read from a fake of NVIDIA's library: its names, units and errors."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lathe.server.telemetry.gpus import GpuMetrics, management_library


class FakeNvml:
    """Two GPUs; the second one does not report its power.

    Units are those of NVML's reference: percent, bytes, milliwatts and millijoules."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return 100 + index

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        return f"GPU-{gpu}"

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return SimpleNamespace(gpu=75, memory=20)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(total=80 << 30, used=3 << 30, free=77 << 30)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        if gpu == 101:
            raise self.NVMLError("Not Supported")
        return 312_500

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: int) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:
        return 9_000_500


def exposition(metrics: GpuMetrics) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(metrics)
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_the_metrics_have_tritons_names_and_units() -> None:
    assert exposition(GpuMetrics(FakeNvml())) == {
        'nv_gpu_utilization{gpu_uuid="GPU-100"}': 0.75,
        'nv_gpu_utilization{gpu_uuid="GPU-101"}': 0.75,
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-100"}': 80 << 30,
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-101"}': 80 << 30,
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-100"}': 3 << 30,
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-101"}': 3 << 30,
        'nv_gpu_power_usage{gpu_uuid="GPU-100"}': 312.5,
        'nv_energy_consumption{gpu_uuid="GPU-100"}': 9000.5,
        'nv_energy_consumption{gpu_uuid="GPU-101"}': 9000.5,
    }


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"])
def test_a_lost_gpu_is_left_out_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    library = FakeNvml()
    answer = getattr(library, call)

    def fails(gpu: int) -> Any:
        if gpu in (0, 100):
            raise FakeNvml.NVMLError("GPU is lost")
        return answer(gpu)

    monkeypatch.setattr(library, call, fails)
    found = exposition(GpuMetrics(library))
    assert {name for name in found if "utilization" in name} == {'nv_gpu_utilization{gpu_uuid="GPU-101"}'}
    assert caplog.messages == ["GPU 0 has no metrics: GPU is lost"]


def test_without_a_count_of_gpus_there_are_no_gpu_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = FakeNvml()

    def fails() -> int:
        raise FakeNvml.NVMLError("Unknown Error")

    monkeypatch.setattr(library, "nvmlDeviceGetCount", fails)
    assert exposition(GpuMetrics(library)) == {}
    assert caplog.messages == ["GPUs have no metrics: Unknown Error"]


@pytest.mark.parametrize("name", [name for name in vars(FakeNvml) if name.startswith("nvmlDeviceGet")])
def test_no_failing_call_prevents_the_start_or_breaks_the_metrics(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    library = FakeNvml()

    def fails(*_: int) -> Any:
        raise FakeNvml.NVMLError("GPU is lost")

    metrics = GpuMetrics(library)
    monkeypatch.setattr(library, name, fails)
    exposition(metrics)
    exposition(GpuMetrics(library))


def test_without_a_driver_there_are_no_gpu_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()

    def fails() -> None:
        raise FakeNvml.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(library, "nvmlInit", fails)
    monkeypatch.setitem(sys.modules, "pynvml", library)  # type: ignore[arg-type]
    assert management_library() is None
    assert exposition(GpuMetrics()) == {}


def test_without_the_library_there_are_no_gpu_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]  # how Python marks what is not there
    assert exposition(GpuMetrics()) == {}


def test_the_fake_has_only_functions_of_the_real_library() -> None:
    import pynvml

    for name in vars(FakeNvml):
        assert name.startswith("__") or hasattr(pynvml, name), name
