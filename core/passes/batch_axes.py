"""Views that join the batch axes of two factors move behind their product, and on until others split the axes again.

So exporters write attention: heads become rows of the batch for each of its two products (`torch.bmm`), and are split
from them for the mask and the softmax in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.ir.dim import product
from core.ir.graph import Graph, Node, Value
from core.ir.types import Dim
from core.passes.base import (
    PassResult,
    expressible,
    is_elementwise,
    is_view_node,
    reshape_attrs,
    shape_of,
    view_origin,
)
from core.passes.edit import Editor
from core.passes.permutation import perm_of

Shape = tuple[Dim, ...]


@dataclass(frozen=True)
class BatchAxes:
    name: str = "batch_axes"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        moved: set[Value] = set()  # joined axes of what this pass has made
        for node in editor.nodes():
            new = _behind_product(editor, node) if node.op == "MatMul" else _behind(editor, node, moved)
            if new is not None:
                moved.add(new)
        return editor.finish()


def _behind_product(editor: Editor, node: Node) -> Value | None:
    """join(a) @ join(b) = join(a @ b), also where the matrices of one are transposed after the join."""
    factors = [_before_join(editor, value) for value in node.inputs]
    a, b = (shape_of(value) or () for value in factors)
    if len(a) < 4 or a[:-2] != b[:-2]:
        return None
    return _joined(editor, node, editor.emit(node, "MatMul", *factors))


def _before_join(editor: Editor, value: Value | None) -> Value | None:
    """What a view joins the batch axes of, with its matrices transposed where they are afterwards."""
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
    """Whether a value has all but the last two axes of its source as one."""
    before, after = shape_of(source) or (), shape_of(value) or ()
    return len(before) > len(after) == 3 and before[-2:] == after[-2:] and product(before[:-2]) == after[0]


def _behind(editor: Editor, node: Node, moved: set[Value]) -> Value | None:
    """An elementwise node or a softmax of the last axis does its work before the join. A view of what is joined is one
    of what is not."""
    value = next((value for value in node.inputs if value in moved), None)
    if value is None or value.producer is None or len(node.outputs) != 1:
        return None
    source, target = value.producer.inputs[0], shape_of(node.output)
    if source is None or target is None:
        return None
    if node.op == "Reshape" and node.attrs.get("shape") == target:
        editor.replace(node.output, editor.reshaped(node, view_origin(source), target))
        return None
    attrs = dict(node.attrs)
    if node.op in ("Softmax", "GuardedSoftmax") and attrs.get("axis", -1) in (-1, 2):
        attrs["axis"] = -1
    elif not is_elementwise(node) or target != shape_of(value):
        return None
    inputs = [_split(editor, node, each, target[0], source.shape[:-2]) for each in node.inputs]
    if any(new is None and old is not None for new, old in zip(inputs, node.inputs, strict=True)):
        return None
    return _joined(editor, node, editor.emit(node, node.op, *inputs, attrs=attrs))


def _split(editor: Editor, anchor: Node, value: Value | None, joined: Dim, batch: Shape) -> Value | None:
    """A value as it meets others whose batch axes are apart; None where that cannot be said."""
    shape = shape_of(value)
    if value is None or shape is None or len(shape) < 3:
        return value if shape is not None else None
    if len(shape) > 3 or shape[0] not in (1, joined):
        return None
    split = (*(batch if shape[0] == joined else (1,) * len(batch)), *shape[1:])
    return editor.reshaped(anchor, view_origin(value), split) if expressible(editor.graph, split) else None


def _joined(editor: Editor, node: Node, inner: Value) -> Value:
    new = editor.emit(node, "Reshape", inner, attrs=reshape_attrs(node.output.shape))
    editor.replace(node.output, new)
    return new
