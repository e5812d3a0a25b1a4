"""Merges transposes, moves them down through other nodes until they meet and cancel, or rewrites them as views."""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.ir.dim import symbols
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.passes.rewrite.base import (
    PassResult,
    input_symbols,
    is_elementwise,
    reshape_attrs,
    shape_of,
    view_source,
)
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import (
    Perm,
    common_factors,
    compose,
    inverse,
    is_view,
    perm_of,
    permute_constant,
    split_axes,
)

_ALONG_AXIS = frozenset({"Softmax", "GuardedSoftmax", "LogSoftmax", "Hardmax", "LpNormalization"})


@dataclass(frozen=True)
class Transposes:
    name: str = "transposes"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        while _sweep(editor):
            pass
        for node in editor.nodes():
            _as_view(editor, node)
        return editor.finish()


def _sweep(editor: Editor) -> bool:
    before = editor.changed
    for node in editor.nodes():
        if node.op == "Transpose":
            _merge(editor, node)
        elif node.op == "Reshape":
            _sink_through_split(editor, node)
            _batch_first(editor, node)
        elif node.op == "MatMul":
            _sink_through_product(editor, node)
        elif node.op == "Gather":
            _sink_through_gather(editor, node)
        elif len(node.outputs) == 1 and (is_elementwise(node) or node.op in _ALONG_AXIS):
            _sink(editor, node)
    return editor.changed > before


def _merge(editor: Editor, node: Node) -> None:
    """Merges a Transpose with one that computes its input, or removes it if the result is the identity."""
    perm, source = perm_of(node), node.inputs[0]
    if perm is not None and source is not None and compose(perm, None) is None:
        if node.output not in editor.graph.outputs or editor.renamable(source):
            editor.replace(node.output, source)
        return
    before = perm_of(source.producer) if source is not None and source.producer is not None else None
    if perm is None or before is None or source is None or source.producer is None:
        return
    origin, merged = source.producer.inputs[0], compose(before, perm)
    if origin is None:
        return
    if merged is not None:
        editor.replace(node.output, editor.emit(node, "Transpose", origin, attrs={"perm": merged}))
    elif node.output not in editor.graph.outputs or editor.renamable(origin):
        editor.replace(node.output, origin)


def _sink(editor: Editor, node: Node) -> None:
    """Rewrites op(transpose(a), transpose(b), constant) as transpose(op(a, b, constant')), permuting the constant."""
    perm = _common_perm(editor, node)
    shape = shape_of(node.output)
    if perm is None or shape is None or len(shape) != len(perm):
        return
    attrs = dict(node.attrs)
    if node.op in _ALONG_AXIS:
        attrs["axis"] = perm[_axis(node, -1) % len(perm)]
    inputs = [_before_transpose(editor, value, perm) for value in node.inputs]
    inner = editor.emit(node, node.op, *inputs, attrs=attrs)
    editor.replace(node.output, editor.emit(node, "Transpose", inner, attrs={"perm": perm}))


def _sink_through_split(editor: Editor, node: Node) -> None:
    """Moves a Transpose after the Reshape `node` that alone reads it and splits axes or drops axes of extent 1."""
    x, target = node.inputs[0], shape_of(node.output)
    perm = perm_of(x.producer) if x is not None and x.producer is not None else None
    if x is None or x.producer is None or perm is None or target is None or editor.only_reader(x) is not node:
        return
    source = x.producer.inputs[0]
    parts = split_axes(x.shape, target) if shape_of(x) is not None else None
    if source is None or parts is None or node.attrs.get("shape") != target:
        return
    order = [axis for before in inverse(perm) for axis in parts[before]]  # the target's axes in the source's order
    view = editor.reshaped(node, view_source(source), tuple(target[axis] for axis in order))
    editor.replace(node.output, editor.emit(node, "Transpose", view, attrs={"perm": inverse(order)}))


def _batch_first(editor: Editor, node: Node) -> None:
    """Keeps the batch first in memory: for a view after a transpose that moved the batch, moves the batch afterwards.

    The rest of the transpose and the view run before that move. The view may join the batch with axes that follow it,
    such as heads, or split it from them. With the batch first, no other stride depends on its size, and the transposes
    of attention layers that compute position-first cancel.
    """
    x, target = node.inputs[0], shape_of(node.output)
    perm = perm_of(x.producer) if x is not None and x.producer is not None else None
    if x is None or x.producer is None or perm is None or target is None or editor.only_reader(x) is not node:
        return
    parts, source = common_factors(x.shape, target) if shape_of(x) is not None else None, x.producer.inputs[0]
    if parts is None or source is None or perm[:1] in ((), (0,)) or node.attrs.get("shape") != target:
        return
    extents, split, joins = parts
    batch, stored = split[perm.index(0)][:1], [axis for before in inverse(perm) for axis in split[before]]
    at = next((i for i, join in enumerate(joins) if join[:1] == batch), None)
    if at is None:
        return
    groups = [joins[at], *joins[:at], *joins[at + 1 :]]
    factored = editor.reshaped(node, source, tuple(extents[axis] for axis in stored))
    order = tuple(stored.index(axis) for group in groups for axis in group)
    moved = editor.emit(node, "Transpose", factored, attrs={"perm": order})
    joined = editor.reshaped(node, moved, (target[at], *target[:at], *target[at + 1 :]))
    back = (*range(1, at + 1), 0, *range(at + 1, len(target)))
    editor.replace(node.output, editor.emit(node, "Transpose", joined, attrs={"perm": back}))


