"""Products by cuBLASLt, on a fake library with the real interface.

Tests when it is a candidate, correct results for all layouts, tuning records, and that plans work without it.
"""

from __future__ import annotations

import json
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
from lathe.core.errors import ArtifactError, DeviceError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.call import KernelCall, Request, Scratch
from lathe.core.kernels.choose import candidates
from lathe.core.kernels.gemm.cublaslt_spec import LibrarySpec, TunedAlgorithm
from lathe.core.kernels.target import GpuTarget
from lathe.core.passes.pipeline import Options, optimize
from lathe.core.plan.plan import weight_chunks
from lathe.core.plan.planner import make_plan
from lathe.core.runtime.device import cublaslt, devices
from lathe.core.runtime.device.device_executable import DeviceExecutable
from lathe.core.runtime.device.device_trial import device_bench
from tests.core.cuda.fake_cublaslt import FakeCublasLt
from tests.core.cuda.fake_driver import FakeDriver, FakeGpu

N = symbol("n")
F32, BF16 = DType.FLOAT32, DType.BFLOAT16


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCublasLt:
    made = FakeCublasLt(FakeDriver(total=1 << 26))
    monkeypatch.setattr(cublaslt, "load_library", made.functions)
    return made


def gpu(fake: FakeCublasLt) -> FakeGpu:
    return FakeGpu(fake.driver)


def layer(
    *ops: str, dtype: DType = F32, residual: bool = False, turned: bool = False, approximate: str = "tanh"
) -> Graph:
    """The product of x [n, 24, 32] and a matrix [32, 48], followed by bias, residual and `ops`."""
    graph, rng = Graph("layer"), np.random.default_rng(0)
    b = Builder(graph)
    x = b.input("x", TensorType(dtype, (N, 24, 32)))
    weight = b.constant(rng.standard_normal((48, 32) if turned else (32, 48)).astype(dtype.numpy))
    y = b("MatMul", x, b("Transpose", weight, perm=(1, 0)) if turned else weight)
    if "bias" in ops:
        y = b("Add", y, b.constant(rng.standard_normal(48).astype(dtype.numpy)))
    if residual:
        y = b("Add", y, b.input("z", TensorType(dtype, (N, 24, 48))))
    for op in ops:
        if op == "Gelu":
            y = b("Gelu", y, approximate=approximate)
        elif op != "bias":
            y = b(op, y)
    graph.outputs = [y]
    return graph


def optimized(graph: Graph, **options: Any) -> Graph:
    batching = describe(graph, make_options(threads=1)).batching
    return optimize(symbol_binding.bind(graph, batching, ()), Options(host=False, **options))[0]


def offers(graph: Graph, **target: Any) -> list[LibrarySpec]:
    """The library's specs, one for each node for which the library is a candidate."""
    found = GpuTarget(**{"cublaslt": 120000, **target})
    specs = [call.spec for node in graph.nodes for call in candidates(Request(node, graph.constants, found))]
    return [spec for spec in specs if isinstance(spec, LibrarySpec)]


def always(request: Request) -> KernelCall | None:
    """The call of the library where it is a candidate, with a recorded algorithm; otherwise the first candidate."""
    calls = candidates(request)
    found = next((call for call in calls if isinstance(call.spec, LibrarySpec)), None)
    way = f"1:{(1).to_bytes(64, 'little').hex()}/0"
    return found.spec.recalled(found, way) if found is not None else next(iter(calls), None)


def run(fake: FakeCublasLt, graph: Graph, feeds: dict[str, Array], n: int) -> Array:
    device = gpu(fake)
    target = replace(device.target, cublaslt=device.library_version())
    planned = make_plan(graph, target, choose=always)
    objects = {symbol: device.code(spec) for symbol, spec in planned.specs.items()}
    executable = DeviceExecutable(planned.plan, device, objects, weight_chunks(planned), 4)
    inputs = [feeds[port.name] for port in planned.plan.inputs]
    result = executable.run(n, inputs)[0]
    for _ in range(2):  # also by a captured graph
        assert np.array_equal(executable.run(n, inputs)[0], result)
        assert executable.settle(10)
    executable.close()
    assert not fake.driver.alive and {thing.kind for thing in fake.alive.values()} == {"handle"}
    return result


@pytest.mark.sample(5)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("ops", [(), ("bias",), ("Relu",), ("bias", "Relu"), ("bias", "Gelu")], ids="+".join)
def test_row_major_products_with_epilogues(
    fake: FakeCublasLt, ops: tuple[str, ...], residual: bool, turned: bool
) -> None:
    source = layer(*ops, residual=residual, turned=turned)
    graph = optimized(source)
    (spec,) = offers(graph)
    assert (spec.bias, spec.c is not None) == ("bias" in ops, residual)
    rng = np.random.default_rng(1)
    feeds = {v.name: rng.standard_normal(v.tensor.evaluate({"n": 3})).astype(np.float32) for v in source.inputs}
    (want,) = lathe.interpret(source, feeds).values()
    np.testing.assert_allclose(run(fake, graph, feeds, 3), want, rtol=1e-5, atol=1e-4)
    assert fake.ran == [0, 0, 0]


