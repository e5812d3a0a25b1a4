"""Calls of runs to NVIDIA's driver: their order and arguments, errors, and that no resource leaks."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import ArtifactError, DeviceError, DeviceLost, DeviceMemoryError, FeedError, UnsupportedError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.cuda import Binary
from lathe.core.plan.movables import MemoryLimit
from lathe.core.plan.plan import weight_chunks
from lathe.core.plan.planner import make_plan
from lathe.core.runtime.device import cuda_driver, devices
from lathe.core.runtime.device.cuda import CudaDevice
from lathe.core.runtime.device.device_executable import DeviceExecutable
from lathe.core.runtime.session.runner import StepTimes
from tests.core.cuda.fake_driver import CUresult, FakeDriver, FakeGpu
from tests.core.random_nets import Net, feeds


def two_steps() -> Graph:
    graph = Graph("two")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), 16)))
    graph.outputs = [b("Mul", b("Exp", x), graph.add_constant(np.arange(16, dtype=np.float32)))]
    return graph


def loaded(device: CudaDevice, max_batch: int = 4) -> DeviceExecutable:
    planned = make_plan(two_steps(), device.target)
    objects = {symbol: device.code(spec) for symbol, spec in planned.specs.items()}
    return DeviceExecutable(planned.plan, device, objects, weight_chunks(planned), max_batch)


def assert_runs(executable: DeviceExecutable, n: int) -> None:
    x = np.random.default_rng(n).standard_normal((n, 16)).astype(np.float32)
    np.testing.assert_allclose(executable.run(n, [x])[0], np.exp(x) * np.arange(16, dtype=np.float32), 1e-6)


def calls_of(driver: FakeDriver, work: Any) -> list[str]:
    driver.calls.clear()
    work()
    return [name for name, _ in driver.calls]


def test_runs_in_any_size_by_launches_and_graphs_and_leaves_nothing() -> None:
    driver = FakeDriver()
    executable = loaded(FakeGpu(driver))
    for n in (1, 3, 0, 9, 3, 3):
        assert_runs(executable, n)
    assert executable.settle(10)
    assert_runs(executable, 3)
    assert "cuGraphLaunch" in dict(driver.calls)
    executable.close()
    assert driver.alive == Counter()


def test_a_captured_run_is_one_launch_and_has_copies_apart_beside_others() -> None:
    driver = FakeDriver()
    executable = loaded(FakeGpu(driver))
    for _ in range(2):
        assert_runs(executable, 2)
    assert executable.settle(10)
    alone = ["cuGraphLaunch", "cuEventRecord", "cuEventSynchronize"]
    assert calls_of(driver, lambda: assert_runs(executable, 2)) == alone
    assert "graphs: captured for 2 with copies" in "\n".join(executable.explain(2))
    executable._free.insert(0, executable._acquire_slot(1))  # the next runs use the other slot
    executable._acquire_slot(1)
    for _ in range(2):
        assert_runs(executable, 2)
    assert executable.settle(10)
    assert calls_of(driver, lambda: assert_runs(executable, 2)) == [
        "cuMemcpyHtoDAsync", "cuEventRecord", "cuStreamWaitEvent",
        "cuGraphLaunch", "cuEventRecord", "cuStreamWaitEvent",
        "cuMemcpyDtoHAsync", "cuEventRecord", "cuEventSynchronize",
    ]  # fmt: skip
    assert "graphs: captured for 2 with copies; 2 beside copies" in "\n".join(executable.explain(2))


def test_transfers_have_streams_of_their_own_and_are_part_of_graphs() -> None:
    graph = Graph("deep")
    b = Builder(graph)
    x = first = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), 16)))
    for index in range(6):
        x = b("MatMul", b("Exp", b("Neg", x)), b.constant(np.full((16, 16), 0.1 + index / 100, np.float32)))
    graph.outputs = [b("Add", x, b("Tanh", first))]
    driver = FakeDriver()
    device = FakeGpu(driver)
    free = make_plan(graph, device.target).plan
    limit = MemoryLimit((free.weights + free.arena.at(4)) // 2, 4)
    planned = make_plan(graph, device.target, limit=limit)
    objects = {symbol: device.code(spec) for symbol, spec in planned.specs.items()}
    executable = DeviceExecutable(planned.plan, device, objects, weight_chunks(planned), 4)
    given = {n: np.random.default_rng(n).standard_normal((n, 16)).astype(np.float32) for n in (1, 3, 0, 9)}

    def assert_right(n: int) -> None:
        want = lathe.interpret(graph, {"x": given[n]})[graph.outputs[0].name]
        np.testing.assert_allclose(executable.run(n, [given[n]])[0], want, 1e-5, 1e-6)

    for n in (1, 3, 0, 9):
        assert_right(n)
    copies = [arguments for name, arguments in driver.calls if name == "cuMemcpyHtoDAsync"]
    assert len({stream for *_, stream in copies}) == 3  # of the upload, of the steps, and of transfers into the arena
    assert_right(3)  # the second run of 3 starts the capture, which has streams of its own
    assert executable.settle(10)
    alone = ["cuGraphLaunch", "cuEventRecord", "cuEventSynchronize"]
    assert calls_of(driver, lambda: assert_right(3)) == alone
    executable.close()
    assert driver.alive == Counter()


def test_copies_have_streams_of_their_own_and_wait_for_each_other() -> None:
    driver = FakeDriver()
    executable = loaded(FakeGpu(driver))
    executable._acquire_slot(1)
    driver.calls.clear()
    assert_runs(executable, 2)
    arguments = [(name, given) for name, given in driver.calls]
    (_, into), (_, arrived), (_, waits), *_ = arguments
    work, out = (given[8] for name, given in arguments if name == "cuLaunchKernel"), arguments[-3][1][3]
    streams = {*work}
    assert len(streams) == 1
    assert waits[0] in streams and waits[1] is arrived[0] and arrived[1] is into[3]
    assert len({into[3], out, *streams}) == 3


def test_the_time_of_a_step_is_that_of_a_graph_of_its_launches() -> None:
    """Between two events lie one launch of the graph and one record, 2 us by the fake's clock, for 50 launches."""
    executable = loaded(FakeGpu(FakeDriver()))
    times = StepTimes(executable.plan)
    executable.run(2, [np.zeros((2, 16), np.float32)], [times])
    assert times.steps.tolist() == [40, 40]
    assert executable.nanoseconds(2, replays=10) == 200


