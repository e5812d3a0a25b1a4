"""Rewrites `auto_pad` = SAME into an explicit Pad where image sizes are known only in a run (dynamic-shape code).

With stride s, an image of `size` pixels has ceil(size / s) results. Their windows extend beyond the image by
s * ceil(size / s) - s + reach - size pixels if the reach (dilated kernel extent) is at least the stride. Windows of one
pixel need no padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lathe.core.ir.dim import floor_div
from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.graph import Attr, Graph, Node, Value
from lathe.core.ir.types import Dim
from lathe.core.ops.nn.spatial import Window, window_of
from lathe.core.ops.opdef import registry
from lathe.core.passes.rewrite.base import PassResult, has_ranks
from lathe.core.passes.rewrite.editor import Editor

_FILLS = {"Conv": 0.0, "MaxPool": -math.inf}  # the neutral element of the operator's reduction


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
    if x is None or window is None or window.pads is not None or not any(map(has_only_sizes, x.shape[2:])):
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
    """The window of a Conv or MaxPool of channels-first images; None for other layouts, or unknown window extents."""
    view, weights = registry.NodeView(registry.get(node.op), node), node.input(1)
    extents = weights.shape[2:] if weights is not None else node.attrs.get("kernel_shape")  # MaxPool has none
    known = [extent for extent in extents if isinstance(extent, int)] if isinstance(extents, tuple) else []
    if node.attrs.get("layout", "NCHW") != "NCHW" or not known or len(known) < len(node.output.shape) - 2:
        return None
    return window_of(view, known)


def _total(size: Dim, reach: int, stride: int) -> Dim | None:
    """The number of padding pixels along an axis, before and after together; 0 for a `reach` of 1.

    `reach` is the extent of the dilated kernel. None if it is above 1 but below the stride: the formula might be
    negative.
    """
    if reach == 1:
        return 0
    return floor_div(size + (stride - 1), stride) * stride + (reach - stride) - size if reach >= stride else None


def _padded(editor: Editor, node: Node, x: Value, pads: list[Dim]) -> Value:
    attrs: dict[str, Attr] = {"pads": tuple(pads), "mode": "constant", "constant_value": (_FILLS[node.op],)}
    return editor.emit(node, "Pad", x, attrs=attrs)
