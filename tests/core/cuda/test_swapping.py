"""Models that exceed the memory of a device: values and weights swap with the host, as the plan says beforehand."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe import nn
from lathe.core.check.plans import check_plan
from lathe.core.compiler import device_memory, placement
from lathe.core.errors import PlanError, UnsupportedError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, State, Value
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.cuda.toolchain import is_interpreter_supported
from lathe.core.kernels.target import GpuTarget
from lathe.core.passes.pipeline import optimize
from lathe.core.plan.liveness import Affine
from lathe.core.plan.movables import MemoryLimit
from lathe.core.plan.plan import ARENA, Address, Plan, PlannedGraph, StepRange, weight_chunks
from lathe.core.plan.planner import make_plan
from lathe.core.plan.serialize import plan_from_json, plan_to_json
from lathe.core.plan.swap_choice import MemoryTooSmall
from lathe.core.plan.transfers import Rates, elapsed, forecast, transfers_at
from lathe.core.runtime.artifact.memory_needs import memory_needs
from lathe.core.runtime.device import devices, simulated
from lathe.core.runtime.device.device_executable import DeviceExecutable
from lathe.core.runtime.device.simulated import Schedule, SimulatedDevice
from lathe.core.runtime.host import host_copies, plan_memory
from lathe.core.runtime.host.machine import Peaks
from lathe.core.runtime.host.plan_memory import memory_of_plan
from lathe.core.train import step
from lathe.core.train.training_step import losses, optimizers
from loadtest import zoo
from tests.core.check.cases import optimized
from tests.core.random_nets import Net

N = symbol("n")
ROWS = 4  # the batch size that plans are made for
GPU = GpuTarget(device="simulated")
SCHEDULES = ("late", "early", "random")
KINDS = ["simulated", *(["interpreted"] if is_interpreter_supported() else [])]  # the second one with `make test-cuda`


@pytest.fixture(autouse=True)
def _fresh_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_devices", {})


def dense_layers(count: int, width: int) -> Graph:
    """Products, almost all of whose memory is weights."""
    graph, rng = Graph("dense"), np.random.default_rng(0)
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (N, width)))
    for index in range(count):
        weight = b.constant((rng.standard_normal((width, width)) / width**0.5).astype(np.float32))
        x = b("Relu", b("MatMul", x, weight, name=f"layer{index}"))
    graph.outputs = [x]
    return graph


def hourglass(depth: int, width: int) -> Graph:
    """Values that are all needed again in reverse order, as in a U-Net or a backward pass; no weights."""
    graph = Graph("hourglass")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (N, width)))
    kept = []
    for index in range(depth):
        x = b("Tanh" if index % 2 else "Sin", x, name=f"down{index}")
        kept.append(x)
    for index, value in enumerate(reversed(kept[:-1])):
        x = b("Mul", b("Cos", x), value, name=f"up{index}")
    graph.outputs = [b("ReduceSum", x, axes=(1,), keepdims=1)]
    return graph


def inputs(graph: Graph, n: int) -> list[np.ndarray[Any, Any]]:
    rng, types = np.random.default_rng(n), [value.tensor for value in graph.inputs]
    return [
        rng.integers(-5, 5, type_.evaluate({"n": n})).astype(type_.dtype.numpy)
        if type_.dtype is DType.INT64
        else rng.uniform(-1, 1, type_.evaluate({"n": n})).astype(type_.dtype.numpy)
        for type_ in types
    ]


def needs(planned: PlannedGraph, rows: int = ROWS) -> int:
    room = memory_of_plan(planned.plan, rows)
    return room.weights + room.arena


def loaded(planned: PlannedGraph, device: SimulatedDevice, rows: int = ROWS) -> DeviceExecutable:
    objects = {symbol: device.code(spec) for symbol, spec in planned.specs.items()}
    return DeviceExecutable(planned.plan, device, objects, weight_chunks(planned), rows)


def assert_swaps_right(
    graph: Graph, share: float, schedule: Schedule, sizes: tuple[int, ...] = (1, 4, 4, 0, 4, 9, 4)
) -> Plan:
    """Plan and run a graph in a share of the memory that it needs, and count the copies of every run.

    The results are bit for bit those without swapping, and those of the interpreter up to rounding. Repeated sizes run
    as captured graphs.
    """
    free = make_plan(graph, GPU)
    limit = int(needs(free) * share)
    planned = make_plan(graph, GPU, limit=MemoryLimit(limit, ROWS))
    assert needs(planned) <= limit and not planned.plan.fallbacks.nodes
    device = SimulatedDevice(schedule=schedule, seed=3)
    with_room, executable = loaded(free, SimulatedDevice()), loaded(planned, device)
    assert device.space.used == memory_of_plan(planned.plan, ROWS).total
    for n in sizes:
        given = inputs(graph, n)
        before = [(way.copies, way.nbytes) for way in (device.inward, device.outward)]
        results, expected = executable.run(n, given), with_room.run(n, given)
        by_name = dict(zip((value.name for value in graph.inputs), given, strict=True))
        for got, want, reference in zip(results, expected, lathe.interpret(graph, by_name).values(), strict=True):
            assert np.array_equal(got, want, equal_nan=True)
            np.testing.assert_allclose(got, reference, 1e-3, 1e-3)
        layout = executable._slots[-1].layout(n)
        told = forecast(planned.plan, n, Rates())
        ways = (device.inward, told.copies_in, told.bytes_in, layout.into), (
            device.outward, told.copies_out, told.bytes_out, layout.back,
        )  # fmt: skip
        for (copies, nbytes), (way, count, swapped, staged) in zip(before, ways, strict=True):
            assert way.copies - copies == count + len(staged)
            assert way.nbytes - nbytes == swapped + sum(each.nbytes for each in staged)
        assert executable.settle(120)
    assert device.replays > 0
    executable.close()
    assert device.space.used == 0
    return planned.plan


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_of_twice_the_memory_are_streamed(schedule: Schedule) -> None:
    plan = assert_swaps_right(dense_layers(8, 64), 0.5, schedule)
    assert plan.streamed and all(each.into for each in plan.transfers)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_of_twice_the_memory_leave_and_come_back(schedule: Schedule) -> None:
    plan = assert_swaps_right(hourglass(12, 256), 0.5, schedule)
    assert not plan.streamed and plan.swap.at(ROWS) > 0
    assert {each.into for each in plan.transfers} == {True, False}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name", ["resnet", "unet", "transformer", pytest.param("densenet", marks=pytest.mark.slow), "decoder"]
)
def test_models_of_the_zoo_run_in_half_of_their_memory(name: str) -> None:
    plan = assert_swaps_right(optimized(lathe.load(zoo.model(name).SerializeToString())), 0.5, "random", (4, 4, 1, 4))
    assert plan.transfers


@pytest.mark.sample(6)
@pytest.mark.parametrize("seeds", [range(first, first + 10) for first in range(0, 60, 10)], ids=str)
def test_random_graphs_run_in_any_memory_or_say_what_they_need(seeds: range) -> None:
    """If a plan is refused, the least that it names is enough, up to the gaps of the allocator."""
    for seed in seeds:
        choices = random.Random(seed)
        graph = optimized(Net(choices.randrange).grow(steps=4 + seed % 16))
        share, schedule = choices.uniform(0.2, 0.95), SCHEDULES[seed % 3]
        planned = make_plan(graph, GPU)
        if planned.plan.fallbacks.nodes or not needs(planned):
            continue
        least = least_of(graph, int(needs(planned) * share))
        if least is not None:
            assert least > int(needs(planned) * share)
            share = min(least * 1.1 / needs(planned), 1.0)
        assert_swaps_right(graph, share, schedule, (4, 4, 1, 0, 4))


def least_of(graph: Graph, limit: int) -> int | None:
    """The bytes that a plan needs at least, if it is refused for lack of memory; None if it is not."""
    try:
        make_plan(graph, GPU, limit=MemoryLimit(limit, ROWS))
    except MemoryTooSmall as error:
        return error.least
    return None


def tangle(seed: int) -> Graph:
    """A random graph of equally large values, with far reads, windows, and weights that several products share."""
    choices, rng = random.Random(seed), np.random.default_rng(seed)
    graph = Graph(f"tangle{seed}")
    b = Builder(graph)
    width = choices.choice((16, 32))
    values = [b.input("x", TensorType(DType.FLOAT32, (N, width)))]
    shape = (width, width)
    weights = [b.constant((rng.standard_normal(shape) / width**0.5).astype(np.float32)) for _ in range(4)]

    def any_value() -> Value:
        return values[-1] if choices.random() < 0.5 else choices.choice(values)

    for _ in range(choices.randrange(8, 40)):
        kind = choices.randrange(5)
        if kind == 0:
            values.append(b(choices.choice(("Sin", "Tanh", "Abs")), any_value()))
        elif kind == 1:
            values.append(b("Tanh", b(choices.choice(("Add", "Mul")), any_value(), any_value())))
        elif kind == 2:
            weight = b.constant((rng.standard_normal(shape) / width**0.5).astype(np.float32))
            values.append(b("MatMul", any_value(), weight))
        elif kind == 3:
            values.append(b("Tanh", b("MatMul", any_value(), choices.choice(weights))))
        else:
            both = b("Concat", b("Sin", any_value()), b("Cos", any_value()), axis=1)
            values.append(b("Slice", both, starts=(width // 2,), ends=(width // 2 + width,), axes=(1,)))
    graph.outputs = [values[-1], choices.choice(values[1:])]
    if graph.outputs[0] is graph.outputs[1]:
        del graph.outputs[1]
    graph.remove_dead()
    return graph


@pytest.mark.sample(6)
@pytest.mark.parametrize("seeds", [range(first, first + 4) for first in range(0, 24, 4)], ids=str)
def test_random_tangles_run_in_little_memory(seeds: range) -> None:
    moved = 0
    for seed in seeds:
        graph, choices = tangle(seed), random.Random(seed)
        whole = needs(make_plan(graph, GPU))
        least = least_of(graph, 1) or whole
        lowest = least * 1.1 / whole
        share = min(choices.uniform(lowest, max(lowest, 0.9)), 1.0)
        moved += len(assert_swaps_right(graph, share, SCHEDULES[seed % 3], (4, 4, 1, 0, 4)).transfers)
    assert moved > 5


def limited(graph: Graph, share: float) -> PlannedGraph:
    return make_plan(graph, GPU, limit=MemoryLimit(int(needs(make_plan(graph, GPU)) * share), ROWS))


# -- the forecast -----------------------------------------------------------------------------------------------------


def test_copies_are_hidden_behind_steps_where_they_can_be() -> None:
    """Three steps of a second. Copies of one direction follow one another, beside the steps and the other direction."""
    steps = (1.0, 1.0, 1.0)
    assert elapsed(steps, [], []) == 3
    assert elapsed(steps, [(1, 1)], [(True, 0.5)]) == 3.5  # between two steps
    assert elapsed(steps, [(0, 1)], [(True, 0.75)]) == 3  # beside the first step
    assert elapsed(steps, [(0, 1), (0, 2)], [(True, 0.75), (True, 0.75)]) == 3
    assert elapsed(steps, [(0, 1), (0, 1)], [(True, 0.75), (True, 0.75)]) == 3.5  # the second step waits for both
    assert elapsed(steps, [(0, 1), (0, 1)], [(True, 0.75), (False, 0.75)]) == 3
    assert elapsed(steps, [(2, 3)], [(False, 1.25)]) == 3.25  # the run ends after it


def test_explain_tells_copies_and_time_beforehand() -> None:
    graph = dense_layers(8, 64)
    with lathe.compile(graph, device="simulated", device_memory={"simulated:0": 65_000}, max_batch=ROWS) as session:
        lines = session.explain(ROWS).splitlines()
    (line,) = (line for line in lines if "swapping (n = 4)" in line)
    told = re.search(
        r"(\d+) copies in \(([\d.]+) KiB\), 0 copies out .* at 20 GB/s the steps take ([\d.]+) us with them", line
    )
    assert told is not None
    count, kibibytes, microseconds = int(told[1]), float(told[2]), float(told[3])
    assert kibibytes == 16 * count  # each copy is a matrix of 64 x 64
    assert microseconds >= kibibytes * 1024 / 20e9 * 1e6
    moves = [line for line in lines if re.match(r"\s+in  %c(_\d)?: 16 KiB, (before|from) ", line)]
    assert len(moves) == count


def test_a_faster_plan_is_preferred_if_copies_can_be_hidden() -> None:
    """With slow steps all copies are hidden: the forecast is that without copies, and most copies begin early."""
    graph = dense_layers(8, 64)
    slow = Rates(flops=1e8, bandwidth=1e8)
    plan = make_plan(graph, GPU, limit=MemoryLimit(80_000, ROWS, slow)).plan
    told = forecast(plan, ROWS, slow)
    assert told.copies_in > 0 and told.whole < 1.02 * told.steps
    assert any(each.begin < each.end for each in plan.transfers)


def test_a_weight_is_copied_only_for_batches_whose_kernel_reads_it() -> None:
    plan = limited(dense_layers(6, 64), 0.5).plan
    into = plan.transfers[0]
    step = plan.steps[into.end]
    (place,) = (at for at, operand in enumerate(step.operands) if operand == Address(ARENA, into.arena))
    others = tuple(at for at in range(len(step.operands)) if at != place)
    every = tuple(range(len(step.operands)))
    ranges = tuple(
        StepRange(first, step.symbol, "", step.grid, operands) for first, operands in ((0, every), (3, others))
    )
    changed = replace(plan, steps=(*plan.steps[: into.end], replace(step, ranges=ranges), *plan.steps[into.end + 1 :]))
    assert [into in transfers_at(changed, n) for n in (1, 2, 3, 9)] == [True, True, False, False]
    assert transfers_at(plan, 9) == list(plan.transfers)


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_step_that_does_not_fit_alone_is_refused_with_sizes() -> None:
    message = r"node 'layer\d': FusedMatMul needs 18 KiB for its operands in batches of 4, .*; there is room for 17"
    with pytest.raises(MemoryTooSmall, match=message) as caught:
        make_plan(optimize(dense_layers(3, 64))[0], GPU, limit=MemoryLimit(17_500, ROWS))
    assert caught.value.least == 64 * 64 * 4 + 2 * ROWS * 64 * 4


def test_a_plan_that_fits_has_no_transfers() -> None:
    graph = dense_layers(3, 64)
    free = make_plan(graph, GPU)
    limited_plan = make_plan(graph, GPU, limit=MemoryLimit(needs(free), ROWS)).plan
    assert plan_to_json(limited_plan) == plan_to_json(free.plan)


def test_the_same_graph_gets_the_same_plan() -> None:
    made = [plan_to_json(limited(hourglass(9, 64), 0.6).plan) for _ in range(2)]
    assert made[0] == made[1] and made[0]["transfers"]
    assert plan_to_json(plan_from_json(made[0], Graph())) == made[0]


# -- the checker ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [dense_layers(6, 64), hourglass(9, 64)], ids=lambda graph: graph.name)
def test_the_checker_finds_wrong_transfers(graph: Graph) -> None:
    """Each transfer is left out, made too late, or moved to another place; the plan itself passes."""
    planned = limited(graph, 0.6)
    check_plan(graph, planned, GPU)
    plan, last = planned.plan, len(planned.plan.steps)
    for index, each in enumerate(plan.transfers):
        others = plan.transfers[:index], plan.transfers[index + 1 :]
        wrong = [
            (),
            (replace(each, begin=last, end=last),),
            (replace(each, arena=each.arena + Affine(b=64)),),
            (replace(each, host=replace(each.host, offset=each.host.offset + Affine(b=64))),),
        ]
        for changed in wrong:
            broken = replace(plan, transfers=(*others[0], *changed, *others[1]))
            with pytest.raises(PlanError):
                check_plan(graph, replace(planned, plan=broken), GPU)


def test_the_checker_finds_bytes_that_are_used_while_they_are_copied() -> None:
    planned = limited(hourglass(9, 64), 0.6)
    plan = planned.plan
    index, each = next((i, each) for i, each in enumerate(plan.transfers) if each.into and each.begin)
    broken = replace(plan, transfers=(*plan.transfers[:index], replace(each, begin=0), *plan.transfers[index + 1 :]))
    with pytest.raises(PlanError):
        check_plan(hourglass(9, 64), replace(planned, plan=broken), GPU)


def test_a_missing_wait_for_a_transfer_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device does work as late as it may."""
    graph = dense_layers(8, 64)
    planned = make_plan(graph, GPU, limit=MemoryLimit(80_000, ROWS, Rates(flops=1e8, bandwidth=1e8)))
    executable = loaded(planned, SimulatedDevice())
    (x,) = given = inputs(graph, ROWS)
    monkeypatch.setattr(simulated._Stream, "wait", lambda stream, event: None)
    assert not np.array_equal(executable.run(ROWS, given)[0], lathe.interpret(graph, {"x": x})[graph.outputs[0].name])


