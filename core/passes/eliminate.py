"""Nodes that give back their input, or that nothing needs, disappear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.ir.graph import Array, Graph, Node, Value
from core.ops import registry
from core.ops.slicing import takes_all
from core.passes.base import PassResult, is_only_declared, same_type, shape_of
from core.passes.edit import Editor
from core.passes.pattern import is_constant

NoOp = Callable[[Editor, Node], Value | None]
_NO_OPS: dict[str, NoOp] = {}


@dataclass(frozen=True)
class Eliminate:
    name: str = "eliminate"

    def run(self, graph: Graph) -> PassResult:
        before = len(graph.nodes)
        graph.remove_dead()
        dead = before - len(graph.nodes)
        editor = Editor(graph)
        for node in editor.nodes():
            kept = _NO_OPS[node.op](editor, node) if node.op in _NO_OPS else None
            if kept is not None and _replaceable(editor, node, kept):
                editor.replace(node.output, kept)
        result = editor.finish()
        return PassResult(result.changed + dead, result.notes)


def _replaceable(editor: Editor, node: Node, kept: Value) -> bool:
    """The type stays, and an output of the model that is an input as well keeps a node of its own."""
    unused = all(not editor.readers(v) and not editor.is_output(v) for v in node.outputs[1:])
    nameable = node.output not in editor.graph.outputs or editor.renamable(kept)
    return unused and nameable and same_type(node.output, kept) and not is_only_declared(editor.graph, node)


def _no_op(*ops: str) -> Callable[[NoOp], NoOp]:
    """Register a function that answers which input a node passes on unchanged, or None."""

    def add(function: NoOp) -> NoOp:
        _NO_OPS.update(dict.fromkeys(ops, function))
        return function

    return add


@_no_op("Identity", "StopGradient", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand")
def _same_type(editor: Editor, node: Node) -> Value | None:
    """These do nothing when the type stays, which the caller checks."""
    return node.inputs[0]


@_no_op("Dropout")
def _dropout(editor: Editor, node: Node) -> Value | None:
    """Outside training it passes its input on; a mode that is not known may be training."""
    training = node.input(2)
    if training is not None:
        mode = editor.array(training)
        return node.inputs[0] if mode is not None and not mode.any() else None
    return node.inputs[0] if not any(_flat(node.attrs.get("training_mode"))) else None


@_no_op("Transpose")
def _transpose(editor: Editor, node: Node) -> Value | None:
    perm = node.attrs.get("perm")
    return node.inputs[0] if isinstance(perm, tuple) and list(perm) == sorted(perm) else None  # type: ignore[type-var]


@_no_op("Add", "Or", "BitwiseOr", "BitwiseXor")
def _zero(editor: Editor, node: Node) -> Value | None:
    return _unless(editor, node, is_constant(0), commutes=True)


@_no_op("Sub", "BitShift")
def _minus_zero(editor: Editor, node: Node) -> Value | None:
    return _unless(editor, node, is_constant(0), commutes=False)


@_no_op("Mul", "And")
def _one(editor: Editor, node: Node) -> Value | None:
    return _unless(editor, node, is_constant(1), commutes=True)


@_no_op("Div", "Pow")
def _by_one(editor: Editor, node: Node) -> Value | None:
    return _unless(editor, node, is_constant(1), commutes=False)


@_no_op("Sum", "Max", "Min", "Mean")
def _single(editor: Editor, node: Node) -> Value | None:
    return node.inputs[0] if len(node.inputs) == 1 else None


@_no_op("Concat")
def _joined(editor: Editor, node: Node) -> Value | None:
    """What has no elements along the axis, such as the keys kept before the first step, joins nothing."""
    _drop_what_adds_nothing(editor, node)
    return node.inputs[0] if len(node.inputs) == 1 else None


def _drop_what_adds_nothing(editor: Editor, concat: Node) -> None:
    full = [value for value in concat.inputs if not _adds_nothing(concat, value)]
    if 0 < len(full) < len(concat.inputs):
        editor.set_inputs(concat, full)


@_no_op("Split")
def _all_in_one_part(editor: Editor, node: Node) -> Value | None:
    """The first part is the whole, as of heads that RotaryEmbedding turns in their full width."""
    whole = node.inputs[0]
    if whole is None or not same_type(node.outputs[0], whole):
        return None
    for reader in [reader for part in node.outputs[1:] for reader in editor.readers(part) if reader.op == "Concat"]:
        _drop_what_adds_nothing(editor, reader)
    return whole


def _adds_nothing(node: Node, value: Value | None) -> bool:
    """Whether an operand surely has an extent of 0 along the axis of Concat, and the result's along all others."""
    shape, joined, axis = shape_of(value), shape_of(node.output), node.attrs.get("axis")
    if shape is None or joined is None or not isinstance(axis, int):
        return False
    at = axis % len(joined)
    return shape[at] == 0 and (*shape[:at], *shape[at + 1 :]) == (*joined[:at], *joined[at + 1 :])


@_no_op("Clip")
def _no_bounds(editor: Editor, node: Node) -> Value | None:
    given = len(node.inputs) > 1 or any(node.attrs.get(bound) is not None for bound in ("min", "max"))
    return None if given else node.inputs[0]


@_no_op("Slice")
def _slice_all(editor: Editor, node: Node) -> Value | None:
    """A slice of the same shape is the whole where it takes all of every axis. That its type is the same does not show
    it: the type may suppose that nothing is clamped."""
    return node.inputs[0] if takes_all(registry.Infer(registry.get(node.op), node, {})) else None


@_no_op("Pad")
def _pad_nothing(editor: Editor, node: Node) -> Value | None:
    pads = node.attrs.get("pads")
    return node.inputs[0] if pads is not None and not any(_flat(pads)) else None


@_no_op("Tile")
def _tile_once(editor: Editor, node: Node) -> Value | None:
    repeats = node.attrs.get("repeats")
    return node.inputs[0] if repeats is not None and all(r == 1 for r in _flat(repeats)) else None


@_no_op("Where")
def _where_constant(editor: Editor, node: Node) -> Value | None:
    condition = editor.array(node.inputs[0])
    if condition is None or condition.size == 0:
        return None
    if condition.all():
        return node.inputs[1]
    return None if condition.any() else node.inputs[2]


def _unless(editor: Editor, node: Node, neutral: Callable[[Array], bool], commutes: bool) -> Value | None:
    """The other operand when one is the operator's neutral element."""
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