@pytest.mark.parametrize("precision", ["bfloat16", "tf32"])
def test_narrow_factors(fake: FakeCublasLt, precision: str) -> None:
    source = layer("bias", "Relu", residual=True)
    graph = optimized(source, precision="bfloat16" if precision == "bfloat16" else "float32")
    (spec,) = offers(graph, tf32=precision == "tf32")
    assert spec.tf32 == (precision == "tf32") and spec.a.dtype is (BF16 if precision == "bfloat16" else F32)
    rng = np.random.default_rng(1)
    feeds = {v.name: rng.standard_normal(v.tensor.evaluate({"n": 2})).astype(np.float32) for v in source.inputs}
    (want,) = lathe.interpret(source, feeds).values()
    error = np.abs(run(fake, graph, feeds, 2) - want).max() / np.abs(want).max()
    assert error < (2e-2 if precision == "bfloat16" else 1e-5)


def test_batches_of_matrices(fake: FakeCublasLt) -> None:
    graph = Graph("batched")
    b = Builder(graph)
    x, y = (b.input(name, TensorType(F32, (N, 2, *sides))) for name, sides in (("x", (20, 32)), ("y", (24, 32))))
    graph.outputs = [b("MatMul", x, b("Transpose", y, perm=(0, 1, 3, 2)))]
    rng = np.random.default_rng(1)
    feeds = {v.name: rng.standard_normal(v.tensor.evaluate({"n": 3})).astype(np.float32) for v in graph.inputs}
    (want,) = lathe.interpret(graph, feeds).values()
    found = optimized(graph)
    (spec,) = offers(found)
    assert spec.b.turned and str(spec.batch) == "2*n"
    np.testing.assert_allclose(run(fake, found, feeds, 3), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "graph",
    [layer("Tanh"), layer("Relu", "Exp"), layer("bias", "Gelu", approximate="none"), layer("Relu", "Gelu")],
    ids=["another function", "something behind it", "the exact Gelu", "two functions"],
)
def test_unsupported_products_are_no_candidates(graph: Graph) -> None:
    assert offers(optimized(graph)) == []


def test_without_the_library_there_is_no_candidate() -> None:
    assert offers(optimized(layer()), cublaslt=0) == []


def one(fake: FakeCublasLt) -> tuple[KernelCall, Request, FakeGpu]:
    device, graph = gpu(fake), optimized(layer("bias"))
    target = replace(device.target, cublaslt=device.library_version())
    request = Request(graph.nodes[0], graph.constants, target)
    return next(c for c in candidates(request) if isinstance(c.spec, LibrarySpec)), request, device