# -- compiled models --------------------------------------------------------------------------------------------------


def assert_agrees(session: Any, graph: Graph, sizes: tuple[int, ...] = (1, 4, 4, 0, 4, 7)) -> None:
    for n in sizes:
        given = {value.name: array for value, array in zip(graph.inputs, inputs(graph, n), strict=True)}
        for name, want in lathe.interpret(graph, given).items():
            np.testing.assert_allclose(session.run(given)[name], want, 1e-4, 1e-5)
        assert session.settle(120)


def taken(name: str) -> int:
    memory = devices.open_device(name).memory()
    return memory.total - memory.free


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graph", [dense_layers(8, 64), hourglass(9, 64)], ids=lambda graph: graph.name)
def test_a_model_of_twice_the_memory_stays_on_its_device(graph: Graph, kind: str) -> None:
    """Not optimized, as the hourglass would become one node."""
    with lathe.compile(graph, device=kind, max_batch=ROWS, optimize=False) as session:
        whole = taken(f"{kind}:0")
        assert_agrees(session, graph, (4,))
    limits = {kind: whole // 2}
    with lathe.compile(graph, device=kind, device_memory=limits, max_batch=ROWS, optimize=False) as session:
        assert 0 < taken(f"{kind}:0") <= whole // 2
        assert_agrees(session, graph)
        assert f"1 parts on {kind}:0" in session.explain() and "swapping (" in session.explain()


def test_the_devices_own_memory_is_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices._devices, "simulated:0", SimulatedDevice("simulated:0", nbytes=70_000))
    graph = dense_layers(8, 64)
    with lathe.compile(graph, device="simulated", max_batch=ROWS) as session:
        assert_agrees(session, graph, (1, 4, 4, 0, 4))
        assert "copies in" in session.explain()


