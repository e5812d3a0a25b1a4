"""Two matrix products with a softmax between them become FusedAttention: the scores never reach memory.

Of packed sequences, where scores only exist between tokens of one sequence, they become SegmentAttention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import TypeAlias

from core.ir.dim import is_never_negative
from core.ir.dims import is_sized
from core.ir.graph import Attr, Graph, Node, Value
from core.ir.types import DType
from core.passes.base import PassResult, is_elementwise, is_view_node, shape_of
from core.passes.bodies import FUSED, Body
from core.passes.edit import Editor

_PERMS = {"perm_q": "perm_a", "perm_k": "perm_b"}  # of FusedAttention, of the product that makes the scores
_LAST = ("perm_b", "perm_y")  # of the product with the values
_MOST_EXTRAS = 4  # further tensors that one epilogue may read

Operands: TypeAlias = tuple[Value | None, Value | None, Value | None, Value]  # Q, K, V, Y


@dataclass(frozen=True)
class FuseAttention:
    """`fewest_queries`: with fewer, products and a softmax of their own are left as they are."""

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
    """The new node, if there is one. `suit` says of Q, K, V and Y and their permutations whether the kernel can take
    them; `more` are inputs behind V."""
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
    behind = second.attrs.get("epilogue")
    perm_y, back = (perms[3], None) if _keeps_columns(perms[3]) else _columns_last(perms[3])
    attrs: dict[str, Attr] = {new: first.attrs.get(old) for new, old in _PERMS.items()}
    attrs |= {"perm_v": perms[2], "perm_y": perm_y, "epilogue": epilogue}
    attrs["guarded"] = 1 if softmax.op == "GuardedSoftmax" else softmax.attrs.get("guarded")
    given = {name: value for name, value in attrs.items() if value is not None}
    new = editor.emit(second, op, q, k, v, *more, *extras, attrs=given)
    made = new.producer
    result = new if back is None else editor.emit(second, "Transpose", new, attrs={"perm": back})
    if behind is not None:
        result = editor.emit(second, FUSED, result, *second.inputs[2:], attrs={"body": behind})
    editor.replace(second.output, result)
    return made


def _epilogue(editor: Editor, scores: list[Node]) -> tuple[Attr, list[Value | None]]:
    """What becomes of the elements of the product, the first node, until the last one; and what that reads besides."""
    product, *rest = scores
    old, extras = product.attrs.get("epilogue"), product.inputs[2:]
    if not rest:
        return old, extras
    body = Body(editor.graph.constants, "epilogue")
    element = body.input(None, old.inputs[0].dtype if isinstance(old, Graph) else product.output.dtype)
    given = [body.input(value, value.dtype) for value in extras if value is not None]
    body.inner[product.output] = body.inline(old, [element, *given])[0] if isinstance(old, Graph) else element
    for node in rest:
        body.add(node)
    body.graph.outputs = [body.inner[rest[-1].output]]
    return body.graph, body.arguments[1:]


def _fuse_segments(editor: Editor, softmax: Node) -> None:
    """What is a number for each pair of tokens must not be written down: there are n * n."""
    node = _fuse(editor, softmax, "SegmentAttention", _have_tokens, softmax.inputs[1])
    epilogue = node.attrs.get("epilogue") if node is not None else None
    if node is None or not isinstance(epilogue, Graph):
        return
    extras = [value for value in node.inputs[4:] if value is not None]
    body = Body(editor.graph.constants, "epilogue")
    score = body.input(None, epilogue.inputs[0].dtype)
    if not all(_is_computed(editor, body, value) for value in extras):
        return
    body.graph.outputs = body.inline(epilogue, [score, *(body.read(value) for value in extras)])
    if body.arguments[1:] != extras:
        attrs = {**node.attrs, "epilogue": body.graph}
        editor.replace(node.output, editor.emit(node, node.op, *node.inputs[:4], *body.arguments[1:], attrs=attrs))


def _is_computed(editor: Editor, body: Body, value: Value) -> bool:
    """Let the body compute a value of pairs from values of tokens; False where it cannot."""
    shape, node = shape_of(value) or (), value.producer
    if sum(not isinstance(dim, int) for dim in shape) < 2 or value in body.inner:
        return True
    source = node.input(0) if node is not None else None
    if node is None:
        return False
    if is_elementwise(node) or node.op == FUSED:
        if not all(_is_computed(editor, body, each) for each in node.inputs if each is not None):
            return False
        body.add(node)
        return True
    alike = source is not None and (node.op == "Expand" or _adds_axes(source, value))
    if source is None or not alike or not _is_computed(editor, body, source):
        return False
    body.inner[value] = body.read(source)
    return True


def _adds_axes(source: Value, value: Value) -> bool:
    """Whether a view only puts axes of extent 1 in front, or takes some away."""
    old, new = ((*dropwhile(lambda dim: dim == 1, shape_of(each) or ()),) for each in (source, value))
    return is_view_node(value.producer) and old == new


def _product_before(editor: Editor, softmax: Node) -> list[Node] | None:
    """The product that only serves to make the scores, and the elementwise nodes from it to the softmax: masks that are
    no numbers, and what else no epilogue of a product takes."""
    scores = softmax.inputs[0]
    return _path(editor, scores, softmax) if scores is not None and scores.dtype is DType.FLOAT32 else None


def _path(editor: Editor, value: Value, reader: Node) -> list[Node] | None:
    """The nodes from a product to `value`, which only `reader` reads; all of one shape."""
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
    """The product of the weights, as they are, with the values. Its epilogue is done behind the attention."""
    node = editor.only_reader(softmax.output)
    if node is None or node.op != "FusedMatMul" or node.inputs[0] is not softmax.output:
        return None
    plain = softmax.output not in node.inputs[1:] and node.attrs.get("perm_a") is None
    epilogue = node.attrs.get("epilogue")
    after = not isinstance(epilogue, Graph) or epilogue.inputs[0].dtype is DType.FLOAT32
    ordered = len(node.inputs) == 2 or node.attrs.get("perm_y") is None  # what else the epilogue reads
    return node if plain and after and ordered else None


def _has_rows_of_keys(softmax: Node, fewest: int) -> bool:
    """Whether the softmax goes along the last axis, and the one before it, the queries, is long enough."""
    shape = shape_of(softmax.output)
    if shape is None or len(shape) < 2 or softmax.attrs.get("axis", -1) not in (-1, len(shape) - 1):
        return False
    return shape[-2] >= fewest if isinstance(shape[-2], int) else is_sized(shape[-2])


def _have_known_rows(operands: Operands, perms: Sequence[Attr]) -> bool:
    """Whether kernels for one number of keys, or for any, take the operands."""
    (q, k, v, y), (perm_q, perm_k, perm_v, perm_y) = operands, perms
    if any(is_sized(dim) for value in operands for dim in shape_of(value) or ()):
        pairs = ((q, perm_q, -1), (k, perm_k, -2), (v, perm_v, -1), (y, perm_y, -1))
        return all(_has_known_steps(value, perm, columns) for value, perm, columns in pairs)
    if not (_has_known_rows(q, perm_q) and _has_known_rows(y, perm_y)):
        return False
    known = _has_known_rows(k, perm_k) and _has_known_rows(v, perm_v)
    return known or (_has_any_rows(k, perm_k, -1) and _has_any_rows(v, perm_v, -2))


def _has_known_steps(value: Value | None, perm: Attr, columns: int) -> bool:
    """Whether rows are contiguous, of known extent and a known step apart, however many there are. Columns go along
    axis `columns` of the permuted tensor, whose last two axes are those of matrices."""
    shape = shape_of(value)
    if shape is None or len(shape) < 2:
        return False
    order = [int(str(axis)) for axis in perm] if isinstance(perm, tuple) else [*range(len(shape))]
    across, along = order[-3 - columns], order[columns]
    behind = shape[across + 1 :]
    return along == len(shape) - 1 and isinstance(shape[along], int) and all(isinstance(dim, int) for dim in behind)


def _has_any_rows(value: Value | None, perm: Attr, rows: int) -> bool:
    """Whether there may be any number of contiguous rows, but at least one, of known extent and a known step apart.
    They go along axis `rows` of the permuted tensor, whose last two axes are those of matrices."""
    shape = shape_of(value)
    if shape is None:
        return False
    order = perm if isinstance(perm, tuple) else (*range(len(shape)),)
    *others, across = (shape[int(str(axis))] for axis in (*(a for a in order if a != order[rows]), order[rows]))
    fixed = all(isinstance(extent, int) and extent > 0 for extent in others)
    return fixed and is_never_negative(across - 1) and order[-3 - rows] == len(shape) - 1


def _has_known_rows(value: Value | None, perm: Attr) -> bool:
    """Whether rows and columns are of known extent, not empty, and a known step apart: only a batch axis may vary."""
    shape = shape_of(value)
    if shape is None or not all(isinstance(extent, int) and extent > 0 for extent in shape[1:]):
        return False
    leads = not isinstance(perm, tuple) or perm[0] == 0
    return isinstance(shape[0], int) or (leads and len(shape) > 2)


def _have_tokens(operands: Operands, perms: Sequence[Attr]) -> bool:
    """Whether tokens lie along one axis of each operand."""
    return all(map(_has_tokens, operands))


def _has_tokens(value: Value | None) -> bool:
    """Whether tokens lie along one axis, and everything else is of known extent."""
    varying = [dim for dim in shape_of(value) or () if not isinstance(dim, int)]
    return len(varying) == 1


def _columns_last(perm: Attr) -> tuple[Attr, tuple[int, ...]]:
    """A permutation that keeps the elements of a row neighbours, and the one that leads from there to `perm`."""
    axes = tuple(perm) if isinstance(perm, tuple) else ()
    last = len(axes) - 1
    kept = (*(axis for axis in axes if axis != last), last)
    return kept if kept != tuple(range(len(axes))) else None, tuple(kept.index(axis) for axis in axes)


def _keeps_columns(perm: Attr) -> bool:
    """Whether the elements of a row stay neighbours."""
    return not isinstance(perm, tuple) or perm[-1] == len(perm) - 1
