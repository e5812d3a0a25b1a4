"""Removes nodes that return an input unchanged, dead nodes, and empty operands of Concat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.operator_table import OperatorTable
from lathe.core.ops.opdef import registry
from lathe.core.ops.tensor.slicing import is_whole_slice
from lathe.core.passes.rewrite.base import PassResult, have_same_type, is_shape_only_declared, shape_of
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.pattern import is_constant

NoOp = Callable[[Editor, Node], Value | None]
# Each returns the input that a node of these operators returns unchanged, or None.
_NO_OPS = OperatorTable[NoOp]()


@dataclass(frozen=True)
class Eliminate:
    name: str = "eliminate"

    def run(self, graph: Graph) -> PassResult:
        before = len(graph.nodes)
        graph.remove_dead()
        dead = before - len(graph.nodes)
        editor = Editor(graph)
        for node in editor.nodes():
            source = _NO_OPS[node.op](editor, node) if node.op in _NO_OPS else None
            if source is not None and _can_replace(editor, node, source):
                editor.replace(node.output, source)
        result = editor.finish()
        return PassResult(result.changed + dead, result.notes)


def _can_replace(editor: Editor, node: Node, source: Value) -> bool:
    """Whether `source` can replace the first output of a node: equal types, and no other output is in use.

    If the output is an output of the graph, the source must be able to take its name. False if only the node checks a
    declared shape (`is_shape_only_declared`).
    """
    unused = all(not editor.readers(v) and not editor.is_output(v) for v in node.outputs[1:])
    nameable = node.output not in editor.graph.outputs or editor.renamable(source)
    return (
        unused and nameable and have_same_type(node.output, source) and not is_shape_only_declared(editor.graph, node)
    )


@_NO_OPS.add(
    "Identity", "StopGradient", "RoundableRows", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand"
)
def _same_type(editor: Editor, node: Node) -> Value | None:
    """The first input of a node whose operator does nothing if types are equal; the caller compares the types."""
    return node.inputs[0]


@_NO_OPS.add("Dropout")
def _dropout(editor: Editor, node: Node) -> Value | None:
    """The input, if the mode is a constant and not training; otherwise None."""
    training = node.input(2)
    if training is not None:
        mode = editor.array(training)
        return node.inputs[0] if mode is not None and not mode.any() else None
    return node.inputs[0] if not any(_flat(node.attrs.get("training_mode"))) else None


@_NO_OPS.add("Transpose")
def _transpose(editor: Editor, node: Node) -> Value | None:
    perm = node.attrs.get("perm")
    return node.inputs[0] if isinstance(perm, tuple) and list(perm) == sorted(perm) else None  # type: ignore[type-var]


@_NO_OPS.add("Add", "Or", "BitwiseOr", "BitwiseXor")
def _zero(editor: Editor, node: Node) -> Value | None:
    return _unless(editor, node, is_constant(0), commutes=True)


@_NO_OPS.add("Sub", "BitShift")
def _minus_zero(editor: Editor, node: Node) -> Value | None:
    return _unless(editor, node, is_constant(0), commutes=False)


@_NO_OPS.add("Mul", "And")
def _one(editor: Editor, node: Node) -> Value | None:
    return _unless(editor, node, is_constant(1), commutes=True)


@_NO_OPS.add("Div", "Pow")
def _by_one(editor: Editor, node: Node) -> Value | None:
    return _unless(editor, node, is_constant(1), commutes=False)


@_NO_OPS.add("Sum", "Max", "Min", "Mean")
def _single(editor: Editor, node: Node) -> Value | None:
    return node.inputs[0] if len(node.inputs) == 1 else None


@_NO_OPS.add("Concat")
def _concat(editor: Editor, node: Node) -> Value | None:
    """Drops operands of extent 0 along the axis from a Concat; returns the one that is left, or None for several."""
    _drop_empty_operands(editor, node)
    return node.inputs[0] if len(node.inputs) == 1 else None


def _drop_empty_operands(editor: Editor, concat: Node) -> None:
    nonempty = [value for value in concat.inputs if not _is_empty_operand(concat, value)]
    if 0 < len(nonempty) < len(concat.inputs):
        editor.set_inputs(concat, nonempty)


@_NO_OPS.add("Split")
def _split(editor: Editor, node: Node) -> Value | None:
    """The input of a Split whose first part is the whole, as in a RotaryEmbedding over the full width; otherwise None.

    The empty other parts are dropped from Concats that read them.
    """
    whole = node.inputs[0]
    if whole is None or not have_same_type(node.outputs[0], whole):
        return None
    for reader in [reader for part in node.outputs[1:] for reader in editor.readers(part) if reader.op == "Concat"]:
        _drop_empty_operands(editor, reader)
    return whole


def _is_empty_operand(node: Node, value: Value | None) -> bool:
    """Whether an operand of Concat has extent 0 along the axis, and provably the result's extents along all others."""
    shape, joined, axis = shape_of(value), shape_of(node.output), node.attrs.get("axis")
    if shape is None or joined is None or not isinstance(axis, int):
        return False
    at = axis % len(joined)
    return shape[at] == 0 and (*shape[:at], *shape[at + 1 :]) == (*joined[:at], *joined[at + 1 :])


@_NO_OPS.add("Clip")
def _no_bounds(editor: Editor, node: Node) -> Value | None:
    bounded = len(node.inputs) > 1 or any(node.attrs.get(bound) is not None for bound in ("min", "max"))
    return None if bounded else node.inputs[0]


@_NO_OPS.add("Slice")
def _slice_all(editor: Editor, node: Node) -> Value | None:
    """The input of a Slice that takes every axis whole; otherwise None.

    An equal type is no proof: the type may assume that no end is clamped.
    """
    return node.inputs[0] if is_whole_slice(registry.Infer(registry.get(node.op), node, {})) else None


@_NO_OPS.add("Pad")
def _pad_nothing(editor: Editor, node: Node) -> Value | None:
    pads = node.attrs.get("pads")
    return node.inputs[0] if pads is not None and not any(_flat(pads)) else None


@_NO_OPS.add("Tile")
def _tile_once(editor: Editor, node: Node) -> Value | None:
    repeats = node.attrs.get("repeats")
    return node.inputs[0] if repeats is not None and all(r == 1 for r in _flat(repeats)) else None


@_NO_OPS.add("Where")
def _where_constant(editor: Editor, node: Node) -> Value | None:
    condition = editor.array(node.inputs[0])
    if condition is None or condition.size == 0:
        return None
    if condition.all():
        return node.inputs[1]
    return None if condition.any() else node.inputs[2]


def _unless(editor: Editor, node: Node, neutral: Callable[[Array], bool], commutes: bool) -> Value | None:
    """The operand beside a neutral constant, which must be the second one unless the operator `commutes`; or None."""
    x, y = node.inputs
    if _is(editor, y, neutral):
        return x
    return y if commutes and _is(editor, x, neutral) else None


def _is(editor: Editor, value: Value | None, test: Callable[[Array], bool]) -> bool:
    array = editor.array(value)
    return array is not None and test(array)


def _flat(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return tuple(np.ravel(value).tolist()) if not isinstance(value, tuple) else value
