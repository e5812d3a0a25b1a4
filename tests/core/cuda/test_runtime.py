"""Plans on simulated devices: any batch size, any order of streams, graphs, memory, threads."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import DeviceError, DeviceMemoryError, FeedError, SessionClosed
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, State, Value
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.cuda.toolchain import is_interpreter_supported
from lathe.core.plan.plan import weight_chunks
from lathe.core.plan.planner import make_plan
from lathe.core.runtime.device import device_executable, devices, simulated
from lathe.core.runtime.device.device_executable import DeviceExecutable
from lathe.core.runtime.device.simulated import INTERPRETER, REFERENCES, Backend, Schedule, SimulatedDevice
from lathe.core.runtime.host import host_copies, plan_memory
from lathe.core.runtime.host.device_tape import Key
from lathe.core.runtime.host.memory import address_of
from lathe.core.runtime.host.plan_memory import memory_of_plan
from lathe.core.runtime.session.record import KernelRun, run_recorded
from lathe.core.runtime.session.runner import StepTimes

N = symbol("n")
BACKENDS = [REFERENCES, *([INTERPRETER] if is_interpreter_supported() else [])]  # the second one with `make test-cuda`


def chain(width: int = 16) -> Graph:
    """Elementwise steps that run in place, two outputs, a constant."""
    graph = Graph("chain")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (N, width)))
    y = b("Tanh", b("Exp", b("Neg", x)))
    graph.outputs = [b("Mul", y, graph.add_constant(np.arange(width, dtype=np.float32))), b("Abs", x)]
    return graph


def exchange() -> Graph:
    """Two states: the input is added to the first; the second takes the previous value of the first."""
    graph = Graph("exchange")
    b = Builder(graph)
    step = b.input("step", TensorType(DType.FLOAT32, (4,)))
    total, before = (Value(name, TensorType(DType.FLOAT32, (4,))) for name in ("total", "before"))
    grown = b("Add", total, step)
    zero = np.zeros(4, np.float32)
    graph.states = [State(total, grown, zero), State(before, total, zero)]
    graph.outputs = [b("Neg", before)]
    return graph


def loaded(graph: Graph, device: SimulatedDevice, max_batch: int = 4) -> DeviceExecutable:
    planned = make_plan(graph, device.target)
    objects = {symbol: device.code(spec) for symbol, spec in planned.specs.items()}
    return DeviceExecutable(planned.plan, device, objects, weight_chunks(planned), max_batch)


def feed(n: int, width: int = 16, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng((n, seed)).standard_normal((n, width)).astype(np.float32)


def assert_runs(executable: DeviceExecutable, graph: Graph, x: np.ndarray[Any, Any]) -> None:
    results = executable.run(len(x), [x])
    for result, expected in zip(results, lathe.interpret(graph, {"x": x}).values(), strict=True):
        np.testing.assert_allclose(result, expected, 1e-5)


def copy_all_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy arrays of any size as large ones, in pieces of at least 16 bytes."""
    monkeypatch.setattr(plan_memory, "LARGE", 1)
    monkeypatch.setattr(host_copies, "_PIECE", 16)
    monkeypatch.setattr(host_copies, "_PAGE", 16)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("schedule", ["late", "early", "random"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_batch_size_runs_with_any_order_of_streams(
    backend: Backend, schedule: Schedule, alone: bool, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another run is in flight (not `alone`), or arrays are large, the copies of a run have streams of their own."""
    if pieces:
        copy_all_in_pieces(monkeypatch)
    graph, device = chain(), SimulatedDevice(backend=backend, schedule=schedule, seed=7)
    executable = loaded(graph, device)
    held = None if alone else executable._acquire_slot(1)
    for n in (1, 3, 4, 0, 9, 3, 9, 9, 1, 0, 3):  # beyond `max_batch`, and smaller sizes again
        assert_runs(executable, graph, feed(n))
    assert executable.settle(10)
    for n in (9, 3, 1, 0):  # by captured graphs
        assert_runs(executable, graph, feed(n, seed=1))
    assert device.replays >= 4
    if held is not None:
        executable._release_slot(held)
    executable.close()
    assert device.space.used == 0


@pytest.mark.parametrize(("schedule", "pieces"), [("late", False), ("random", False), ("late", True)])
def test_a_missing_wait_is_detected(schedule: Schedule, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the purpose of the simulated device. With many pieces, it seldom runs none of them by chance."""
    if pieces:
        copy_all_in_pieces(monkeypatch)
    monkeypatch.setattr(simulated._Stream, "wait", lambda stream, event: None)
    executable = loaded(chain(), SimulatedDevice(schedule=schedule, seed=1))
    executable._acquire_slot(1)
    feeds = [feed(3, seed=turn) for turn in range(60)]
    assert not all(np.array_equal(executable.run(3, [x])[1], np.abs(x)) for x in feeds)


def test_a_repeated_size_runs_as_a_graph_without_launches() -> None:
    graph, device = chain(), SimulatedDevice()
    executable = loaded(graph, device)
    steps = len(executable.plan.steps)
    assert_runs(executable, graph, feed(2))
    assert (device.launches, device.replays) == (steps, 0)
    assert_runs(executable, graph, feed(2))
    assert executable.settle(10)
    assert device.launches == 3 * steps  # two runs, and the capture
    assert_runs(executable, graph, feed(2, seed=1))
    assert (device.launches, device.replays) == (3 * steps, 1)


def test_graphs_are_bounded_and_those_of_lost_memory_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_executable, "GRAPHS", 2)
    graph, device = chain(), SimulatedDevice()
    executable = loaded(graph, device, max_batch=3)
    for n in (1, 1, 2, 2, 3, 3):
        assert_runs(executable, graph, feed(n))
        assert executable.settle(10)
    assert sorted(key.n for key in executable._graphs.made) == [2, 3]
    assert_runs(executable, graph, feed(50))  # the memory moves
    assert_runs(executable, graph, feed(3, seed=2))
    assert device.replays == 0
    assert Key(executable._slots[-1].index, 3, whole=True) not in executable._graphs.made


def test_threads_share_an_executable_and_sessions_a_device() -> None:
    graph, device = chain(), SimulatedDevice(schedule="random", seed=3)
    executables = [loaded(graph, device), loaded(graph, device)]

    def work(index: int) -> None:
        for turn in range(6):
            assert_runs(executables[index % 2], graph, feed(1 + (index + turn) % 5, seed=index))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    for executable in executables:
        executable.close()
    assert device.space.used == 0


@pytest.mark.parametrize("schedule", ["late", "early"])
def test_states_stay_on_the_device_and_may_swap_values(schedule: Schedule) -> None:
    executable = loaded(exchange(), SimulatedDevice(schedule=schedule))
    for name in ("total", "before"):
        executable.set_state(name, np.zeros(4, np.float32))
    seen = [executable.run(1, [np.full(4, step, np.float32)])[0][0] for step in (1, 2, 3, 4)]
    assert executable.settle(10)
    seen.append(executable.run(1, [np.full(4, 5, np.float32)])[0][0])
    assert seen == [0, 0, -1, -3, -6]
    assert executable.state("total")[0] == 15 and executable.state("before")[0] == 10


def test_all_that_is_allocated_is_counted() -> None:
    """The memory of the next values of states counts too."""
    for graph in (chain(), exchange()):
        device = SimulatedDevice()
        room = memory_of_plan(loaded(graph, device, max_batch=5).plan, 5)
        assert device.space.used == room.total
    assert room.states == 2 * 16 + 2 * 64


@pytest.mark.parametrize("schedule", ["late", "early", "random"])
def test_values_on_a_device_stay_until_the_next_part_has_read_them(schedule: Schedule) -> None:
    """Several runs at once through parts on three devices; every value is read before it is overwritten."""
    graph = Graph("parts")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (N, 16)))
    first = b("Exp", x, name="first")
    second = b("Tanh", first, name="second")
    graph.outputs = [b("Add", b("Neg", first, name="third"), second, name="fourth"), second]
    names = [f"simulated:{index}" for index in (91, 92, 93)]
    opened = [SimulatedDevice(name, schedule=schedule, seed=5) for name in names]
    with pytest.MonkeyPatch.context() as patch:
        for device in opened:
            patch.setitem(devices._devices, device.name, device)
        placement = {"first": names[0], "second": names[1], "third": names[2], "fourth": names[0]}
        with lathe.compile(graph, device=names, optimize=False, placement=placement) as session:

            def work(index: int) -> None:
                for turn in range(6):
                    feeds = {"x": feed(1 + (index + turn) % 4, seed=index)}
                    wants = lathe.interpret(graph, feeds)
                    for name, got in session.run(feeds).items():
                        np.testing.assert_allclose(got, wants[name], 1e-5)

            with ThreadPoolExecutor(4) as pool:
                list(pool.map(work, range(4)))
            assert session.settle(10)
            text = session.explain()
        assert text.count(", directly") == 4 and all(device.space.used == 0 for device in opened)


