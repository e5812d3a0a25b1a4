"""Two matrix products with a softmax between them become FusedAttention: the scores never reach memory.

Of packed sequences, where scores only exist between tokens of one sequence, they become SegmentAttention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.ir.graph import Attr, Graph, Node, Value
from core.ir.types import DType
from core.passes.base import PassResult, shape_of
from core.passes.edit import Editor

_PERMS = {"perm_q": "perm_a", "perm_k": "perm_b"}  # of FusedAttention, of the product that makes the scores
_LAST = ("perm_b", "perm_y")  # of the product with the values


@dataclass(frozen=True)
class FuseAttention:
    """`fewest_queries`: below it the lanes of the fused kernel are too empty to gain anything (measured)."""

    fewest_queries: int = 12
    name: str = "attention"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            if node.op == "Softmax" and _has_rows_of_keys(node, self.fewest_queries):
                _fuse(editor, node, "FusedAttention", _has_known_rows)
            elif node.op == "SegmentSoftmax":
                _fuse(editor, node, "SegmentAttention", _has_tokens, node.inputs[1])
        return editor.finish()


def _fuse(
    editor: Editor, softmax: Node, op: str, suits: Callable[[Value | None, Attr], bool], *more: Value | None
) -> None:
    """`suits` says of an operand and its permutation whether the kernel can take it; `more` are inputs behind V."""
    first, second = _product_before(editor, softmax), _product_after(editor, softmax)
    if first is None or second is None:
        return
    q, k, v = first.inputs[0], first.inputs[1], second.inputs[1]
    perms = [*(first.attrs.get(name) for name in _PERMS.values()), *(second.attrs.get(name) for name in _LAST)]
    if not all(map(suits, (q, k, v, second.output), perms)) or not all(map(_keeps_columns, perms[2:])):
        return
    attrs: dict[str, Attr] = {new: first.attrs.get(old) for new, old in _PERMS.items()}
    attrs |= {"perm_v": perms[2], "perm_y": perms[3], "epilogue": first.attrs.get("epilogue")}
    given = {name: value for name, value in attrs.items() if value is not None}
    new = editor.emit(second, op, q, k, v, *more, *first.inputs[2:], attrs=given)
    editor.replace(second.output, new)


def _product_before(editor: Editor, softmax: Node) -> Node | None:
    """The product that only serves to make the scores."""
    scores = softmax.inputs[0]
    node = scores.producer if scores is not None else None
    if node is None or scores is None or node.op != "FusedMatMul" or editor.only_reader(scores) is not softmax:
        return None
    return node if node.attrs.get("perm_y") is None and scores.dtype is DType.FLOAT32 else None


def _product_after(editor: Editor, softmax: Node) -> Node | None:
    """The product of the weights, as they are, with the values."""
    node = editor.only_reader(softmax.output)
    if node is None or node.op != "FusedMatMul" or node.inputs[0] is not softmax.output:
        return None
    plain = len(node.inputs) == 2 and node.inputs[1] is not softmax.output
    return node if plain and all(node.attrs.get(name) is None for name in ("perm_a", "epilogue")) else None


def _has_rows_of_keys(softmax: Node, fewest: int) -> bool:
    """Whether the softmax goes along the last axis, and the one before it, the queries, is long enough."""
    shape = shape_of(softmax.output)
    if shape is None or len(shape) < 2 or softmax.attrs.get("axis", -1) not in (-1, len(shape) - 1):
        return False
    return isinstance(shape[-2], int) and shape[-2] >= fewest


def _has_known_rows(value: Value | None, perm: Attr) -> bool:
    """Whether rows and columns are of known extent, not empty, and a known step apart: only a batch axis may vary."""
    shape = shape_of(value)
    if shape is None or not all(isinstance(extent, int) and extent > 0 for extent in shape[1:]):
        return False
    leads = not isinstance(perm, tuple) or perm[0] == 0
    return isinstance(shape[0], int) or (leads and len(shape) > 2)


def _has_tokens(value: Value | None, perm: Attr) -> bool:
    """Whether tokens lie along one axis, and everything else is of known extent."""
    varying = [dim for dim in shape_of(value) or () if not isinstance(dim, int)]
    return len(varying) == 1


def _keeps_columns(perm: Attr) -> bool:
    """Whether the elements of a row stay neighbours."""
    return not isinstance(perm, tuple) or perm[-1] == len(perm) - 1