def test_facts_of_the_gpu_become_the_target() -> None:
    device = FakeGpu(FakeDriver())
    assert (device.target.arch, device.target.multiprocessors, device.target.shared_bytes) == (86, 46, 101376)
    assert device.peaks().bandwidth == 448e9 and round(device.peaks().flops / 1e12) == 20
    assert device.memory().total == 1 << 20


@pytest.mark.parametrize(("arch", "loads"), [(80, b"machine code"), (89, b"machine code"), (90, b"ptx\0")])
def test_later_generations_get_the_ptx(arch: int, loads: bytes) -> None:
    driver = FakeDriver(failing={"cuModuleLoadData": CUresult.CUDA_ERROR_INVALID_VALUE})
    binary = Binary("lathe_x", 80, 4, 0, b"machine code", "ptx")
    with pytest.raises(DeviceError, match=r"cuModuleLoadData: CUDA_ERROR_INVALID_VALUE \(1\): as the test wants it"):
        FakeGpu(driver, arch).load({"lathe_x": binary.to_bytes()})
    assert driver.calls[-1] == ("cuModuleLoadData", (loads,))


def test_older_gpus_are_refused() -> None:
    binary = Binary("lathe_x", 80, 4, 0, b"machine code", "ptx")
    with pytest.raises(ArtifactError, match="compiled for sm_80, cuda:0 is sm_75"):
        FakeGpu(FakeDriver(), 75).load({"lathe_x": binary.to_bytes()})


def test_machine_code_without_ptx_is_refused_on_later_generations() -> None:
    binary = Binary("lathe_x", 90, 4, 0, b"machine code", "")
    with pytest.raises(ArtifactError, match="compiled for sm_90, cuda:0 is sm_100"):
        FakeGpu(FakeDriver(), 100).load({"lathe_x": binary.to_bytes()})


def test_an_error_in_a_capture_names_its_cause() -> None:
    stream = FakeGpu(FakeDriver(failing={"cuStreamEndCapture": CUresult.CUDA_ERROR_INVALID_VALUE})).stream()
    with pytest.raises(DeviceError, match="the launch was refused"):
        stream.capture(_refused)


def _refused() -> None:
    raise DeviceError("the launch was refused")


def test_too_little_memory_is_refused_at_load_or_for_the_batch() -> None:
    with pytest.raises(DeviceMemoryError, match=r"needs \d+ bytes for batches of up to 4 .* cuda:0 has 600 free"):
        loaded(FakeGpu(FakeDriver(total=600)))
    executable = loaded(FakeGpu(FakeDriver(total=4096)))
    with pytest.raises(FeedError, match=r"a batch of 999 needs \d+ bytes.*CUDA_ERROR_OUT_OF_MEMORY"):
        executable.run(999, [np.zeros((999, 16), np.float32)])
    assert_runs(executable, 3)


def test_a_failing_call_is_named() -> None:
    driver = FakeDriver()
    executable = loaded(FakeGpu(driver))
    driver.failing["cuEventSynchronize"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceError, match=r"^cuEventSynchronize: CUDA_ERROR_INVALID_VALUE \(1\)"):
        executable.run(1, [np.zeros((1, 16), np.float32)])