def test_the_next_device_is_filled_before_the_last_one_swaps() -> None:
    graph, names = dense_layers(10, 64), ["simulated:0", "simulated:1"]
    limits = dict.fromkeys(names, 60_000)
    with lathe.compile(graph, device=names, device_memory=limits, max_batch=ROWS) as session:
        assert all(0 < taken(name) <= 60_000 for name in names)
        assert_agrees(session, graph)
        first, second = session.explain().split("part 1 on simulated:1")
    assert "swapping" not in first and "swapping" in second


def test_parts_of_one_device_share_its_memory() -> None:
    """Nodes on the CPU between them cut the model into parts; each gets a share of the memory, and swaps."""
    graph, rng = Graph("parts"), np.random.default_rng(0)
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (N, 32)))
    for index in range(3):
        for _ in range(3 + index):
            x = b("MatMul", x, b.constant((rng.standard_normal((32, 32)) / 6).astype(np.float32)))
        x = b("Tanh", x, name=f"host{index}")
    graph.outputs = [x]
    pins = {"host0": "cpu", "host1": "cpu"}
    for room in (40_000, 30_000):
        limits = {"simulated:0": room}
        with lathe.compile(
            graph, device="simulated", device_memory=limits, max_batch=ROWS, placement=pins, optimize=False
        ) as session:
            assert 0 < taken("simulated:0") <= room
            assert_agrees(session, graph)
            assert session.explain().count("swapping (") >= 2