def test_a_failed_run_releases_its_memory() -> None:
    graph = Graph("parts")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (N, 16)))
    index = b.input("index", TensorType(DType.INT64, (2,)))
    graph.outputs = [b("Gather", b("Exp", x, name="first"), index, name="second", axis=1)]
    names = ["simulated:94", "simulated:95"]
    placement = dict(zip(("first", "second"), names, strict=True))
    with lathe.compile(graph, device=names, optimize=False, placement=placement) as session:
        for _ in range(5):
            with pytest.raises(FeedError, match="index out of range"):
                session.run({"x": feed(2), "index": np.array([0, 99])})
        (got,) = session.run({"x": feed(2), "index": np.array([0, 3])}).values()
        np.testing.assert_allclose(got, np.exp(feed(2))[:, [0, 3]], 1e-6)


def test_a_plan_beyond_device_memory_is_refused_with_figures() -> None:
    graph = chain(1024)
    figures = r"needs \d+ bytes for batches of up to 64 .* 65536 free; batches of 2 would"
    with pytest.raises(DeviceMemoryError, match=figures):
        loaded(graph, SimulatedDevice(nbytes=1 << 16), max_batch=64)


def test_a_batch_beyond_device_memory_is_refused_and_the_next_runs() -> None:
    graph = chain(1024)
    executable = loaded(graph, SimulatedDevice(nbytes=1 << 17), max_batch=1)
    with pytest.raises(FeedError, match="a batch of 99 needs"):
        executable.run(99, [feed(99, 1024)])
    assert_runs(executable, graph, feed(2, 1024))


