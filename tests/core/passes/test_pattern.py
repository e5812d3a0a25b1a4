"""The pattern matcher and the graph editor."""

from __future__ import annotations

import pytest

from lathe.core.ir.graph import Graph, Node
from lathe.core.ir.text import parse_graph
from lathe.core.ir.verify import verify
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.pattern import (
    Match,
    Op,
    Rule,
    any_order,
    apply,
    const,
    is_constant,
    match,
    op,
    scalar,
    var,
)


def parsed(body: str) -> Graph:
    return parse_graph("graph @g {" + body + "\n}")


def node_of(graph: Graph, name: str) -> Node:
    return next(node for node in graph.nodes if node.output.name == name)


def matched(pattern: Op, graph: Graph, root: str = "y") -> Match | None:
    return match(pattern, node_of(graph, root), Editor(graph))


SILU = """
    input %x : float32[4]
    %s : float32[4] = Sigmoid(%x)
    %y : float32[4] = Mul(%s, %x)
    output %y"""


def test_commutative_operators_match_in_either_order() -> None:
    graph = parsed(SILU)
    for inputs in ((var("x"), op("Sigmoid", var("x"))), (op("Sigmoid", var("x")), var("x"))):
        found = matched(op("Mul", *inputs), graph)
        assert found is not None
        assert found["x"] is graph.inputs[0]


def test_one_name_means_one_value() -> None:
    graph = parsed(SILU.replace("Mul(%s, %x)", "Mul(%s, %s)"))
    assert matched(op("Mul", var("x"), op("Sigmoid", var("x"))), graph) is None
    assert matched(op("Mul", var("a"), var("b")), graph) is not None


def test_other_operators_match_in_order_only() -> None:
    graph = parsed(SILU.replace("Mul", "Sub"))
    assert matched(op("Sub", var("x"), op("Sigmoid", var("x"))), graph) is None


def test_inner_values_must_not_be_read_outside() -> None:
    graph = parsed(SILU.replace("output %y", "output %y, %s"))
    assert matched(op("Mul", var("x"), op("Sigmoid", var("x"))), graph) is None


def test_backtracking_finds_the_second_match() -> None:
    graph = parsed(
        """
        input %x : float32[4]
        %e : float32[4] = Exp(%x)
        %n : float32[4] = Neg(%x)
        %p : float32[4] = Mul(%e, %n)
        %y : float32[4] = Mul(%p, %x)
        output %y"""
    )
    patterns = any_order("Mul", var("x"), op("Neg", var("x")), op("Exp", var("x")))
    assert [matched(pattern, graph) is not None for pattern in patterns] == [False, False, True]


def test_predicates_test_constants_and_named_nodes_are_returned() -> None:
    graph = parsed(
        """
        input %x : float32[2]
        const %half : float32[1] = [0.5]
        const %two : float32[2] = [2.0, 2.0]
        %m : float32[2] = Mul(%x, %half)
        %y : float32[2] = LeakyRelu(%m) {alpha = 0.25}
        output %y"""
    )
    inner = op("Mul", var("x"), scalar(0.5), name="scale")
    found = matched(op("LeakyRelu|Elu", inner, test=lambda node: node.attrs["alpha"] == 0.25), graph)
    assert found is not None
    assert found.node("scale") is node_of(graph, "m")
    assert matched(op("LeakyRelu", inner, test=lambda node: node.attrs["alpha"] == 0.5), graph) is None
    assert matched(op("LeakyRelu", op("Mul", var("x"), const("c", is_constant(2)))), graph) is None


def test_rules_apply_until_nothing_matches() -> None:
    graph = parsed(
        """
        input %x : float32[4]
        %a : float32[4] = Neg(%x)
        %b : float32[4] = Neg(%a)
        %c : float32[4] = Neg(%b)
        %y : float32[4] = Neg(%c)
        output %y"""
    )
    editor = Editor(graph)
    apply(editor, [Rule("double", op("Neg", op("Neg", var("x"))), lambda e, m: e.emit(m.root, "Identity", m["x"]))])
    result = editor.finish()
    assert [node.op for node in graph.nodes] == ["Identity", "Identity"]
    assert (result.changed, result.notes) == (2, ("double: 2",))


def test_replacing_an_output_keeps_its_name_and_drops_dead_nodes() -> None:
    graph = parsed(SILU)
    editor, root = Editor(graph), node_of(graph, "y")
    editor.replace(root.output, editor.emit(root, "Swish", graph.inputs[0]))
    assert editor.finish().changed == 1
    verify(graph)
    assert [(node.op, node.output.name) for node in graph.nodes] == [("Swish", "y")]


def test_an_output_replaced_by_an_input_becomes_an_identity() -> None:
    graph = parsed(SILU)
    editor = Editor(graph)
    editor.replace(graph.outputs[0], graph.inputs[0])
    editor.finish()
    verify(graph)
    assert [(node.op, node.output.name) for node in graph.nodes] == [("Identity", "y")]
    assert [value.name for value in graph.outputs] == ["y"]


def test_readers_follow_edits() -> None:
    graph = parsed(SILU)
    editor, s, y = Editor(graph), node_of(graph, "s"), node_of(graph, "y")
    assert editor.only_reader(s.output) is y
    assert editor.only_reader(graph.inputs[0]) is None  # Sigmoid and Mul
    assert editor.only_reader(y.output) is None  # an output
    editor.set_inputs(y, [graph.inputs[0], graph.inputs[0]])
    assert editor.readers(graph.inputs[0]) == [y]
    assert editor.readers(s.output) == []


@pytest.mark.parametrize(("value", "fits"), [(0.5, True), (0.5000001, True), (0.501, False), (float("nan"), False)])
def test_scalars_match_within_a_tolerance(value: float, fits: bool) -> None:
    graph = parsed(f"""
        input %x : float32[2]
        const %c : float32[] = [{value!r}]
        %y : float32[2] = Mul(%x, %c)
        output %y""")
    assert (matched(op("Mul", var("x"), scalar(0.5)), graph) is not None) == fits