def test_steps_are_launched_singly_if_a_capture_fails() -> None:
    driver = FakeDriver(failing={"cuGraphInstantiate": CUresult.CUDA_ERROR_INVALID_VALUE})
    executable = loaded(FakeGpu(driver))
    for _ in range(4):
        assert_runs(executable, 2)
        assert executable.settle(10)
    assert "no graph was captured for n = 2: cuGraphInstantiate" in "\n".join(executable.explain(2))
    executable.close()
    assert driver.alive == Counter()


def test_errors_name_the_missing_dependency(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_bindings() -> Any:
        raise ImportError("cuda")

    def no_driver(Flags: int) -> Any:
        raise RuntimeError("libcuda was not found")  # the bindings raise an error of their own class

    graph = two_steps()
    monkeypatch.setattr(cuda_driver, "_bindings", no_bindings)
    with pytest.raises(UnsupportedError, match="'cuda:0' needs NVIDIA's Python bindings: install the extra 'cuda'"):
        lathe.compile(graph, device="cuda")
    monkeypatch.setattr(cuda_driver, "_bindings", lambda: SimpleNamespace(CUresult=CUresult, cuInit=no_driver))
    with pytest.raises(UnsupportedError, match=r"'cuda:1' needs NVIDIA's driver \(libcuda\)"):
        lathe.compile(graph, device="cuda:1")
    without_gpu = FakeDriver(failing={"cuInit": CUresult.CUDA_ERROR_NO_DEVICE})
    monkeypatch.setattr(cuda_driver, "_bindings", lambda: without_gpu)
    with pytest.raises(UnsupportedError, match=r"'cuda:0' needs a GPU .* cuInit: CUDA_ERROR_NO_DEVICE"):
        lathe.compile(graph, device="cuda")
    monkeypatch.setattr(cuda_driver, "_bindings", lambda: FakeDriver())
    with pytest.raises(UnsupportedError, match="'cuda:7' is not here: the driver knows 1 GPUs"):
        lathe.compile(graph, device="cuda:7")


def two_parts() -> Graph:
    """A chain of three nodes, which the test places on two GPUs."""
    graph = Graph("parts")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), 16)))
    middle = b("Exp", x, name="first")
    graph.outputs = [b("Neg", b("Tanh", middle, name="second"), name="third")]
    return graph


@pytest.mark.parametrize("peers", [True, False])
def test_values_go_from_gpu_to_gpu_unless_the_driver_refuses(monkeypatch: pytest.MonkeyPatch, peers: bool) -> None:
    driver = FakeDriver(count=2, peers=peers)
    for index in range(2):
        monkeypatch.setitem(devices._devices, f"cuda:{index}", FakeGpu(driver, index=index))
    placement = {"first": "cuda:0", "second": "cuda:1", "third": "cuda:1"}
    with lathe.compile(two_parts(), device=["cuda:0", "cuda:1"], optimize=False, placement=placement) as session:
        x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
        for _ in range(3):
            driver.calls.clear()
            (y,) = session.run({"x": x}).values()
            session.settle(10)
            np.testing.assert_allclose(y, -np.tanh(np.exp(x)), 1e-6)
        calls = Counter(name for name, _ in driver.calls)
        assert calls["cuMemcpyPeerAsync"] == int(peers)
        assert (calls["cuMemcpyHtoDAsync"], calls["cuMemcpyDtoHAsync"]) == (1, 1) if peers else (0, 0)  # in graphs
        assert f" from cuda:0{', directly' * peers}: 64 B" in session.explain()
    assert driver.alive == Counter()


@pytest.mark.sample(4)
@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("limit", [None, 30_000])
def test_random_graphs_on_two_gpus_and_the_cpu_copy_what_explain_says(
    monkeypatch: pytest.MonkeyPatch, peers: bool, limit: int | None
) -> None:
    """Nodes are annotated at random. Each value that the other GPU reads is one copy between them, or by the host."""
    ran, refused = 0, []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        graph = Net(lambda below, rng=rng: int(rng.integers(below))).grow(steps=4 + seed % 10)  # type: ignore[misc]
        for node in graph.nodes:
            node.device = str(rng.choice(["", "cpu", "cuda:0", "cuda:1"]))
        driver = FakeDriver(count=2, peers=peers, total=1 << 24)
        for index in range(2):
            monkeypatch.setitem(devices._devices, f"cuda:{index}", FakeGpu(driver, index=index))
        names = ["cuda:0", "cuda:1"]
        limits = None if limit is None else dict.fromkeys(names, limit)
        try:
            session = lathe.compile(graph, device=names, device_memory=limits, max_batch=4, tune="off")
        except UnsupportedError as error:
            refused.append(str(error))
            continue
        with session:
            given = feeds(graph, 3, 0)
            session.run(given)  # the tests repeat the first run of a session with other rows
            driver.calls.clear()
            for name, got in session.run(given).items():
                np.testing.assert_allclose(got, lathe.interpret(graph, given)[name], 2e-4, 2e-4)
            calls = Counter(name for name, _ in driver.calls)
            lines = [line for line in session.explain(3).splitlines() if line.startswith("  receive ")]
            between = [line for line in lines if re.search(r"from cuda:\d, directly", line)]
            assert calls["cuMemcpyPeerAsync"] == len(between) and bool(between) <= peers
            ran += bool(re.search("on cuda:0.*on cuda:1|on cuda:1.*on cuda:0", session.explain(3), re.DOTALL))
        assert driver.alive == Counter()
    assert ran >= 10
    assert all(re.search("has no kernel for|has no room|does not fit on cuda", reason) for reason in refused)


