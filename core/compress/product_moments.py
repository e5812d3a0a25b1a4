"""The second moments of what each product multiplies by its weights: rows of a matrix, or the windows of an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lathe.core.compress.calibration import MOST_BYTES, Feeds, observe_parts
from lathe.core.compress.products import between_layouts
from lathe.core.errors import DataError
from lathe.core.ir.graph import Array, Graph, Node
from lathe.core.ops.nn.spatial import Window, window_of
from lathe.core.ops.opdef import registry

_MOST_ELEMENTS = 1 << 24  # of the windows that are copied at a time: 64 MiB of float32


def as_matrices(node: Node, weights: NDArray[Any]) -> NDArray[Any]:
    """The weights of a Conv, MatMul or Gemm as [G, K, N]: for each of G groups, K inputs of a sum and N outputs."""
    if node.op != "Conv":
        return between_layouts(node, weights)[None]
    groups = _groups(node)
    return np.ascontiguousarray(weights.reshape(groups, len(weights) // groups, -1).transpose(0, 2, 1))


def from_matrices(node: Node, matrices: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
    """The inverse of `as_matrices`: weights of this shape in the layout of the node."""
    if node.op != "Conv":
        return between_layouts(node, matrices[0])
    return np.ascontiguousarray(matrices.transpose(0, 2, 1).reshape(shape))


class ProductMoments:
    """The mean of x x^T over the inputs x [K] of each group of a product: `grams` float32 [G, K, K].

    Zeros of the padding of a Conv count as inputs. Memory: `nbytes`, and at most 64 MiB during `add`.
    """

    def __init__(self, graph: Graph, node: Node, weights: Array) -> None:
        self._window = _window(graph, node, weights) if node.op == "Conv" else None
        groups, depth, _ = as_matrices(node, weights).shape
        self.grams: NDArray[np.float32] = np.zeros((groups, depth, depth), np.float32)
        self._count = 0

    @property
    def nbytes(self) -> int:
        return self.grams.nbytes

    def add(self, activation: NDArray[np.float32]) -> None:
        """Add the activation that the product reads. DataError if a number is not finite; then nothing is added."""
        if not np.isfinite(activation).all():
            raise DataError("expected finite numbers")
        for rows in self._rows(activation):
            total = self._count + rows.shape[1]
            self.grams *= self._count / total
            self.grams += (rows.transpose(0, 2, 1) @ rows) / total
            self._count = total

    def _rows(self, activation: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
        """The inputs as [G, rows, K], some rows at a time."""
        groups, depth, _ = self.grams.shape
        if self._window is None:
            rows = activation.reshape(1, -1, depth)
            step = max(1, _MOST_ELEMENTS // depth)
            yield from (rows[:, start : start + step] for start in range(0, rows.shape[1], step))
            return
        for image in activation:
            yield _windows(image, self._window).reshape(groups, depth, -1).transpose(0, 2, 1)


def _windows(image: NDArray[np.float32], window: Window) -> NDArray[np.float32]:
    """The windows of an image [C, D1..] as [C, kernel elements, places]."""
    pads = window.pads_for(image.shape[1:])
    padded = np.pad(image, [(0, 0), *pads])
    axes = tuple(range(1, image.ndim))
    every = (slice(None), *(slice(None, None, stride) for stride in window.strides))
    taps = tuple(slice(None, None, dilation) for dilation in window.dilations)
    found = sliding_window_view(padded, window.extents, axes)[(*every, *taps)]  # [C, places.., kernel..]
    rank = len(axes)
    order = (0, *range(rank + 1, 2 * rank + 1), *range(1, rank + 1))
    return found.transpose(order).reshape(len(image), int(np.prod(window.kernel)), -1)


def collect_product_moments(
    graph: Graph, products: Mapping[int, Array], batches: Sequence[Feeds], threads: int | None = None
) -> Iterator[tuple[int, ProductMoments]]:
    """Yield the moments of the products in `products`, which maps indices of nodes to their weights.

    Memory and errors are those of `collect_moments`: moments of at most `MOST_BYTES`, or of one product, at a time.
    """
    group: dict[int, ProductMoments] = {}
    for index, weights in products.items():
        moments = ProductMoments(graph, graph.nodes[index], weights)
        if group and moments.nbytes + sum(each.nbytes for each in group.values()) > MOST_BYTES:
            yield from _collect(graph, group, batches, threads)
            group = {}
        group[index] = moments
    if group:
        yield from _collect(graph, group, batches, threads)


def _collect(
    graph: Graph, group: Mapping[int, ProductMoments], batches: Sequence[Feeds], threads: int | None
) -> Iterator[tuple[int, ProductMoments]]:
    sources = {index: graph.nodes[index].required_input(0).name for index in group}
    for number, arrays in observe_parts(graph, dict.fromkeys(sources.values()), batches, threads):
        for index, moments in group.items():
            try:
                moments.add(arrays[sources[index]])
            except DataError as error:
                raise DataError(f"batch {number}: %{sources[index]}: {error}") from None
    yield from group.items()


def _window(graph: Graph, node: Node, weights: Array) -> Window:
    view = registry.Infer(registry.get(node.op), node, graph.constants)
    return window_of(view, weights.shape[2:])


def _groups(node: Node) -> int:
    groups = node.attrs.get("group", 1)
    assert isinstance(groups, int), "type inference checks it"
    return groups