def _sink_through_product(editor: Editor, node: Node) -> None:
    """Rewrites transpose(x) @ w as transpose(x @ w), for a constant matrix w; the last axis must stay last.

    All readers of transpose(x) must be such products, as those for queries, keys and values are.
    """
    x = node.inputs[0]
    perm = perm_of(x.producer) if x is not None and x.producer is not None else None
    if x is None or x.producer is None or perm is None or perm[-1] != len(perm) - 1 or editor.is_output(x):
        return
    if all(_is_matrix_product(editor, reader, x) for reader in editor.readers(x)):
        product = editor.emit(node, "MatMul", x.producer.inputs[0], node.inputs[1])
        editor.replace(node.output, editor.emit(node, "Transpose", product, attrs={"perm": perm}))


def _is_matrix_product(editor: Editor, reader: Node, x: Value) -> bool:
    """Whether a node multiplies the rows of `x` by a constant matrix."""
    weight = editor.array(reader.inputs[1]) if reader.op == "MatMul" and reader.inputs[0] is x else None
    return weight is not None and weight.ndim == 2


def _sink_through_gather(editor: Editor, node: Node) -> None:
    """Moves a Transpose after the Gather `node` of one constant index, if only such Gathers read the Transpose."""
    x = node.inputs[0]
    perm = perm_of(x.producer) if x is not None and x.producer is not None else None
    if x is None or x.producer is None or perm is None or editor.is_output(x):
        return
    if not all(_takes_slice(editor, reader, x) for reader in editor.readers(x)):
        return
    axis = _axis(node, 0) % len(perm)
    rest = [before for i, before in enumerate(perm) if i != axis]
    inner = editor.emit(node, "Gather", x.producer.inputs[0], node.inputs[1], attrs={"axis": perm[axis]})
    order = tuple(sorted(rest).index(before) for before in rest)
    editor.replace(node.output, editor.emit(node, "Transpose", inner, attrs={"perm": order}))


def _takes_slice(editor: Editor, reader: Node, x: Value) -> bool:
    index = editor.array(reader.inputs[1]) if reader.op == "Gather" and reader.inputs[0] is x else None
    return index is not None and index.ndim == 0


def _axis(node: Node, default: int) -> int:
    axis = node.attrs.get("axis", default)
    return axis if isinstance(axis, int) else default


def _common_perm(editor: Editor, node: Node) -> Perm | None:
    """The permutation of the Transposes that compute all inputs of a node but constants; None if they differ.

    None also if an input that is not a constant comes from no Transpose, or another node reads it.
    """
    found: set[Perm] = set()
    for value in node.inputs:
        if value is None or editor.array(value) is not None:
            continue
        perm = perm_of(value.producer) if value.producer is not None else None
        if perm is None or editor.only_reader(value) is not node:
            return None
        found.add(perm)
    return found.pop() if len(found) == 1 else None


def _before_transpose(editor: Editor, value: Value | None, perm: Perm) -> Value | None:
    """The input of the Transpose (by `perm`) that computes a value; for a constant, a new one permuted back."""
    array = editor.array(value)
    if array is not None and value is not None:
        return value if array.ndim == 0 else editor.constant(permute_constant(array, inverse(perm)), value.name)
    return value.producer.inputs[0] if value is not None and value.producer is not None else None


def _as_view(editor: Editor, node: Node) -> None:
    """Rewrites a Transpose that only moves axes of extent 1 as a Reshape, if a Reshape can express the shape."""
    if node.op != "Transpose":
        return
    perm, shape, target = perm_of(node), shape_of(node.inputs[0]), shape_of(node.output)
    if perm is None or shape is None or target is None or 0 in target or not is_view(perm, shape):
        return
    if all(symbols(dim) <= input_symbols(editor.graph) for dim in target):
        editor.replace(node.output, editor.emit(node, "Reshape", node.inputs[0], attrs=reshape_attrs(target)))