def test_what_cannot_fit_runs_on_the_processor_and_explain_says_why() -> None:
    graph = dense_layers(3, 64)
    limits = {"simulated:0": 18_000}
    with lathe.compile(graph, device="simulated", device_memory=limits, max_batch=ROWS) as session:
        assert_agrees(session, graph)
        text = session.explain()
    assert "1 parts on cpu" in text
    assert "3 nodes are on cpu for lack of memory: simulated:0 has 18000 bytes, layer0 alone needs 18432" in text
    with lathe.compile(graph, device="simulated", device_memory={"simulated:0": 21_000}, max_batch=ROWS) as session:
        assert_agrees(session, graph)
        assert "no swapping on simulated:0: node 'layer1': FusedMatMul needs 18 KiB" in session.explain()
    with pytest.raises(UnsupportedError, match=r"node 'layer1'.*: simulated:0 has no room for it in 18000 bytes"):
        lathe.compile(
            graph, device="simulated", device_memory=limits, max_batch=ROWS, placement={"layer1": "simulated"}
        )


def test_placement_by_cost_takes_the_faster_of_swapping_and_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a fast CPU the copies of weights lose, against a slow one they win; the graph and the device stay."""
    graph, limits = dense_layers(8, 256), {"simulated:0": 2_500_000}
    monkeypatch.setattr(placement, "peaks", lambda: Peaks(1e8, 1e8))  # all nodes are worth copies of their inputs

    def explained() -> str:
        with lathe.compile(
            graph, device="simulated", device_memory=limits, max_batch=256, placement="cost", threads=1, tune="off"
        ) as session:
            assert_agrees(session, graph, (4,))
            return session.explain(256)

    def told(text: str) -> tuple[float, float]:
        found = re.search(r"forecast ([\d.]+) us with swapping, ([\d.]+) us with nodes on cpu instead", text)
        assert found is not None
        return float(found[1]), float(found[2])

    monkeypatch.setattr(device_memory, "host_peaks", lambda: Peaks(1e13, 1e12))
    text = explained()
    swapping, without = told(text)
    assert swapping > without and "swapping (" not in text and "parts on simulated:0, cpu" in text
    monkeypatch.setattr(device_memory, "host_peaks", lambda: Peaks(1e9, 1e9))
    text = explained()
    swapping, without = told(text)
    assert swapping < without and "swapping (" in text and "1 parts on simulated:0" in text


def test_states_stay_right_when_their_model_swaps() -> None:
    graph = hourglass(10, 64)
    b = Builder(graph)
    total = Value("total", TensorType(DType.FLOAT32, (1,)))
    grown = b("Add", total, b("ReduceSum", graph.outputs[0], axes=(0, 1), keepdims=0, name="sum"))
    graph.states = [State(total, b("Reshape", grown, shape=(1,)), np.zeros(1, np.float32))]
    graph.outputs.append(b("Neg", total))
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    with lathe.compile(graph, device="simulated", max_batch=ROWS) as session:
        whole = taken("simulated:0")
        expected = [session.run({"x": x}) for _ in range(3)]
    limits = {"simulated:0": whole * 3 // 4}
    with lathe.compile(graph, device="simulated", max_batch=ROWS, device_memory=limits) as session:
        assert "swapping" in session.explain()
        for want in expected:
            for name, got in session.run({"x": x}).items():
                np.testing.assert_allclose(got, want[name], 1e-5)


def test_an_artifact_swaps_and_tells_the_host_memory_that_it_needs(tmp_path: Path) -> None:
    graph = dense_layers(8, 64)
    file, made = tmp_path / "dense.onnx", tmp_path / "cache"
    file.write_bytes(lathe.export(graph))
    for _ in range(2):  # compiled, then loaded from the cache
        with lathe.compile(
            file, device="simulated", device_memory={"simulated:0": 65_000}, max_batch=ROWS, cache_dir=made, tune="off"
        ) as session:
            assert_agrees(session, graph)
            plan = next(iter(session._shapes.cached_runners()[()].shares)).plan
    (stored,) = made.rglob("*.lathe")
    assert memory_needs(stored).weights == plan.streamed > 0


def test_a_profile_of_a_model_that_swaps_times_every_step() -> None:
    graph = dense_layers(8, 64)
    with lathe.compile(graph, device="simulated", device_memory={"simulated:0": 65_000}, max_batch=ROWS) as session:
        profile = session.profile({"x": inputs(graph, ROWS)[0]}, runs=2)
        assert len(profile.nodes) == 8
        assert_agrees(session, graph, (4,))


def test_a_training_step_swaps_if_its_device_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are bit for bit those of a device with room for all; values of the forward pass leave and come back."""

    def train(nbytes: int) -> tuple[list[float], int]:
        device = SimulatedDevice("simulated:0", nbytes=nbytes)
        monkeypatch.setitem(devices._devices, "simulated:0", device)
        with nn.seeded(3):
            model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
        graph = nn.trace(model, {"x": "float32[n,64]"})
        learner = step(graph, losses.MeanSquaredError(), optimizers.SGD(0.1), device="simulated")
        rng = np.random.default_rng(0)
        batches = [rng.standard_normal((2, 32, 64)).astype(np.float32) for _ in range(4)]
        found = [float(learner.run({"x": x, "target": target})["loss"]) for x, target in batches]
        learner.close()
        return found, device.outward.copies

    (room, few), (tight, many) = train(1 << 30), train(190_000)
    assert room == tight and many >= few + 4  # at least one value leaves in each run


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("graph", [dense_layers(6, 64), hourglass(9, 64)], ids=lambda graph: graph.name)
def test_concurrent_runs_share_the_memory_through_which_they_swap(graph: Graph, schedule: Schedule) -> None:
    """Runs in flight at the same time use one arena and one swap memory, by launches and by captured graphs."""
    device = SimulatedDevice(schedule=schedule, seed=11)
    executable = loaded(limited(graph, 0.6), device)

    def work(index: int) -> None:
        for turn in range(8):
            n = 1 + (index + turn) % 4
            x = np.random.default_rng((index, turn)).uniform(-1, 1, (n, 64)).astype(np.float32)
            (want,) = lathe.interpret(graph, {"x": x}).values()
            np.testing.assert_allclose(executable.run(n, [x])[0], want, 1e-4, 1e-5)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert executable.settle(120)
    assert device.replays > 0
    executable.close()
    assert device.space.used == 0


