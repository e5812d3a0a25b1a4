"""Algebraic simplification. Each rule is exact, or rounds once more or once less than the original.

A rule that changes rounding is not applied where a discontinuous operator may read its result
(core/passes/rewrite/discontinuities.py). No rule assumes that numbers are finite: x*0 and x-x stay. Most rules bring
nodes into canonical form (division by a constant is multiplication, views are Reshape), so that later passes need to
match fewer forms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ops.opdef import registry
from lathe.core.ops.tensor.creation import ConstantOfShape
from lathe.core.passes.rewrite.base import (
    PassResult,
    can_reshape_to,
    have_same_type,
    is_elementwise,
    is_shape_only_declared,
    is_view_node,
    reshape_attrs,
    shape_of,
    view_source,
)
from lathe.core.passes.rewrite.discontinuities import unless_discontinuous
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.pattern import Match, Rewrite, Rule, apply, const, is_constant, op, var

_FIRST = -(1 << 62)  # the `ends` of a backward slice that includes the first element


@dataclass(frozen=True)
class Simplify:
    """Applies the rules and rewrites of this module.

    `inside`: the graph is the body of a node, and unknown nodes of the outer graph read its outputs.
    """

    inside: bool = False
    name: str = "simplify"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        apply(editor, [*EXACT, *(unless_discontinuous(rule, self.inside) for rule in ROUNDING)])
        for node in editor.nodes():
            _view_as_reshape(editor, node)
            _fill_as_expand(editor, node)
            _read_before_expand(editor, node)
            _gather_before_expand(editor, node)
            _gather_from_part(editor, node)
            _unflatten(editor, node)
            _top_of_one(editor, node)
            _reverse_whole(editor, node)
        return editor.finish()


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f" and array.size > 0


def _is_invertible(array: Array) -> bool:
    """Whether `array` is a float constant whose elements, and their reciprocals, are far from overflow and denormals.

    Division by the constant is then multiplication by its reciprocal, up to one rounding.
    """
    if not _is_float(array):
        return False
    limits = np.finfo(array.dtype)
    magnitude = np.abs(array)
    return bool(np.all((magnitude >= 4 * limits.tiny) & (magnitude <= limits.max / 4)))


def _is_moderate(array: Array) -> bool:
    """Whether the magnitudes of a float constant lie in [1e-4, 1e4]: the order of multiplications hardly matters."""
    return _is_float(array) and bool(np.all((np.abs(array) >= 1e-4) & (np.abs(array) <= 1e4)))


def _is_one(array: Array) -> bool:
    return _is_float(array) and is_constant(1)(array)


def _is_power(array: Array) -> bool:
    """Whether all elements of a float constant are plus or minus powers of two: multiplication by them is exact."""
    return _is_float(array) and bool(np.all(np.abs(np.frexp(array)[0]) == 0.5))


def _as(operator: str) -> Rewrite:
    """A rewrite of a match to `operator(x)`, with the variable "x" of the pattern."""
    return lambda e, m: e.emit(m.root, operator, m["x"])


def _keep(name: str) -> Rewrite:
    """A rewrite of a match to the value of its variable `name`, if the value has the type of the output."""
    return lambda e, m: m[name] if _can_keep(e, m, name) else None


def _can_keep(e: Editor, m: Match, name: str) -> bool:
    output = m.root.output
    return m[name].type == output.type and (output not in e.graph.outputs or e.renamable(m[name]))


def _times_inverse(e: Editor, m: Match) -> Value:
    array = e.graph.constants[m["c"]]
    return e.emit(m.root, "Mul", m["x"], e.constant((1.0 / array.astype(np.float64)).astype(array.dtype)))


def _plus_negative(e: Editor, m: Match) -> Value:
    return e.emit(m.root, "Add", m["x"], e.constant(np.negative(e.graph.constants[m["c"]])))


def _merge_factors(e: Editor, m: Match) -> Value | None:
    """`x` times the product of both factors; None if the product is out of range, as 1e4 * 1e4 is in float16."""
    c, d = e.graph.constants[m["c"]], e.graph.constants[m["d"]]
    if np.broadcast_shapes(c.shape, d.shape) not in (c.shape, d.shape):
        return None  # the merged constant would be larger than both factors
    with np.errstate(over="ignore", under="ignore"):
        factor = c * d
    return e.emit(m.root, "Mul", m["x"], e.constant(factor)) if _is_invertible(factor) else None


def _square(e: Editor, m: Match) -> Value | None:
    return e.emit(m.root, "Mul", m["x"], m["x"]) if have_same_type(m["x"], m.root.output) else None


def _relu(e: Editor, m: Match) -> Value | None:
    return e.emit(m.root, "Relu", m["x"]) if have_same_type(m["x"], m.root.output) else None


_X = var("x")

ROUNDING: list[Rule] = [
    Rule("x/c -> x*(1/c)", op("Div", _X, const("c", _is_invertible)), _times_inverse),
    Rule(
        "(x*c)*d -> x*(c*d)",
        op("Mul", op("Mul", _X, const("c", _is_moderate)), const("d", _is_moderate)),
        _merge_factors,
    ),
    Rule(
        "x*(1/y) -> x/y",
        op("Mul", _X, op("Reciprocal", var("y"))),
        lambda e, m: e.emit(m.root, "Div", m["x"], m["y"]),
    ),
]
EXACT: list[Rule] = [
    Rule("x/2^k -> x*2^-k", op("Div", _X, const("c", lambda a: _is_invertible(a) and _is_power(a))), _times_inverse),
    Rule("x-c -> x+(-c)", op("Sub", _X, const("c", _is_float)), _plus_negative),
    Rule("1/x", op("Div", const("", lambda a: a.shape == () and _is_one(a)), _X), _as("Reciprocal")),
    Rule("x^2 -> x*x", op("Pow", _X, const("", is_constant(2))), _square),
    Rule("-(-x)", op("Neg", op("Neg", _X)), _keep("x")),
    Rule("not not x", op("Not", op("Not", _X)), _keep("x")),
    Rule("relu(relu(x))", op("Relu", op("Relu", _X)), _as("Relu")),
    Rule("max(x, 0) -> relu", op("Max", _X, const("", is_constant(0))), _relu),
]


def _view_as_reshape(editor: Editor, node: Node) -> None:
    """Rewrites a chain of Flatten, Squeeze, Unsqueeze and Reshape as one Reshape to the full shape (no 0 or -1)."""
    if not is_view_node(node) or node.inputs[0] is None:
        return
    source, target = view_source(node.inputs[0]), shape_of(node.output)
    if (
        target is None
        or is_shape_only_declared(editor.graph, node)
        or (node.attrs.get("shape") == target and source is node.inputs[0])
    ):
        return
    if can_reshape_to(editor.graph, target):
        editor.replace(node.output, editor.emit(node, "Reshape", source, attrs=reshape_attrs(target)))


def _read_before_expand(editor: Editor, node: Node) -> None:
    """Makes an elementwise node read the inputs of Expands, as it broadcasts by itself.

    If the operands alone do not broadcast to the output's shape, the node computes fewer elements, and a new Expand
    follows it, which the next node can skip in turn.
    """
    shape = shape_of(node.output)
    if not is_elementwise(node) or shape is None:
        return
    whole = registry.get(node.op).shaped_by  # the input that sets the output's shape must keep its Expand
    inputs = [value if i == whole else _before_expand(editor, value) for i, value in enumerate(node.inputs)]
    shapes = [shape_of(value) for value in inputs if value is not None]
    if inputs == node.inputs:
        return
    if shape in shapes:
        editor.set_inputs(node, inputs)
    elif None not in shapes and len(node.outputs) == 1 and can_reshape_to(editor.graph, shape):
        small = editor.emit(node, node.op, *inputs, attrs=node.attrs)
        editor.replace(node.output, editor.emit(node, "Expand", small, attrs={"shape": shape}))


def _fill_as_expand(editor: Editor, node: Node) -> None:
    """Rewrites ConstantOfShape as an Expand of a number, which other rules simplify."""
    op = registry.get(node.op)
    if not isinstance(op, ConstantOfShape) or "shape" not in node.attrs:
        return
    shape = node.output.shape
    if can_reshape_to(editor.graph, shape):
        number = editor.constant(op.fill(registry.NodeView(op, node)).reshape(()))
        editor.replace(node.output, editor.emit(node, "Expand", number, attrs={"shape": shape}))


def _gather_before_expand(editor: Editor, node: Node) -> None:
    """Moves a Gather before an Expand of its indices: rows are gathered once, and then repeated."""
    data, indices, shape = shape_of(node.input(0)), node.input(1), shape_of(node.output)
    if node.op != "Gather" or data is None or indices is None or shape is None:
        return
    source, axis = _before_expand(editor, indices), node.attrs.get("axis", 0)
    source_shape = shape_of(source)
    if source is indices or source_shape is None or not can_reshape_to(editor.graph, shape):
        return
    if axis == 0 or len(source_shape) == len(shape_of(indices) or ()):
        rows = editor.emit(node, "Gather", node.inputs[0], source, attrs=node.attrs)
        editor.replace(node.output, editor.emit(node, "Expand", rows, attrs={"shape": shape}))


def _gather_from_part(editor: Editor, node: Node) -> None:
    """Makes a Gather along the axis of a Concat read the one operand in which all its constant indices lie."""
    joined = node.inputs[0].producer if node.op == "Gather" and node.inputs[0] is not None else None
    indices, shape = editor.array(node.input(1)), shape_of(node.input(0))
    axis = node.attrs.get("axis", 0)
    if joined is None or joined.op != "Concat" or indices is None or shape is None or not isinstance(axis, int):
        return
    axis, total, start = axis % len(shape), shape[axis % len(shape)], 0
    if joined.attrs.get("axis") not in (axis, axis - len(shape)) or not isinstance(total, int) or not indices.size:
        return
    positive = np.where(indices < 0, indices + total, indices)
    for part in joined.inputs:
        extent = (shape_of(part) or (None,) * len(shape))[axis]
        if not isinstance(extent, int):
            return
        if start <= positive.min() and positive.max() < start + extent:
            inner = editor.constant((positive - start).astype(indices.dtype))
            editor.replace(node.output, editor.emit(node, "Gather", part, inner, attrs=node.attrs))
            return
        start += extent


def _top_of_one(editor: Editor, node: Node) -> None:
    """Replaces TopK along an axis of extent 1 with its input, and its indices with zeros.

    Exporters sort sequences by length, often of one row.
    """
    x, axis = node.input(0), node.attrs.get("axis", -1)
    shape = shape_of(x)
    if node.op != "TopK" or x is None or not shape or not isinstance(axis, int) or shape[axis] != 1:
        return
    if shape_of(node.outputs[0]) != shape or not can_reshape_to(editor.graph, shape):
        return
    for index in node.outputs[1:]:
        zero = editor.constant(np.zeros((), np.int64))
        editor.replace(index, editor.emit(node, "Expand", zero, attrs={"shape": shape}))
    editor.replace(node.outputs[0], x)


def _reverse_whole(editor: Editor, node: Node) -> None:
    """Rewrites a ReverseSequence of sequences that all have full length, a known number, as a Slice with step -1."""
    shape, axis = shape_of(node.input(0)), node.attrs.get("time_axis", 0)
    if node.op != "ReverseSequence" or not shape or not isinstance(axis, int):
        return
    lengths = editor.array(_before_expand(editor, node.inputs[1]))
    if lengths is not None and isinstance(shape[axis], int) and bool(np.all(lengths == shape[axis])):
        attrs = {"starts": (-1,), "ends": (_FIRST,), "axes": (axis,), "steps": (-1,)}
        editor.replace(node.output, editor.emit(node, "Slice", node.inputs[0], attrs=attrs))


def _before_expand(editor: Editor, value: Value | None) -> Value | None:
    """The input of the Expand that computes a value; the value itself if no Expand does."""
    producer = value.producer if value is not None else None
    expands = producer is not None and producer.op == "Expand" and not is_shape_only_declared(editor.graph, producer)
    return producer.inputs[0] if producer is not None and expands else value


def _unflatten(editor: Editor, node: Node) -> None:
    """Removes the flattening of leading axes around a product:

    reshape(gemm(reshape(x, [-1, k]), w, b), [.., n]) = reshape(x, [.., k]) @ w + b.
    """
    reader, folded = editor.only_reader(node.output), _flattened_rows(node)
    if folded is None or folded.producer is None or reader is None or reader.op != "Reshape":
        return
    shape, weight, bias = shape_of(reader.output), _plain_weight(editor, node), node.input(2)
    if weight is None or not shape or shape[-1] != node.output.shape[-1] or not can_reshape_to(editor.graph, shape):
        return
    extents = reshape_attrs((*shape[:-1], folded.shape[-1]))
    rows = editor.emit(reader, "Reshape", view_source(folded), attrs=extents)
    result = editor.emit(reader, "MatMul", rows, weight, name=node.name)
    if bias is not None:
        result = editor.emit(reader, "Add", result, bias, name=node.name)
    editor.replace(reader.output, result)


def _flattened_rows(node: Node) -> Value | None:
    """The first operand of a Gemm or MatMul, if it is a matrix that a view computes; otherwise None."""
    folded = node.inputs[0] if node.op in ("Gemm", "MatMul") else None
    if folded is None or not is_view_node(folded.producer) or node.attrs.get("transA", 0):
        return None
    return folded if len(shape_of(folded) or ()) == 2 else None


def _plain_weight(editor: Editor, node: Node) -> Value | None:
    """The matrix by which a Gemm or MatMul multiplies, if besides the node at most adds a row; otherwise None.

    With `transB` the matrix must be constant: the result is a new constant, transposed.
    """
    weight, bias = node.inputs[1], shape_of(node.input(2))
    if any(node.attrs.get(name, 1.0) != 1.0 for name in ("alpha", "beta")) or len(shape_of(weight) or ()) != 2:
        return None
    if bias is not None and len(bias) == 2 and bias[0] != 1:
        return None
    array = editor.array(weight)
    if not node.attrs.get("transB", 0):
        return weight
    return editor.constant(array.T, weight.name) if array is not None and weight is not None else None
