"""Plans for GPUs, and where nodes are placed: by kernels, pins, memory and cost; how graphs are cut."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest

import lathe
from lathe.core.codegen.target import host
from lathe.core.errors import UnsupportedError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, State, Value
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.ir.verify import verify
from lathe.core.kernels.target import GpuTarget
from lathe.core.plan.min_cut import min_cut
from lathe.core.plan.placement import DeviceSite, Placement, PlacementOptions, place_nodes
from lathe.core.plan.planner import make_plan
from lathe.core.plan.row_limit import max_rows
from lathe.core.plan.serialize import plan_from_json, plan_to_json
from lathe.core.runtime.device import simulated  # noqa: F401  (registers the simulated device's kernels)

N = symbol("n")
GPU = GpuTarget(device="simulated")
HOST = DeviceSite("cpu", host(), None, 1e11, 1e10)


def device(name: str, memory: int | None = None, flops: float = 1e13) -> DeviceSite:
    return DeviceSite(name, GPU, memory, flops, flops / 10)


def builder(*shape: object, name: str = "x") -> tuple[Builder, Graph, Value]:
    graph = Graph("g")
    b = Builder(graph)
    return b, graph, b.input(name, TensorType(DType.FLOAT32, shape))  # type: ignore[arg-type]


def layers(count: int, width: int = 32) -> Graph:
    """`count` products in sequence, each with a weight of `4 * width * width` bytes."""
    b, graph, x = builder(N, width)
    for index in range(count):
        x = b("MatMul", x, b.constant(np.ones((width, width), np.float32)), name=f"layer{index}")
    graph.outputs = [x]
    return graph


def devices_of(placement: Placement) -> list[tuple[str, list[str]]]:
    return [(part.device, [node.op for node in part.graph.nodes]) for part in placement.parts]


def run(placement: Placement, x: np.ndarray) -> dict[str, np.ndarray]:
    """All values after the reference has run the parts in order."""
    values = {"x": x}
    for part in placement.parts:
        values |= lathe.interpret(part.graph, {value.name: values[value.name] for value in part.graph.inputs})
    return values


# -- plans ------------------------------------------------------------------------------------------------------------


def test_steps_have_grids_and_share_memory_as_on_the_cpu() -> None:
    b, graph, x = builder(N, 512)
    for op in ("Exp", "Relu", "Tanh", "Relu"):
        x = b(op, x)
    graph.outputs = [b("Exp", x)]
    plan = make_plan(graph, GPU).plan
    assert plan.memory.peak == 2048 and len(plan.steps) == 5
    assert all(len(step.grid) == 1 and step.grid[0] != 0 for step in plan.steps)
    again = plan_from_json(json.loads(json.dumps(plan_to_json(plan))), plan.fallbacks)
    assert again.steps == plan.steps


@pytest.mark.parametrize(("width", "copies"), [(4, 0), (3, 2)])
def test_parts_of_a_tensor_are_windows_only_where_they_are_aligned(width: int, copies: int) -> None:
    """Kernels load 16 bytes at a time, so a part that begins elsewhere is copied."""
    b, graph, x = builder(N, 2 * width)
    left, right = b.emit("Split", b("Exp", x), outputs=2, axis=1, num_outputs=2)
    graph.outputs = [b("Relu", left), b("Tanh", right)]
    steps = make_plan(graph, GPU).plan.steps
    assert sum(step.op == "Split" for step in steps) == min(copies, 1)
    offsets = [operand.offset.b for step in steps for operand in step.operands]
    assert all(offset % 16 == 0 for offset in offsets)


def test_plans_state_the_largest_batch_of_their_kernels() -> None:
    """Indices have 31 bits, program numbers after the first axis 16."""
    b, graph, x = builder(N, 1 << 20)
    graph.outputs = [b("Exp", x)]
    assert make_plan(graph, GPU).plan.max_rows == (1 << 31) // (1 << 20) - 1
    assert make_plan(graph, host()).plan.max_rows is None
    assert max_rows([(N * 3 + 1, 10), ((N + 7) // 8, 65535)]) == 3
    assert max_rows([((N + 7) // 8, 65535)]) == 65535 * 8
    assert max_rows([(100, 10)]) == 0


# -- placing ----------------------------------------------------------------------------------------------------------


def test_nodes_without_a_kernel_run_on_the_host() -> None:
    b, graph, x = builder(N, 8)
    sums = b("CumProd", b("Exp", x), b.constant(np.array(1)), name="sums")
    graph.outputs = [b("Tanh", sums)]
    placement = place_nodes(graph, [device("gpu"), HOST])
    assert devices_of(placement) == [("gpu", ["Exp"]), ("cpu", ["CumProd"]), ("gpu", ["Tanh"])]
    crossings = [(c.source, c.target, c.sender, c.receiver, str(c.nbytes)) for c in placement.crossings]
    assert crossings == [("cpu", "gpu", None, 0, "32*n"), ("gpu", "cpu", 0, 1, "32*n"), ("cpu", "gpu", 1, 2, "32*n")]
    for part in placement.parts:
        verify(part.graph, part.device)
    x_feed = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    assert np.array_equal(run(placement, x_feed)["tanh"], lathe.interpret(graph, {"x": x_feed})["tanh"])


def test_the_device_changes_only_if_no_other_node_is_ready() -> None:
    """The host nodes of three branches form one part, so that their inputs are copied together."""
    b, graph, x = builder(N, 8)
    axis = b.constant(np.array(1))
    graph.outputs = [b("Tanh", b("CumProd", b(op, x), axis)) for op in ("Exp", "Relu", "Abs")]
    placement = place_nodes(graph, [device("gpu"), HOST])
    assert [part.device for part in placement.parts] == ["gpu", "cpu", "gpu"]


def test_views_are_placed_with_their_source() -> None:
    b, graph, x = builder(N, 8)
    graph.outputs = [b("Tanh", b("Reshape", b("Exp", b("Reshape", x, shape=(-1, 4, 2))), shape=(-1, 8)))]
    assert devices_of(place_nodes(graph, [device("gpu"), HOST])) == [("gpu", ["Reshape", "Exp", "Reshape", "Tanh"])]


def test_pins_win_and_must_be_possible() -> None:
    graph = layers(3)
    sites = [device("a"), device("b"), HOST]
    placement = place_nodes(graph, sites, PlacementOptions({"layer1": "b", "layer2": "cpu"}))
    assert [part.device for part in placement.parts] == ["a", "b", "cpu"]
    with pytest.raises(UnsupportedError, match="node 'nobody' is placed on 'a', expected a node among layer0"):
        place_nodes(graph, sites, PlacementOptions({"nobody": "a"}))
    with pytest.raises(UnsupportedError, match="expected one of a, b, cpu"):
        place_nodes(graph, sites, PlacementOptions({"layer0": "c"}))
    b, odd, x = builder(N, 8)
    odd.outputs = [b("CumProd", x, b.constant(np.array(1)), name="sums")]
    with pytest.raises(UnsupportedError, match="node 'sums': a has no kernel for CumProd"):
        place_nodes(odd, sites, PlacementOptions({"sums": "a"}))


def test_a_view_is_pinned_only_where_its_source_is() -> None:
    b, graph, x = builder(N, 8)
    flat = b("Reshape", b("Exp", x), shape=(-1, 4, 2), name="flat")
    graph.outputs = [b("Tanh", flat)]
    sites = [device("gpu"), HOST]
    placement = place_nodes(graph, sites, PlacementOptions({"flat": "gpu"}))
    assert devices_of(placement) == [("gpu", ["Exp", "Reshape", "Tanh"])]
    message = "node 'flat': Reshape is a view, which stays with its source on gpu, got the device cpu"
    with pytest.raises(UnsupportedError, match=message):
        place_nodes(graph, sites, PlacementOptions({"flat": "cpu"}))


def test_a_full_device_spills_to_the_next_and_the_last_to_the_host() -> None:
    graph = layers(5)  # 4096 bytes each
    sites = [device("a", 10_000), device("b", 9_000), HOST]
    placement = place_nodes(graph, sites)
    assert [(part.device, len(part.graph.nodes)) for part in placement.parts] == [("a", 2), ("b", 2), ("cpu", 1)]
    lack = "1 nodes are on cpu for lack of memory: a has 10000 bytes, b has 9000 bytes, layer4 alone needs 4352"
    assert placement.notes == ("2 nodes on a", "2 nodes on b", "1 nodes on cpu", lack)
    with pytest.raises(UnsupportedError, match="node 'layer4': a has no room for it in 10000 bytes"):
        place_nodes(graph, sites, PlacementOptions({"layer4": "a"}))


def test_small_work_stays_on_the_host_and_large_work_moves() -> None:
    sites = [device("gpu"), HOST]
    assert [part.device for part in place_nodes(layers(3, 8), sites, PlacementOptions(by_cost=True)).parts] == ["cpu"]
    large = place_nodes(layers(3, 512), sites, PlacementOptions(by_cost=True, rows=256))
    assert [part.device for part in large.parts] == ["gpu"]


def test_values_do_not_move_back_and_forth() -> None:
    """A node without a GPU kernel between large products: the cheap nodes next to it cause no further moves."""
    b, graph, x = builder(N, 256)
    weight = b.constant(np.ones((256, 256), np.float32))
    x = b("Relu", b("CumProd", b("Relu", b("MatMul", x, weight)), b.constant(np.array(1))))
    graph.outputs = [b("MatMul", b("Neg", x), weight)]
    wishes = PlacementOptions(by_cost=True, rows=4096)
    parts = place_nodes(graph, [device("gpu"), HOST], wishes).parts
    assert [part.device for part in parts] == ["gpu", "cpu", "gpu"]


def test_states_belong_to_the_only_part_that_updates_them() -> None:
    b, graph, x = builder(4)
    total, seen = (Value(name, TensorType(DType.FLOAT32, (4,))) for name in ("total", "seen"))
    grown = b("Add", total, x)
    sums = b("CumProd", grown, b.constant(np.array(0)))
    zero = np.zeros(4, np.float32)
    graph.states = [State(total, grown, zero), State(seen, b("Add", seen, sums, name="more"), zero)]
    graph.outputs = [b("Neg", total)]
    placement = place_nodes(graph, [device("gpu"), HOST])
    assert [[s.value.name for s in part.graph.states] for part in placement.parts] == [["total"], [], ["seen"]]
    assert placement.states == ()
    apart = place_nodes(graph, [device("gpu"), HOST], PlacementOptions({"more": "cpu", "neg": "cpu"}))
    assert [state.value.name for state in apart.states] == ["total"]


def test_unchanged_or_reset_states_stay_with_their_reader() -> None:
    b, graph, x = builder(4)
    held, total = (Value(name, TensorType(DType.FLOAT32, (4,))) for name in ("held", "total"))
    zero = np.zeros(4, np.float32)
    graph.states = [State(held, held, zero), State(total, b.constant(np.ones(4, np.float32), "ones"), zero)]
    both = b("Add", b("Mul", x, held), total)
    graph.outputs = [both]
    (part,) = place_nodes(graph, [device("gpu"), HOST]).parts
    assert [(s.value.name, s.update.name) for s in part.graph.states] == [("held", "held"), ("total", "ones")]
    b.graph.outputs = [both, b("CumProd", held, b.constant(np.array(0)))]
    apart = place_nodes(graph, [device("gpu"), HOST])
    assert [state.value.name for state in apart.states] == ["held"]


def test_the_minimum_cut_is_minimal() -> None:
    """Against all ways to cut small random graphs."""
    rng = random.Random(0)
    for _ in range(40):
        nodes = range(rng.randrange(1, 7))
        costs = {node: (rng.randrange(100) * 1e-6, rng.randrange(100) * 1e-6) for node in nodes}
        pairs = list(itertools.combinations(nodes, 2))
        edges = {pair: rng.randrange(60) * 1e-6 for pair in rng.sample(pairs, len(pairs) // 2)}

        def total(first: set[int], costs: dict = costs, edges: dict = edges) -> float:
            sides = sum(there if node in first else here for node, (there, here) in costs.items())
            return sides + sum(cost for (a, b), cost in edges.items() if (a in first) != (b in first))

        best = min(total(set(some)) for k in range(len(nodes) + 1) for some in itertools.combinations(nodes, k))
        assert total(min_cut(costs, edges)) == pytest.approx(best)
