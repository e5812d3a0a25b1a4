"""Plans of small graphs: views cost nothing, in-place results share, outputs are written where they end up."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import lathe
from lathe.core.codegen.target import host
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import floor_div
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import Dim, DType, TensorType, symbol
from lathe.core.plan.liveness import Affine
from lathe.core.plan.plan import ARENA, Fallback, Plan, Segment, estimated_affine, weight_chunks
from lathe.core.plan.planner import make_plan
from lathe.core.plan.serialize import plan_from_json, plan_to_json

N = symbol("n")


def graph_of(shape: tuple[object, ...] = (N, 16)) -> tuple[Builder, Graph]:
    graph = Graph("g")
    builder = Builder(graph)
    builder.input("x", TensorType(DType.FLOAT32, shape))  # type: ignore[arg-type]
    return builder, graph


def plan_of(graph: Graph) -> Plan:
    return make_plan(graph, host()).plan


def test_a_chain_of_elementwise_nodes_runs_in_place() -> None:
    b, graph = graph_of()
    value = graph.inputs[0]
    for op in ("Exp", "Relu", "Tanh", "Relu"):
        value = b(op, value)
    graph.outputs = [b("Exp", value)]
    plan = plan_of(graph)
    assert plan.memory.peak == 64 and len(plan.steps) == 5
    assert {operand for step in plan.steps[1:-1] for operand in step.operands} == {plan.steps[1].operands[0]}


def test_the_last_node_writes_the_output_and_the_first_reads_the_input() -> None:
    b, graph = graph_of()
    graph.outputs = [b("Relu", b("Exp", graph.inputs[0]))]
    plan = plan_of(graph)
    assert plan.steps[0].operands[0].base == plan.inputs[0].base
    assert plan.steps[-1].operands[-1].base == plan.outputs[0].base
    assert plan.copies == ()


def test_a_reshape_is_a_view_even_of_an_output() -> None:
    b, graph = graph_of((N, 4, 4))
    graph.outputs = [b("Reshape", b("Relu", graph.inputs[0]), shape=(-1, 16))]
    plan = plan_of(graph)
    assert [step.op for step in plan.steps] == ["Relu"] and plan.copies == ()


def test_a_value_read_later_is_not_overwritten() -> None:
    b, graph = graph_of()
    kept = b("Exp", graph.inputs[0])
    other = b("Relu", kept)
    graph.outputs = [b("Add", b("Tanh", other), kept)]
    plan = plan_of(graph)
    first, second = plan.steps[0].operands[-1], plan.steps[1].operands[-1]
    assert first.base == second.base == ARENA and first != second


def test_an_input_returned_as_output_is_copied() -> None:
    _, graph = graph_of()
    graph.outputs = [graph.inputs[0]]
    assert plan_of(graph).copies == (("x", plan_of(graph).outputs[0].base),)


def test_nodes_without_a_kernel_fall_back_with_a_reason() -> None:
    b, graph = graph_of()
    odd = b("NonZero", b("Relu", graph.inputs[0]))
    graph.outputs = [odd]
    plan = plan_of(graph)
    assert [type(entry) for entry in plan.schedule] == [Segment, Fallback]
    assert "whose size only a run shows" in plan.schedule[1].reason  # type: ignore[union-attr]


def test_equal_constants_are_stored_once_and_aligned() -> None:
    b, graph = graph_of()
    w = b.constant(np.arange(16, dtype=np.float32), "w")
    graph.outputs = [b("Add", b("Mul", graph.inputs[0], w), w)]
    planned = make_plan(graph, host())
    assert planned.plan.weights == 64
    block = b"".join(weight_chunks(planned))
    assert np.frombuffer(block, np.float32).tolist() == list(range(16))


def test_large_weights_are_packed_when_they_are_written() -> None:
    """A plan knows the sizes of packed weights, but does not hold their data in a kernel's layout."""
    b, graph = graph_of((N, 64))
    weight = np.arange(64 * 100, dtype=np.float32).reshape(64, 100)
    graph.outputs = [b("MatMul", graph.inputs[0], b.constant(weight))]
    planned = make_plan(graph, host())
    (item,) = planned.weights
    assert item.data is not item.data and item.data.nbytes == item.nbytes == planned.plan.weights
    assert sorted(set(item.data.tolist()) - {0.0}) == weight.ravel().tolist()[1:]
    wrong = replace(planned, weights=(replace(item, nbytes=item.nbytes - 64),))
    with pytest.raises(ValueError, match=f"have {item.nbytes} bytes, expected {item.nbytes - 64}"):
        list(weight_chunks(wrong))


