"""Moves views that join batch axes after matrix products and elementwise nodes, until they meet views that split them.

Exporters write attention with `torch.bmm`: they join heads and batch for each of the two products, and split them again
for the mask and the softmax in between. After this pass the two views meet and cancel.
"""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import Dim
from lathe.core.passes.rewrite.base import (
    PassResult,
    can_reshape_to,
    is_elementwise,
    is_view_node,
    reshape_attrs,
    shape_of,
    view_source,
)
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import perm_of

Shape = tuple[Dim, ...]


@dataclass(frozen=True)
class BatchAxes:
    name: str = "batch_axes"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        moved: set[Value] = set()  # the outputs of the joining views that this pass emitted
        for node in editor.nodes():
            new = _move_behind_product(editor, node) if node.op == "MatMul" else _move_behind(editor, node, moved)
            if new is not None:
                moved.add(new)
        return editor.finish()


def _move_behind_product(editor: Editor, node: Node) -> Value | None:
    """Rewrites join(a) @ join(b) as join(a @ b), where join merges the batch axes of a tensor to one.

    The matrices of an operand may be transposed after the join. Returns the new joined output; None for other nodes.
    """
    factors = [_before_join(editor, value) for value in node.inputs]
    a, b = (shape_of(value) or () for value in factors)
    if len(a) < 4 or a[:-2] != b[:-2]:
        return None
    return _replace_with_join(editor, node, editor.emit(node, "MatMul", *factors))


def _before_join(editor: Editor, value: Value | None) -> Value | None:
    """The value before a view that joins its batch axes to one; None if `value` comes from no such view.

    If the matrices are transposed after the view, a new Transpose of the value is returned.
    """
    node = value.producer if value is not None else None
    if node is not None and node.op == "Transpose" and perm_of(node) == (0, 2, 1):
        source = _before_join(editor, node.inputs[0])
        rank = len(shape_of(source) or ())
        perm = (*range(rank - 2), rank - 1, rank - 2)
        return editor.emit(node, "Transpose", source, attrs={"perm": perm}) if source is not None else None
    source = value
    while source is not None and is_view_node(source.producer) and source.producer is not None:
        source = source.producer.inputs[0]
        if source is not None and value is not None and _joins(source, value):
            return source
    return None


def _joins(source: Value, value: Value) -> bool:
    """Whether a value is its source with all axes but the last two joined into one."""
    before, after = shape_of(source) or (), shape_of(value) or ()
    return len(before) > len(after) == 3 and before[-2:] == after[-2:] and product(before[:-2]) == after[0]


def _move_behind(editor: Editor, node: Node, moved: set[Value]) -> Value | None:
    """Moves a join behind an elementwise node or a softmax of the last axis that reads it; returns the new join.

    `moved`: the joins that this pass made; only these are moved. None if nothing was moved. A Reshape of a joined value
    becomes a Reshape of the value before the join.
    """
    value = next((value for value in node.inputs if value in moved), None)
    if value is None or value.producer is None or len(node.outputs) != 1:
        return None
    source, target = value.producer.inputs[0], shape_of(node.output)
    if source is None or target is None:
        return None
    if node.op == "Reshape" and node.attrs.get("shape") == target:
        editor.replace(node.output, editor.reshaped(node, view_source(source), target))
        return None
    attrs = dict(node.attrs)
    if node.op in ("Softmax", "GuardedSoftmax") and attrs.get("axis", -1) in (-1, 2):
        attrs["axis"] = -1
    elif not is_elementwise(node) or target != shape_of(value):
        return None
    inputs = [_split(editor, node, each, target[0], source.shape[:-2]) for each in node.inputs]
    if any(new is None and old is not None for new, old in zip(inputs, node.inputs, strict=True)):
        return None
    return _replace_with_join(editor, node, editor.emit(node, node.op, *inputs, attrs=attrs))


def _split(editor: Editor, anchor: Node, value: Value | None, joined: Dim, batch: Shape) -> Value | None:
    """A value reshaped so that it broadcasts to tensors with the batch axes `batch` in place of the leading axis.

    `joined` is the extent of that axis. A value of fewer than three axes stays as it is. None for an absent value, and
    if a Reshape cannot express the shape.
    """
    shape = shape_of(value)
    if value is None or shape is None or len(shape) < 3:
        return value if shape is not None else None
    if len(shape) > 3 or shape[0] not in (1, joined):
        return None
    split = (*(batch if shape[0] == joined else (1,) * len(batch)), *shape[1:])
    return editor.reshaped(anchor, view_source(value), split) if can_reshape_to(editor.graph, split) else None


def _replace_with_join(editor: Editor, node: Node, inner: Value) -> Value:
    """Replaces the output of a node with a view of `inner` that joins the batch axes; returns the view."""
    new = editor.emit(node, "Reshape", inner, attrs=reshape_attrs(node.output.shape))
    editor.replace(node.output, new)
    return new
