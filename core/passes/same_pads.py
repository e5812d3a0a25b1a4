"""Padding that follows from sizes (`auto_pad`) becomes a Pad, where only a run shows these sizes.

With stride s, an image of `size` pixels has as many results as strides begin in it. Their windows reach beyond it by
s * ceil(size / s) - s + reach - size pixels, if the reach is no less than the stride; windows of one pixel by none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.ir.dim import floor_div
from core.ir.dims import is_sized
from core.ir.graph import Attr, Graph, Node, Value
from core.ir.types import Dim
from core.ops import registry
from core.ops.spatial import Window, window_of
from core.passes.base import PassResult, has_ranks
from core.passes.edit import Editor

_FILLS = {"Conv": 0.0, "MaxPool": -math.inf}  # what changes no result


@dataclass(frozen=True)
class SamePads:
    name: str = "same_pads"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            if node.op in _FILLS and len(node.outputs) == 1 and has_ranks(node):
                _rewrite(editor, node)
        return editor.finish()


def _rewrite(editor: Editor, node: Node) -> None:
    x = node.inputs[0]
    window = _window(node) if x is not None and x.dtype.is_float else None
    if x is None or window is None or window.pads is not None or not any(map(is_sized, x.shape[2:])):
        return
    facts = zip(x.shape[2:], window.extents, window.strides, strict=True)
    totals = [_total(size, reach, stride) for size, reach, stride in facts]
    known = [total for total in totals if total is not None]
    if len(known) < len(totals):
        return
    befores = [floor_div(total + window.lower, 2) for total in known]
    afters = [total - before for total, before in zip(known, befores, strict=True)]
    padded = _padded(editor, node, x, [0, 0, *befores, 0, 0, *afters])
    attrs = {**{name: value for name, value in node.attrs.items() if name != "auto_pad"}, "pads": (0,) * 2 * len(known)}
    editor.replace(node.output, editor.emit(node, node.op, padded, *node.inputs[1:], attrs=attrs))


def _window(node: Node) -> Window | None:
    """The window over images with their channels first; None where its extents are not known."""
    view, weights = registry.NodeView(registry.get(node.op), node), node.input(1)
    extents = weights.shape[2:] if weights is not None else node.attrs.get("kernel_shape")  # MaxPool has none
    known = [extent for extent in extents if isinstance(extent, int)] if isinstance(extents, tuple) else []
    if node.attrs.get("layout", "NCHW") != "NCHW" or not known or len(known) < len(node.output.shape) - 2:
        return None
    return window_of(view, known)


def _total(size: Dim, reach: int, stride: int) -> Dim | None:
    """Pixels of padding along an axis, None where it may be none."""
    if reach == 1:
        return 0
    return floor_div(size + (stride - 1), stride) * stride + (reach - stride) - size if reach >= stride else None


def _padded(editor: Editor, node: Node, x: Value, pads: list[Dim]) -> Value:
    attrs: dict[str, Attr] = {"pads": tuple(pads), "mode": "constant", "constant_value": (_FILLS[node.op],)}
    return editor.emit(node, "Pad", x, attrs=attrs)
