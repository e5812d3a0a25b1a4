"""SmoothQuant: moves a part of the range of activations into the weights, so that both lose little in 8 bits.

Xiao et al. 2022 (https://arxiv.org/abs/2211.10438), equation 4. A few channels of the activations of transformers are
much larger than the others, and determine the scale of all. Each channel is divided by a factor, and the weights that
read it are multiplied: x @ W = (x / s) @ (s * W).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.calibration import Feeds, collect_channels
from lathe.core.compress.channel_scales import divide_input
from lathe.core.compress.products import between_layouts, matrix_of
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.passes.rewrite.editor import Editor

_LEAST_FACTOR = 1e-4  # of the largest factor of an activation: for channels that are always 0


def smooth(
    graph: Graph, nodes: Sequence[Node], strength: float, batches: Sequence[Feeds], threads: int | None = None
) -> None:
    """Rewrite the matrix products among `nodes` of `graph`; those that read one activation get the same factors.

    The factor of a channel is max|x|^strength / max|W|^(1 - strength). Convolutions stay as they are. Errors as in
    `collect_channels`.
    """
    editor = Editor(graph)
    groups: dict[Value, list[tuple[Node, NDArray[np.float32]]]] = {}
    for node in nodes:
        matrix, value = matrix_of(editor, node), node.inputs[0]
        if matrix is not None and value is not None:
            groups.setdefault(value, []).append((node, matrix))
    found = collect_channels(graph, dict.fromkeys((value.name for value in groups), -1), batches, threads)
    for value, group in groups.items():
        largest = found[value.name].largest
        weights = np.max([np.abs(matrix).max(axis=1) for _, matrix in group], axis=0)
        if not largest.any() or not weights.any():
            continue
        factors = largest**strength / np.maximum(weights, _LEAST_FACTOR * weights.max()) ** (1 - strength)
        factors = np.maximum(factors, _LEAST_FACTOR * factors.max()).astype(np.float32)
        divide_input(editor, value, [node for node, _ in group], factors)
        for node, matrix in group:
            _multiply_weights(editor, node, matrix * factors[:, None])
    editor.finish()


def _multiply_weights(editor: Editor, node: Node, matrix: NDArray[np.float32]) -> None:
    """Give a product the weights [K, N] in its own layout."""
    value = node.required_input(1)
    stored = editor.constant(between_layouts(node, matrix), f"{value.name}_smoothed")
    editor.set_inputs(node, [node.inputs[0], stored, *node.inputs[2:]])