def test_the_fastest_measured_algorithm_sets_the_workspace(fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the fake driver's clock, as changed here, the second algorithm takes half as long as the first."""
    call, request, device = one(fake)
    slow = fake.driver.cuEventElapsedTime

    def elapsed(start: Any, end: Any) -> Any:
        code, milliseconds = slow(start, end)
        return code, milliseconds * (1 if fake.ran[-1:] == [1] else 2)

    monkeypatch.setattr(FakeDriver, "cuEventElapsedTime", lambda driver, hStart, hEnd: elapsed(hStart, hEnd))
    problem = tuner.Problem(request, (candidates(request)[0], call), (1, 4))
    bench = device_bench(device)
    with bench(problem.calls, request) as at:
        for n in problem.batches:
            with at(n) as (_, trial):
                call = trial.settled(call)
    assert isinstance(call.spec, LibrarySpec)
    algorithm = (2).to_bytes(64, "little").hex()
    assert call.spec.ways == (TunedAlgorithm(1, algorithm, 4096), TunedAlgorithm(4, algorithm, 4096))
    (scratch,) = (operand for operand in call.operands if isinstance(operand, Scratch))
    assert scratch.nbytes == 4096 + 256
    symbol, *ways = call.spec.finding.split()
    assert problem.calls[1].spec.symbol == symbol and ways == [f"{n}:{algorithm}/4096" for n in (1, 4)]
    again = problem.recorded_candidate({problem.key: call.spec.finding})
    assert again is not None and again.spec == call.spec and again.operands == call.operands
    assert LibrarySpec.from_bytes(call.spec.to_bytes()) == call.spec
    assert not fake.driver.alive and {thing.kind for thing in fake.alive.values()} == {"handle"}


def test_invalid_findings_change_nothing(fake: FakeCublasLt) -> None:
    call, request, _ = one(fake)
    problem = tuner.Problem(request, (call,), (1,))
    assert problem.recorded_candidate({problem.key: f"{call.spec.symbol} 1:zz/0"}) == call


def test_a_batch_size_without_a_finding_uses_the_nearest(fake: FakeCublasLt) -> None:
    call, _, device = one(fake)
    best, other = ((k).to_bytes(64, "little").hex() for k in (1, 2))
    assert isinstance(call.spec, LibrarySpec)
    spec = replace(call.spec, ways=(TunedAlgorithm(2, other, 4096), TunedAlgorithm(8, best, 0)))
    product = device.product(spec.to_bytes())
    for n, algorithm in ((1, 2), (2, 2), (7, 2), (8, 1), (9, 1)):
        assert product._descriptors_for(n).algorithm.data[0] == algorithm
    product.close()
    fake.refused = frozenset({0, 1})
    asked = len(fake.asked)
    assert product._descriptors_for(2).algorithm.data[0] == 1
    assert "cublasLtMatmulAlgoGetHeuristic" in fake.asked[asked:]
    product.close()
    fake.workspaces = (1 << 40,)
    with pytest.raises(DeviceError, match="cuBLASLt 120903 has no algorithm for cublaslt float32"):
        product._descriptors_for(3)


@pytest.fixture
def open_gpu(fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    device = gpu(fake)
    monkeypatch.setitem(devices._devices, "cuda:0", device)
    monkeypatch.setattr(tuner, "_MIN_WORK", 1)
    return device


@pytest.mark.slow
def test_a_tuning_record_reproduces_the_same_bytes(
    fake: FakeCublasLt, open_gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "fastest", _library_first(tuner.fastest))
    first, second = tmp_path / "first.lathe", tmp_path / "second.lathe"
    options: dict[str, Any] = {"device": "cuda", "threads": 1, "max_batch": 4}
    compile_module.compile_to(first, layer("bias"), make_options(**options, cache_dir=tmp_path / "a", tune=inf))
    findings = tuner.read_findings(first)
    assert [finding.split()[0].startswith("lathe_cublaslt_") for finding in findings.values()] == [True]
    fake.ran.clear()
    compile_module.compile_to(
        second, layer("bias"), make_options(**options, cache_dir=tmp_path / "b", findings=findings)
    )
    assert first.read_bytes() == second.read_bytes() and fake.ran == []
    x = np.random.default_rng(0).standard_normal((3, 24, 32)).astype(np.float32)
    with lathe.load_compiled(second) as session:
        assert "cublaslt float32 + bias" in session.explain()
        (got,) = session.run({"x": x}).values()
    (want,) = lathe.interpret(layer("bias"), {"x": x}).values()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    open_gpu.__dict__["_vendor_library"] = None  # as if the library were not installed
    with pytest.raises(ArtifactError, match="needs NVIDIA's cuBLASLt, which was not found; compile the model again"):
        lathe.load_compiled(second)
    with lathe.compile(layer("bias"), device="cuda", tune="off") as session:
        assert "cublaslt" not in session.explain()


def _library_first(really: Any) -> Any:
    def fastest(problem: tuner.Problem, bench: Any, end: float = inf) -> KernelCall:
        """Measure all candidates, then return the call of the library."""
        really(problem, bench, end)
        call = next(call for call in problem.calls if isinstance(call.spec, LibrarySpec))
        for n in problem.batches:
            call = call.spec.settled(call, n, f"{(1).to_bytes(64, 'little').hex()}/0")
        return call

    return fastest


@pytest.mark.parametrize(
    "change", [{"version": 11_11_03}, {"has_driver": False}], ids=["too old", "not for this driver"]
)
def test_an_unusable_library_counts_as_missing(fake: FakeCublasLt, change: dict[str, Any]) -> None:
    for name, value in change.items():
        setattr(fake, name, value)
    assert gpu(fake).library_version() == 0


def test_a_library_without_a_function_counts_as_missing(fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = fake.functions()
    del functions.cublasLtMatmulAlgoCheck
    monkeypatch.setattr(cublaslt, "load_library", lambda: functions)
    assert gpu(fake).library_version() == 0
    monkeypatch.setattr(cublaslt, "load_library", lambda: None)
    assert gpu(fake).library_version() == 0
    monkeypatch.undo()
    monkeypatch.setattr(cublaslt, "_library_paths", lambda: iter(["libnothing-of-this-name.so"]))
    cublaslt.load_library.cache_clear()
    assert cublaslt.load_library() is None
    cublaslt.load_library.cache_clear()


def test_damaged_code_is_refused(fake: FakeCublasLt) -> None:
    call, _, device = one(fake)
    whole = device.code(call.spec)
    nothing = b"lathe cublaslt\n" + json.dumps([[], [], [], []]).encode()
    for data in (whole[:-2], whole.replace(b"float32", b"float33"), nothing):
        with pytest.raises(ArtifactError, match="malformed"):
            device.load({"lathe_x": data})
