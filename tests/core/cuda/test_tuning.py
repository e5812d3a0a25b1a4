"""The tuner on devices: its measurements, its budget, its records, and that findings make compiling repeatable.

Kernels of the simulated device take the time that a test sets. NVIDIA's driver is a fake.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.compiler import compile as compile_module
from lathe.core.compiler import symbol_binding, tuner
from lathe.core.compiler.description import describe
from lathe.core.compiler.options import make_options
from lathe.core.compiler.tuner import Problem, Record
from lathe.core.errors import DeviceError, DeviceMemoryError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.call import KernelCall, KernelSpec
from lathe.core.kernels.target import GpuTarget
from lathe.core.passes.pipeline import Options, optimize
from lathe.core.runtime.device import devices, simulated
from lathe.core.runtime.device.device import Grid
from lathe.core.runtime.device.device_trial import device_bench
from lathe.core.runtime.device.simulated import REFERENCES, Backend, SimulatedDevice
from tests.core.cuda.fake_driver import FakeDriver, FakeGpu

DEVICE = "simulated:9"


def product(columns: int = 96) -> Graph:
    graph = Graph("product")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), 64, 96)))
    weight = np.random.default_rng(0).standard_normal((96, columns)).astype(np.float32)
    graph.outputs = [b("MatMul", x, b.constant(weight, "w"))]
    return graph


def problem_of(target: GpuTarget, batches: tuple[int, ...] = (1, 8)) -> Problem:
    """The tuner's problem for `product()`, as the compiler plans it for devices."""
    batching = describe(product(), make_options(threads=1)).batching
    graph, _ = optimize(symbol_binding.bind(product(), batching, ()), Options(host=False))
    (problem,) = tuner.problems(graph, target, 1, batches).values()
    return problem


class Costs:
    """Nanoseconds by kernel name; `seen` records each launched kernel with its batch size."""

    def __init__(self, **by_name: int) -> None:
        self.by_name = by_name
        self.seen: list[tuple[str, int]] = []

    def __call__(self, kernel: Any, grid: Grid, n: int) -> int:
        self.seen.append((kernel.kernel, n))
        return self.by_name.get(kernel.kernel, 100_000)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    made = SimulatedDevice(DEVICE, replace(REFERENCES, target=replace(REFERENCES.target, l2_bytes=1)), cost=Costs())
    monkeypatch.setitem(devices._devices, DEVICE, made)
    yield made
    assert made.space.used == 0 and made.streams == []


def names(calls: Sequence[KernelCall]) -> list[str]:
    return [call.spec.summary.removesuffix(", simulated") for call in calls]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_fastest_kernel_of_a_device_is_chosen(device: SimulatedDevice, rank: int) -> None:
    problem = problem_of(device.target)
    device._cost = Costs(**{names(problem.kernels)[rank]: 70_000})
    assert tuner.fastest(problem, device_bench(device)).key == problem.kernels[rank].key
    assert {n for _, n in device._cost.seen} == {1, 8}


@pytest.mark.slow
def test_each_range_of_batch_sizes_gets_its_fastest_kernel(device: SimulatedDevice) -> None:
    """A kernel that is best at 128 is used there, although it is the slowest at 1; artifacts record both."""
    problem = problem_of(device.target, (1, 8, 32, 128))
    small, large = problem.kernels[-2:]

    def cost(kernel: Any, grid: Grid, n: int) -> int:
        return {
            names([small])[0]: 70_000 if n < 100 else 900_000,
            names([large])[0]: 50_000 if n > 100 else 950_000,
        }.get(kernel.kernel, 100_000)

    device._cost = cost
    found = tuner.fastest(problem, device_bench(device))
    assert [(each.first, each.spec.key) for each in found.ranges] == [(0, small.spec.key), (65, large.spec.key)]
    assert found.at(64).spec is small.spec and found.at(65).spec is large.spec
    again = problem.recorded_candidate({problem.key: found.finding})
    assert again is not None and again.key == found.key
    assert problem.recorded_candidate({problem.key: found.finding.replace("65", "x")}) is None


def test_a_sample_is_one_graph_of_many_launches_with_weights_in_turn(device: SimulatedDevice) -> None:
    """A sample launches a short kernel 20 times, a long one 6 times; the copies of the weights exceed the cache."""
    device.target = GpuTarget(device="simulated", l2_bytes=96 * 96 * 4 * 3)
    problem = problem_of(device.target)
    for nanoseconds, launches in ((10_000, 20), (1_000_000, 6)):
        device._cost = Costs(**dict.fromkeys(names(problem.calls), nanoseconds))
        with device_bench(device)(problem.calls[:1], problem.request) as at, at(1) as (trial,):
            before, replays, free = len(device._cost.seen), device.replays, device.memory().free
            assert trial.seconds() == pytest.approx(nanoseconds / 1e9)
            assert (len(device._cost.seen) - before, device.replays - replays) == (launches, 1)
            taken = device.memory().total - free
            assert 6 * 96 * 96 * 4 <= taken <= 6 * 96 * 96 * 4 + 2 * 64 * 96 * 4


def test_findings_are_recorded_and_used_again_without_measuring(device: SimulatedDevice, tmp_path: Path) -> None:
    options = {"device": DEVICE, "cache_dir": tmp_path, "max_batch": 8}
    third = problem_of(device.target).calls[2]
    device._cost = Costs(**{names([third])[0]: 1_000})
    with lathe.compile(product(), tune="full", **options) as session:  # type: ignore[arg-type]
        assert third.spec.summary in session.explain()
    device._cost = Costs()
    with lathe.compile(product(), tune="full", **options) as session:  # type: ignore[arg-type]
        assert third.spec.summary in session.explain()
    assert device._cost.seen == []
    (path,) = (tmp_path / "tuning").iterdir()
    assert list(json.loads(path.read_text())["findings"].values()) == [third.spec.symbol]


