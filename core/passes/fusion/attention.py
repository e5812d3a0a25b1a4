"""Fuses two matrix products with a softmax between them into FusedAttention: the scores never reach memory.

With packed sequences, whose scores exist only between tokens of one sequence, the result is SegmentAttention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import TypeAlias

from lathe.core.ir.dim import is_never_negative
from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.graph import Attr, Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.passes.rewrite.base import PassResult, is_elementwise, is_view_node, shape_of
from lathe.core.passes.rewrite.bodies import FUSED, Body
from lathe.core.passes.rewrite.editor import Editor

_PERMS = {"perm_q": "perm_a", "perm_k": "perm_b"}  # attributes of FusedAttention, and of the product for the scores
_LAST = ("perm_b", "perm_y")  # attributes of the product with the values
_MOST_EXTRAS = 4  # the most additional tensors (masks, scales) that the epilogue may read

Operands: TypeAlias = tuple[Value | None, Value | None, Value | None, Value]  # Q, K, V, Y


@dataclass(frozen=True)
class FuseAttention:
    """Fuses product, softmax and product into FusedAttention or SegmentAttention, where kernels cover them.

    `fewest_queries`: attention with fewer queries is not fused; this does not apply to packed sequences.
    """

    fewest_queries: int = 1
    name: str = "attention"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            if node.op in ("Softmax", "GuardedSoftmax") and _has_rows_of_keys(node, self.fewest_queries):
                _fuse(editor, node, "FusedAttention", _have_known_rows)
            elif node.op == "SegmentSoftmax":
                _fuse_segments(editor, node)
        return editor.finish()


def _fuse(
    editor: Editor, softmax: Node, op: str, suit: Callable[[Operands, Sequence[Attr]], bool], *more: Value | None
) -> Node | None:
    """Fuses the attention around `softmax` into a node `op`; returns the new node, or None if nothing was fused.

    `suit` decides whether the kernel covers queries, keys, values and result (Q, K, V, Y) with their permutations.
    `more` are inputs that follow V.
    """
    scores, second = _product_before(editor, softmax), _product_after(editor, softmax)
    if scores is None or second is None:
        return None
    first = scores[0]
    q, k, v = first.inputs[0], first.inputs[1], second.inputs[1]
    perms = [*(first.attrs.get(name) for name in _PERMS.values()), *(second.attrs.get(name) for name in _LAST)]
    epilogue, extras = _epilogue(editor, scores)
    if not suit((q, k, v, second.output), perms) or not _keeps_columns(perms[2]):
        return None
    if len(extras) > _MOST_EXTRAS:
        return None
    last_epilogue = second.attrs.get("epilogue")
    perm_y, back = (perms[3], None) if _keeps_columns(perms[3]) else _columns_last(perms[3])
    attrs: dict[str, Attr] = {new: first.attrs.get(old) for new, old in _PERMS.items()}
    attrs |= {"perm_v": perms[2], "perm_y": perm_y, "epilogue": epilogue}
    attrs["guarded"] = 1 if softmax.op == "GuardedSoftmax" else softmax.attrs.get("guarded")
    present = {name: value for name, value in attrs.items() if value is not None}
    new = editor.emit(second, op, q, k, v, *more, *extras, attrs=present)
    fused = new.producer
    result = new if back is None else editor.emit(second, "Transpose", new, attrs={"perm": back})
    if last_epilogue is not None:
        result = editor.emit(second, FUSED, result, *second.inputs[2:], attrs={"body": last_epilogue})
    editor.replace(second.output, result)
    return fused


def _epilogue(editor: Editor, scores: list[Node]) -> tuple[Attr, list[Value | None]]:
    """The scalar body (a Graph) that computes a score from the product's sum, and the further values that it reads.

    The body is the epilogue of the product, which is the first node of `scores`, followed by the other, elementwise
    nodes; None if the product has no epilogue and no node follows.
    """
    product, *rest = scores
    old, extras = product.attrs.get("epilogue"), product.inputs[2:]
    if not rest:
        return old, extras
    body = Body(editor.graph.constants, "epilogue")
    element = body.input(None, old.inputs[0].dtype if isinstance(old, Graph) else product.output.dtype)
    inputs = [body.input(value, value.dtype) for value in extras if value is not None]
    body.inner[product.output] = body.inline(old, [element, *inputs])[0] if isinstance(old, Graph) else element
    for node in rest:
        body.add(node)
    body.graph.outputs = [body.inner[rest[-1].output]]
    return body.graph, body.arguments[1:]


def _fuse_segments(editor: Editor, softmax: Node) -> None:
    """Fuses attention of packed sequences, and moves the computation of masks into its epilogue.

    A mask with a number for each pair of tokens would have n * n elements in memory.
    """
    node = _fuse(editor, softmax, "SegmentAttention", _have_tokens, softmax.inputs[1])
    epilogue = node.attrs.get("epilogue") if node is not None else None
    if node is None or not isinstance(epilogue, Graph):
        return
    extras = [value for value in node.inputs[4:] if value is not None]
    body = Body(editor.graph.constants, "epilogue")
    score = body.input(None, epilogue.inputs[0].dtype)
    if not all(_compute_in_body(editor, body, value) for value in extras):
        return
    body.graph.outputs = body.inline(epilogue, [score, *(body.read(value) for value in extras)])
    if body.arguments[1:] != extras:
        attrs = {**node.attrs, "epilogue": body.graph}
        editor.replace(node.output, editor.emit(node, node.op, *node.inputs[:4], *body.arguments[1:], attrs=attrs))


def _compute_in_body(editor: Editor, body: Body, value: Value) -> bool:
    """Makes the body compute `value` from values of single tokens, if it has a number per pair of tokens.

    Returns whether the body can read the value: true without a change if fewer than two of its extents are symbolic.
    """
    shape, node = shape_of(value) or (), value.producer
    if sum(not isinstance(dim, int) for dim in shape) < 2 or value in body.inner:
        return True
    source = node.input(0) if node is not None else None
    if node is None:
        return False
    if is_elementwise(node) or node.op == FUSED:
        if not all(_compute_in_body(editor, body, each) for each in node.inputs if each is not None):
            return False
        body.add(node)
        return True
    broadcasts = source is not None and (node.op == "Expand" or _changes_leading_axes(source, value))
    if source is None or not broadcasts or not _compute_in_body(editor, body, source):
        return False
    body.inner[value] = body.read(source)
    return True


def _changes_leading_axes(source: Value, value: Value) -> bool:
    """Whether a view of `source` computes `value`, and only adds or removes leading axes of extent 1."""
    old, new = ((*dropwhile(lambda dim: dim == 1, shape_of(each) or ()),) for each in (source, value))
    return is_view_node(value.producer) and old == new


def _product_before(editor: Editor, softmax: Node) -> list[Node] | None:
    """The product that computes the scores, and the elementwise nodes up to the softmax; None if there is none.

    `FuseEpilogue` did not fuse these nodes, such as boolean masks. No other node may read a value between them, and the
    scores must be float32.
    """
    scores = softmax.inputs[0]
    return _path(editor, scores, softmax) if scores is not None and scores.dtype is DType.FLOAT32 else None


def _path(editor: Editor, value: Value, reader: Node) -> list[Node] | None:
    """The nodes from a product to `value`, all of one shape, each read by the next node alone; None if there is none.

    `reader` must be the only reader of `value`.
    """
    node = value.producer
    if node is None or editor.only_reader(value) is not reader:
        return None
    if node.op == "FusedMatMul":
        return [node] if node.attrs.get("perm_y") is None and value.dtype is DType.FLOAT32 else None
    if len(node.outputs) != 1 or not (node.op == FUSED or is_elementwise(node)):
        return None
    for source in node.inputs:
        if source is not None and shape_of(source) == shape_of(value) is not None:
            path = _path(editor, source, node)
            if path is not None:
                return [*path, node]
    return None


def _product_after(editor: Editor, softmax: Node) -> Node | None:
    """The product of the softmax's result with the values V, which alone reads it; None if it cannot be fused.

    Its epilogue becomes a node after the attention.
    """
    node = editor.only_reader(softmax.output)
    if node is None or node.op != "FusedMatMul" or node.inputs[0] is not softmax.output:
        return None
    plain = softmax.output not in node.inputs[1:] and node.attrs.get("perm_a") is None
    epilogue = node.attrs.get("epilogue")
    starts_float = not isinstance(epilogue, Graph) or epilogue.inputs[0].dtype is DType.FLOAT32
    ordered = len(node.inputs) == 2 or node.attrs.get("perm_y") is None  # extras of the epilogue are not permuted
    return node if plain and starts_float and ordered else None


def _has_rows_of_keys(softmax: Node, fewest: int) -> bool:
    """Whether the softmax is over the last axis, and the axis before it (queries) has an extent of at least `fewest`.

    An extent over sizes of dynamic-shape code counts as large enough.
    """
    shape = shape_of(softmax.output)
    if shape is None or len(shape) < 2 or softmax.attrs.get("axis", -1) not in (-1, len(shape) - 1):
        return False
    return shape[-2] >= fewest if isinstance(shape[-2], int) else has_only_sizes(shape[-2])


def _have_known_rows(operands: Operands, perms: Sequence[Attr]) -> bool:
    """Whether an attention kernel covers Q, K, V and Y (`operands`), permuted by `perms`.

    There are kernels for sizes of dynamic-shape code, for known extents with any batch, and for a number of keys that
    is known only in a run.
    """
    (q, k, v, y), (perm_q, perm_k, perm_v, perm_y) = operands, perms
    if any(has_only_sizes(dim) for value in operands for dim in shape_of(value) or ()):
        pairs = ((q, perm_q, -1), (k, perm_k, -2), (v, perm_v, -1), (y, perm_y, -1))
        return all(_has_known_steps(value, perm, columns) for value, perm, columns in pairs)
    if not (_has_known_rows(q, perm_q) and _has_known_rows(y, perm_y)):
        return False
    known = _has_known_rows(k, perm_k) and _has_known_rows(v, perm_v)
    return known or (_has_dynamic_rows(k, perm_k, -1) and _has_dynamic_rows(v, perm_v, -2))


def _has_known_steps(value: Value | None, perm: Attr, columns: int) -> bool:
    """Whether the matrices of an operand have contiguous rows of a known length, and a known stride between rows.

    The number of rows may be any. Columns lie along axis `columns` of the permuted tensor, whose last two axes are
    those of the matrices.
    """
    shape = shape_of(value)
    if shape is None or len(shape) < 2:
        return False
    order = [int(str(axis)) for axis in perm] if isinstance(perm, tuple) else [*range(len(shape))]
    across, along = order[-3 - columns], order[columns]
    inner = shape[across + 1 :]
    return along == len(shape) - 1 and isinstance(shape[along], int) and all(isinstance(dim, int) for dim in inner)


def _has_dynamic_rows(value: Value | None, perm: Attr, rows: int) -> bool:
    """Whether all extents but the number of rows are known and positive, rows contiguous, and rows provably at least 1.

    Rows lie along axis `rows` of the permuted tensor, whose last two axes are those of the matrices.
    """
    shape = shape_of(value)
    if shape is None:
        return False
    order = perm if isinstance(perm, tuple) else (*range(len(shape)),)
    *others, across = (shape[int(str(axis))] for axis in (*(a for a in order if a != order[rows]), order[rows]))
    known = all(isinstance(extent, int) and extent > 0 for extent in others)
    return known and is_never_negative(across - 1) and order[-3 - rows] == len(shape) - 1


def _has_known_rows(value: Value | None, perm: Attr) -> bool:
    """Whether all extents except the leading one are known and positive.

    The leading one may be symbolic if `perm` keeps it first, and the tensor has more than two axes.
    """
    shape = shape_of(value)
    if shape is None or not all(isinstance(extent, int) and extent > 0 for extent in shape[1:]):
        return False
    leads = not isinstance(perm, tuple) or perm[0] == 0
    return isinstance(shape[0], int) or (leads and len(shape) > 2)


def _have_tokens(operands: Operands, perms: Sequence[Attr]) -> bool:
    """Whether each operand has one symbolic extent, the number of tokens; `perms` do not matter."""
    return all(map(_has_tokens, operands))


def _has_tokens(value: Value | None) -> bool:
    """Whether exactly one extent, the number of tokens, is symbolic."""
    varying = [dim for dim in shape_of(value) or () if not isinstance(dim, int)]
    return len(varying) == 1


def _columns_last(perm: Attr) -> tuple[Attr, tuple[int, ...]]:
    """`perm` with the last axis moved to the end (None for the identity), and the permutation from there to `perm`."""
    axes = tuple(perm) if isinstance(perm, tuple) else ()
    last = len(axes) - 1
    first = (*(axis for axis in axes if axis != last), last)
    return first if first != tuple(range(len(axes))) else None, tuple(first.index(axis) for axis in axes)


def _keeps_columns(perm: Attr) -> bool:
    """Whether a permutation keeps the last axis last, so that the elements of a row stay contiguous."""
    return not isinstance(perm, tuple) or perm[-1] == len(perm) - 1
