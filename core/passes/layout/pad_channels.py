"""Pads the channels of images to multiples of 4 for convolutions on a GPU, with zeros.

A GPU copies at least 4 bytes at a time into shared memory without waiting, and up to 16. With 3 channels, as of colour
images, neighbouring pixels begin at odd places, so each number is loaded by itself. With 4, all channels of a pixel are
loaded at once. The weights of the added channels are 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lathe.core.ir.graph import Graph, Node
from lathe.core.passes.rewrite.base import PassResult, has_ranks
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import perm_of

_MULTIPLE = 4
_FEWEST = 3  # channels; from there on padding adds at most a third to the products


@dataclass(frozen=True)
class PadChannels:
    name: str = "pad_channels"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            if node.op == "FusedConv" and has_ranks(node):
                _pad(editor, node)
        return editor.finish()


def _pad(editor: Editor, node: Node) -> None:
    x, weight = node.inputs[0], editor.array(node.input(1))
    if x is None or weight is None or node.attrs.get("layout") != "NHWC" or node.attrs.get("group", 1) != 1:
        return
    channels = weight.shape[1]
    missing = -channels % _MULTIPLE
    if not x.dtype.is_float or not missing or channels < _FEWEST or 3 * missing > channels:
        return
    moved = x.producer
    perm = perm_of(moved) if moved is not None else None
    if moved is not None and perm is not None and editor.only_reader(x) is node:
        # Before the transpose the added channels are whole images of zeros, and all copies are long.
        padded = editor.emit(node, "Pad", moved.inputs[0], attrs={"pads": (0, missing), "axes": (perm[-1],)})
        wider = editor.emit(node, "Transpose", padded, attrs={"perm": perm})
    else:
        wider = editor.emit(node, "Pad", x, attrs={"pads": (0, missing), "axes": (len(x.shape) - 1,)})
    zeros = [(0, missing if axis == 1 else 0) for axis in range(weight.ndim)]
    editor.set_inputs(node, [wider, editor.constant(np.pad(weight, zeros), "w"), *node.inputs[2:]])


__all__ = ["PadChannels"]