def test_a_batch_beyond_the_kernels_limit_is_refused() -> None:
    executable = loaded(chain(), SimulatedDevice())
    executable.plan = replace(executable.plan, max_rows=2)
    assert_runs(executable, chain(), feed(2))
    with pytest.raises(FeedError, match="a batch of 3 is more than kernels on simulated reach: 2"):
        executable.run(3, [feed(3)])


def test_closing_ends_runs_and_frees_memory() -> None:
    device = SimulatedDevice()
    executable = loaded(chain(), device)
    executable.close()
    executable.close()
    with pytest.raises(SessionClosed):
        executable.run(1, [feed(1)])
    assert device.space.used == 0


def test_the_time_of_every_step_is_measured() -> None:
    executable = loaded(chain(), SimulatedDevice())
    times = StepTimes(executable.plan)
    executable.run(3, [feed(3)], [times])
    assert len(times.steps) == 5 and min(times.steps) > 0


def test_a_recorded_run_is_placed_on_the_hosts_clock() -> None:
    executable = loaded(chain(), SimulatedDevice())
    record: list[KernelRun] = []
    began = perf_counter_ns()
    run_recorded(executable, 3, [feed(3)], record.append)
    assert [run.label for run in record] == [step.label for step in executable.plan.steps]
    assert began <= record[0].began and record[-1].ended <= perf_counter_ns()
    assert all(run.ended == later.began for run, later in itertools.pairwise(record))


def test_a_simulated_device_is_strict() -> None:
    device = SimulatedDevice(nbytes=4096)
    address = device.allocate(256)
    assert address % 256 == 0 and np.isnan(device.space.view(address, 256).view(np.float32)).all()
    stream, stage = device.stream(), device.host_bytes(512)
    stream.copy_out(address_of(stage), address, 512)
    with pytest.raises(DeviceError, match=r"512 bytes at .* lie in no allocated block"):
        stream.synchronize()
    with pytest.raises(DeviceError, match="512 bytes"):  # a failed device refuses all further calls
        device.stream().synchronize()