def test_peer_access_that_another_library_asked_for_is_as_good() -> None:
    for code, reached in ((704, True), (1, False)):
        failing = {"cuCtxEnablePeerAccess": CUresult(code)}
        first, second = (FakeGpu(FakeDriver(count=2, failing=failing), index=index) for index in range(2))
        assert first.reaches(first) and first.reaches(second) == reached


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_fault_loses_the_device_and_nothing_more_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """According to the driver's manual, further work in the context would only return the same error."""
    driver = FakeDriver()
    device = FakeGpu(driver)
    executable, other = loaded(device), loaded(device)
    driver.failing["cuEventSynchronize"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceLost, match=r"cuda:0 was lost: cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        assert_runs(executable, 2)
    driver.failing.clear()
    driver.calls.clear()
    with pytest.raises(DeviceLost, match="cuda:0 was lost"):
        assert_runs(other, 2)
    executable.close()
    assert driver.calls == []  # handles and addresses of a lost context are invalid, or belong to other objects
    monkeypatch.setattr(devices, "_devices", {"cuda:0": device})
    with pytest.raises(DeviceLost, match=r"was lost: .*; sessions that ran there still hold \d+ blocks of memory"):
        devices.open_device("cuda:0")
    other.close()
    assert devices.open_device("cuda:0") is device and not device.lost
    again = loaded(device)
    assert_runs(again, 2)
    again.close()
    assert driver.alive == Counter()


@pytest.mark.parametrize(
    "call", ["cuMemFree", "cuMemFreeHost", "cuModuleUnload", "cuEventDestroy", "cuGraphExecDestroy", "cuStreamDestroy"]
)
def test_a_fault_found_while_closing_does_not_block_the_device(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Any later call may report a fault. Closing continues, and the device can be opened again."""
    driver = FakeDriver()
    device = FakeGpu(driver)
    executable = loaded(device)
    assert_runs(executable, 2)
    assert_runs(executable, 2)  # captures the graph
    assert executable.settle(10)
    driver.failing[call] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    executable.close()
    assert device.lost.startswith(f"cuda:0 was lost: {call}: CUDA_ERROR_ILLEGAL_ADDRESS (700)")
    driver.failing.clear()
    monkeypatch.setattr(devices, "_devices", {"cuda:0": device})
    assert devices.open_device("cuda:0") is device and not device.lost


def test_a_device_that_stays_broken_needs_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(failing={"cuStreamCreate": CUresult.CUDA_ERROR_ILLEGAL_ADDRESS})
    device = FakeGpu(driver)
    with pytest.raises(DeviceLost):
        loaded(device)
    driver.failing = {"cuMemAlloc": CUresult.CUDA_ERROR_ILLEGAL_ADDRESS}
    monkeypatch.setattr(devices, "_devices", {"cuda:0": device})
    for _ in range(2):
        with pytest.raises(DeviceLost, match=r"does not work again in this process \(.*700.*\): restart it"):
            devices.open_device("cuda:0")


def test_other_failures_leave_the_device_as_it_is() -> None:
    driver = FakeDriver(failing={"cuStreamCreate": CUresult.CUDA_ERROR_INVALID_VALUE})
    device = FakeGpu(driver)
    with pytest.raises(DeviceError, match="INVALID_VALUE"):
        loaded(device)
    driver.failing.clear()
    executable = loaded(device)
    assert_runs(executable, 2)
    executable.close()
    assert driver.alive == Counter()


def test_a_batch_beyond_pinned_memory_leaves_the_slot_usable() -> None:
    driver = FakeDriver()
    executable = loaded(FakeGpu(driver))
    driver.failing["cuMemHostAlloc"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(FeedError, match="a batch of 64 needs"):
        assert_runs(executable, 64)
    driver.failing.clear()
    for n in (4, 64):
        assert_runs(executable, n)
    executable.close()
    assert driver.alive == Counter()