def test_large_inputs_travel_in_pieces_beside_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_memory, "LARGE", 1)
    monkeypatch.setattr(host_copies, "_PIECE", 16)
    monkeypatch.setattr(host_copies, "_PAGE", 16)
    graph = hourglass(9, 64)
    executable = loaded(limited(graph, 0.6), SimulatedDevice(schedule="random", seed=5))
    for n in (4, 1, 4, 0, 4):
        (x,) = given = inputs(graph, n)
        (want,) = lathe.interpret(graph, {"x": x}).values()
        np.testing.assert_allclose(executable.run(n, given)[0], want, 1e-4, 1e-5)
        assert executable.settle(120)


def test_two_devices_that_swap_run_several_requests_at_once() -> None:
    graph, names = dense_layers(10, 64), ["simulated:0", "simulated:1"]
    pins = {f"layer{index}": names[index // 5] for index in range(10)}
    limits = dict.fromkeys(names, 60_000)
    with lathe.compile(
        graph, device=names, device_memory=limits, max_batch=ROWS, placement=pins, optimize=False
    ) as session:
        assert session.explain().count("swapping (") == 2

        def work(index: int) -> None:
            for turn in range(6):
                x = np.random.default_rng((index, turn)).uniform(-1, 1, (1 + turn % 4, 64)).astype(np.float32)
                (want,) = lathe.interpret(graph, {"x": x}).values()
                np.testing.assert_allclose(next(iter(session.run({"x": x}).values())), want, 1e-4, 1e-5)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert all(0 < taken(name) <= 60_000 for name in names)