def test_without_a_clock_and_without_tuning_nothing_is_measured(device: SimulatedDevice, tmp_path: Path) -> None:
    with lathe.compile(product(), device=DEVICE, tune="off", cache_dir=tmp_path):
        assert device._cost.seen == []  # type: ignore[union-attr]
    with lathe.compile(product(), device="simulated", tune="full", cache_dir=tmp_path):
        assert not (tmp_path / "tuning").exists()


def test_a_budget_bounds_measuring_over_all_parts(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []

    def noted(todo: Any, known: Any, left: float, bench: Any, prepare: Any = None) -> dict[str, str]:
        seconds.append(left)
        return {}

    monkeypatch.setattr(tuner, "tune", noted)
    graph = product()
    b = Builder(graph)
    graph.outputs = [b("Exp", b("CumProd", b("Tanh", graph.outputs[0]), b.constant(np.array(1))))]
    lathe.compile(graph, device=DEVICE, tune=5.0).close()
    assert len(seconds) == 3 and 5.0 == seconds[0] > seconds[1] > seconds[2] > 0
    assert tuner.tune([problem_of(device.target)], {}, 0.0, device_bench(device)) == {}


def test_full_tuning_compiles_all_candidates_at_once(device: SimulatedDevice) -> None:
    """Candidates of known problems are left out; with a time budget each is compiled only when its turn comes."""
    known, new = problem_of(device.target), problem_of(device.target, (1, 4))
    prepared: list[KernelSpec] = []
    bench = device_bench(device)
    findings = tuner.tune([known, new], {known.key: ""}, inf, bench, prepared.extend)
    assert prepared == [kernel.spec for kernel in new.kernels] and list(findings) == [new.key]
    tuner.tune([new], {}, 5.0, bench, prepared.extend)
    assert len(prepared) == len(new.kernels)


def test_records_and_artifacts_of_other_gpus_are_ignored(device: SimulatedDevice, tmp_path: Path) -> None:
    problem = problem_of(device.target, (1, 8))
    record = Record(tmp_path / "tuning", device.target)
    record.add({problem.key: problem.calls[2].spec.symbol})
    larger = GpuTarget(device="simulated", arch=90, multiprocessors=132)
    assert Record(tmp_path / "tuning", device.target).read() and not Record(tmp_path / "tuning", larger).read()
    findings = {problem.key: problem.calls[2].spec.symbol}
    assert problem.recorded_candidate(findings) is problem.calls[2]
    assert problem_of(larger).recorded_candidate(findings) is None


def test_the_findings_of_an_artifact_reproduce_it_on_a_device(device: SimulatedDevice, tmp_path: Path) -> None:
    options = {"device": DEVICE, "threads": 1, "max_batch": 8}
    last = problem_of(device.target).calls[-1]
    device._cost = Costs(**{names([last])[0]: 1_000})
    first, second = tmp_path / "first.lathe", tmp_path / "second.lathe"
    tuned: Any = {**options, "cache_dir": tmp_path / "one", "tune": inf}
    compile_module.compile_to(first, product(), make_options(**tuned))
    findings = tuner.read_findings(first)
    assert list(findings.values()) == [last.spec.symbol]
    again: Any = {**options, "cache_dir": tmp_path / "two", "findings": findings}
    compile_module.compile_to(second, product(), make_options(**again))
    assert first.read_bytes() == second.read_bytes()


def test_a_candidate_that_cannot_run_is_skipped(device: SimulatedDevice) -> None:
    problem = problem_of(device.target)
    bad = problem.calls[1].spec.key

    def code(spec: Any) -> bytes:
        if spec.key == bad:
            raise RuntimeError("out of shared memory")
        return REFERENCES.code(spec)

    device._backend = Backend(device.target, code, REFERENCES.load)
    device._cost = Costs(**{names(problem.calls)[2]: 50_000})
    assert tuner.fastest(problem, device_bench(device)) is problem.calls[2]
    bad = problem.calls[0].spec.key  # the default kernel must compile
    with pytest.raises(RuntimeError, match="out of shared memory"):
        tuner.fastest(problem, device_bench(device))


def test_candidates_beyond_device_memory_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    small = SimulatedDevice(DEVICE, nbytes=1 << 15, cost=Costs())
    problem = problem_of(small.target)
    with pytest.raises(DeviceMemoryError):
        tuner.fastest(problem, device_bench(small))
    assert tuner.tune([problem], {}, inf, device_bench(small)) == {}
    assert small.space.used == 0


def test_a_device_fault_ends_tuning(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = SimulatedDevice(DEVICE, cost=Costs())

    def fault(*_: Any) -> None:
        raise ValueError("an illegal address")

    monkeypatch.setattr(simulated.ReferenceKernel, "run", fault)
    with pytest.raises(DeviceError, match="an illegal address"):
        tuner.fastest(problem_of(faulty.target), device_bench(faulty))


def test_a_trial_times_one_graph_by_events_and_frees_all() -> None:
    driver = FakeDriver(total=1 << 24)
    gpu = FakeGpu(driver)
    problem = problem_of(gpu.target)
    with device_bench(gpu)(problem.calls[:2], problem.request) as at, at(2) as (first, _):
        driver.calls.clear()
        first.seconds()
        assert [name for name, _ in driver.calls] == [
            "cuEventRecord", "cuGraphLaunch", "cuEventRecord", "cuEventSynchronize", "cuEventElapsedTime"
        ]  # fmt: skip
    assert not driver.alive
    assert gpu.has_clock and gpu.target.l2_bytes == 4096
