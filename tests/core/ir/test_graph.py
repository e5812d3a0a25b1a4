"""Graphs: order, cycles, uses, dead code, clones."""

from __future__ import annotations

import numpy as np
import pytest

import lathe.core.ops  # noqa: F401 (builders infer types by it)
from lathe.core.errors import ModelError, VerifyError
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph, Node, Value, captures
from lathe.core.ir.types import DType, TensorType
from lathe.core.ir.verify import verify

N4 = TensorType(DType.FLOAT32, (symbol("n"), 4))


def chain() -> tuple[Graph, list[Value]]:
    """x -> Relu a -> Exp b -> Add(a, b) c."""
    graph = Graph("chain")
    build = Builder(graph)
    x = build.input("x", N4)
    a = build("Relu", x, name="a")
    b = build("Exp", a, name="b")
    c = build("Add", a, b, name="c")
    graph.outputs = [c]
    return graph, [x, a, b, c]


def test_builder_infers_types_and_keeps_names_unique() -> None:
    graph, (x, *_) = chain()
    again = Builder(graph)("Relu", x, name="a")
    assert again.name == "a_2"
    assert again.type == N4
    verify(graph)


def test_a_node_goes_before_its_anchor() -> None:
    graph, (_, a, _, _) = chain()
    Builder(graph, graph.nodes[1])("Neg", a)
    assert [node.op for node in graph.nodes] == ["Relu", "Neg", "Exp", "Add"]


def test_sort_restores_order_and_moves_nothing_without_need() -> None:
    graph, _ = chain()
    graph.nodes.reverse()
    with pytest.raises(VerifyError, match="before it is defined"):
        verify(graph)
    graph.sort()
    assert [node.op for node in graph.nodes] == ["Relu", "Exp", "Add"]
    verify(graph)


def test_a_cycle_is_an_error_that_names_a_node() -> None:
    graph, (_, _, _, c) = chain()
    graph.nodes[0].inputs[0] = c
    with pytest.raises(ValueError, match="cycle through node"):
        graph.sort()


def test_a_long_chain_needs_no_recursion() -> None:
    graph = Graph("long")
    value = Value("x", N4)
    graph.inputs = [value]
    for i in range(5000):
        node = Node("Relu", [value], [], {}, f"r{i}")
        value = Value(f"v{i}", N4, node)
        node.outputs = [value]
        graph.nodes.append(node)
    graph.outputs = [value]
    graph.nodes.reverse()
    graph.sort()
    assert graph.nodes[0].name == "r0"


def test_replace_uses_follows_chains_into_outputs_and_bodies() -> None:
    graph, (x, a, b, c) = chain()
    body = Graph("then", outputs=[a])
    node = Node("If", [x], [], {"then_branch": body}, "if")
    node.outputs = [Value("y", N4, node)]
    graph.nodes.append(node)
    graph.replace_uses({b: a, a: x, c: b})
    assert graph.outputs == [x]
    assert graph.nodes[2].inputs == [x, x]
    assert body.outputs == [x]
    assert captures(body) == [x]


def test_uses_count_a_capture_as_a_read_of_the_outer_node() -> None:
    graph, (_, a, b, _) = chain()
    node = Node("If", [b], [], {"then_branch": Graph("then", outputs=[a])}, "if")
    node.outputs = [Value("y", N4, node)]
    graph.nodes.append(node)
    assert [user.op for user in graph.uses()[a]] == ["Exp", "Add", "If"]


def test_dead_nodes_and_constants_go() -> None:
    graph, (x, *_) = chain()
    build = Builder(graph)
    build("Add", x, build.constant(np.ones(4, np.float32)))
    assert graph.remove_dead() == 1
    assert not graph.constants
    assert len(graph.nodes) == 3


def test_a_clone_is_apart_and_substitutes_symbols() -> None:
    graph, _ = chain()
    build = Builder(graph)
    reshaped = build("Reshape", graph.outputs[0], shape=(symbol("n") * 4,))
    graph.outputs = [reshaped]
    twin = graph.clone({"n": 3})
    verify(twin)
    assert [value.shape for value in (*twin.inputs, *twin.outputs)] == [(3, 4), (12,)]
    assert twin.nodes[-1].attrs["shape"] == (12,)
    assert not set(twin.values()) & set(graph.values())
    assert graph.inputs[0].shape == (symbol("n"), 4)


def test_constants_are_read_only() -> None:
    graph = Graph()
    array = np.zeros(3, np.float32)
    graph.add_constant(array)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def _twice_named(graph: Graph) -> None:
    graph.nodes[1].outputs[0].name = "a"


def _wrong_producer(graph: Graph) -> None:
    graph.nodes[1].outputs[0].producer = graph.nodes[0]


def _no_outputs(graph: Graph) -> None:
    graph.nodes[2].outputs = []
    graph.outputs = []


def _undefined_output(graph: Graph) -> None:
    graph.outputs = [Value("ghost", N4)]


def _wrong_constant(graph: Graph) -> None:
    graph.constants[Value("w", N4)] = np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_twice_named, "two values are named %a"),
        (_wrong_producer, "%b names a producer that is not its own"),
        (_no_outputs, r"node 'c' \(Add\): has no outputs"),
        (_undefined_output, "output %ghost is not defined"),
        (_wrong_constant, r"constant %w is declared float32\[n,4\], its array has shape \(2, 4\)"),
    ],
)
def test_verify_names_what_is_broken_and_after_which_stage(damage: object, message: str) -> None:
    graph, _ = chain()
    damage(graph)  # type: ignore[operator]
    with pytest.raises(VerifyError, match=message) as error:
        verify(graph, after="a pass")
    assert "(after a pass)" in str(error.value)


def test_an_ill_typed_node_is_refused_when_built() -> None:
    graph, (x, *_) = chain()
    build = Builder(graph)
    with pytest.raises(ModelError, match="do not broadcast"):
        build("Add", x, build.constant(np.zeros(3, np.float32)))
    assert len(graph.nodes) == 3


def test_an_absent_input_is_none_unless_it_is_required() -> None:
    x = Value("x", N4)
    node = Node("Clip", [x, None], [], name="limit")
    assert node.input(0) is node.required_input(0) is x
    assert node.input(1) is node.input(2) is None
    for index in (1, 2):
        with pytest.raises(ValueError, match=f"Clip 'limit' has no input {index}"):
            node.required_input(index)