def test_many_kernels_that_differ_only_in_sizes_share_code() -> None:
    """Six products that differ only in depth share one kernel; three products have kernels for their own sizes."""
    for count, products in ((3, 3), (6, 1)):
        b, graph = graph_of((N, 64))
        parts, wide = [graph.inputs[0]], graph.inputs[0]
        for step in range(count):
            width = 64 + 8 * step
            y = b("Add", wide, b.constant(np.linspace(-1, 1, width, dtype=np.float32)))
            parts.append(b("MatMul", y, b.constant(np.cos(np.arange(width * 8, dtype=np.float32)).reshape(width, 8))))
            wide = b("Concat", *parts, axis=1)
        graph.outputs = [b("Neg", wide)]
        made = make_plan(graph, host())
        assert sum(spec.family == "gemm" for spec in made.specs.values()) == products
        assert sum(step.op == "MatMul" for step in made.plan.steps) == count
        x = np.random.default_rng(0).standard_normal((5, 64), np.float32)
        with lathe.compile(graph, threads=2, tune="off") as session:
            (y,) = session.run({graph.inputs[0].name: x}).values()
        (want,) = lathe.interpret(graph, {graph.inputs[0].name: x}).values()
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def test_plans_survive_json() -> None:
    b, graph = graph_of()
    graph.outputs = [b("NonZero", b("Relu", graph.inputs[0])), b("Exp", graph.inputs[0])]
    plan = plan_of(graph)
    again = plan_from_json(json.loads(json.dumps(plan_to_json(plan))), plan.fallbacks)
    assert again == plan


def test_inputs_of_fallbacks_are_listed_in_node_order() -> None:
    """So that a model compiled again makes the same bytes."""
    b, graph = graph_of()
    read = [b("Relu", b("Exp", graph.inputs[0])) for _ in range(8)]
    graph.outputs = [b("NonZero", value) for value in read]
    assert list(plan_of(graph).value_addresses) == [value.name for value in read]


def test_a_reshape_that_only_fits_some_batch_sizes_is_no_view() -> None:
    b, graph = graph_of((N, 12))
    graph.outputs = [b("Reshape", b("Relu", graph.inputs[0]), shape=(2, 6))]
    plan = plan_of(graph)
    assert [entry.op for entry in plan.schedule if isinstance(entry, Fallback)] == ["Reshape"]


def test_a_plan_has_cut_points_where_one_value_is_live() -> None:
    b, graph = graph_of((N, 64, 64))
    first = b("Softmax", graph.inputs[0], axis=1)
    second = b("Softmax", first, axis=1)
    total = b("Add", b("Softmax", second, axis=1), second)  # `second` is live beside the value that is added to it
    graph.outputs = [b("Softmax", b("Softmax", total, axis=1), axis=1)]
    plan = plan_of(graph)
    assert [step.op for step in plan.steps] == ["Softmax"] * 3 + ["Add"] + ["Softmax"] * 2
    assert [cut.step for cut in plan.cut_points] == [1, 2, 4, 5]
    for cut in plan.cut_points:
        written = plan.steps[cut.step - 1].operands
        assert any((operand.base, operand.offset) == (ARENA, cut.place) for operand in written)
        assert cut.row == 64 * 64 * 4 and cut.arena.at(1) <= plan.arena.at(1)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan))), Graph()).cut_points == plan.cut_points


def test_a_value_whose_rows_are_not_the_batch_is_no_cut_point() -> None:
    b, graph = graph_of((N, 4, 16))
    flat = b("Reshape", graph.inputs[0], b.constant(np.array([-1, 16])))
    graph.outputs = [b("Softmax", b("Softmax", flat, axis=0), axis=0)]
    assert plan_of(graph).cut_points == ()


@pytest.mark.parametrize(
    ("dim", "expected"),
    [
        (7, Affine(0, 7)),
        (2 * N + 3, Affine(2, 3)),
        (N * N + 4, Affine(0, 5)),
        (5 - N, Affine(0, 4)),
        (N * symbol("m"), Affine(0, 0)),
        (floor_div(12, N - 1), Affine(0, 0)),  # divides by zero for n = 1
    ],
)
def test_costs_without_affine_form_are_those_of_one_row(dim: Dim, expected: Affine) -> None:
    assert estimated_affine(dim) == expected
