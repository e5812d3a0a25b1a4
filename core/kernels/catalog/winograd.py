"""3x3 convolutions by Winograd's F(4x4, 3x3): a quarter of the multiplications (Lavin and Gray, 2015)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from core.ir.dim import product
from core.ir.graph import Array
from core.ir.types import Dim, DType
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Packed, Request, Scratch, covers
from core.kernels.catalog.conv import Finish, extra_indices, finish_of, inplace_extras, is_winograd, windows_of
from core.kernels.catalog.nest import traffic
from core.kernels.catalog.panels import Tile, choose_tile, pack_panels
from core.kernels.catalog.pool import Window
from core.kernels.catalog.words import WORD_BYTES, pack_words, per_word

OUTPUT = 4  # results of a tile along an axis
INPUT = 6  # places of the image that they need
PRODUCTS = INPUT * INPUT
TABLE_LANES = 8  # entries of a line in the table of places: INPUT, rounded up to a vector
_BLOCK = 24  # tiles of a task: few enough that both intermediates stay near, enough to use the weights well

_POINTS = (0.0, 5 / 8, -5 / 8, 3 / 2, -3 / 2)  # and infinity: among simple ones these lose the least to rounding


def _without(points: Sequence[float]) -> tuple[float, ...]:
    """The coefficients of the polynomial that has these zeros, the constant one first."""
    return tuple(float(c) for c in np.poly(points)[::-1])


def _others(point: float) -> list[float]:
    return [other for other in _POINTS if other != point]


# Rows of the transforms of image, results and weights (Toom and Cook: evaluate, multiply, interpolate).
IMAGE = (*((*_without(_others(p)), 0.0) for p in _POINTS), _without(_POINTS))
RESULT = tuple((*(p**i for p in _POINTS), float(i == OUTPUT - 1)) for i in range(OUTPUT))
_WEIGHT = (*([p**i / np.prod([p - o for o in _others(p)]) for i in range(3)] for p in _POINTS), [0.0, 0.0, 1.0])


@dataclass(frozen=True)
class WinogradSpec(KernelSpec):
    """A task transforms up to `block` tiles of the image, multiplies, and transforms back, all in its scratch.

    `element` is the type of the image and of what is multiplied.
    """

    family: ClassVar[str] = "winograd"
    batch: Dim
    windows: tuple[Window, Window]
    channels: int
    columns: int
    finish: Finish
    tile: Tile
    block: int
    element: DType = DType.FLOAT32

    @property
    def depth(self) -> int:
        """Channels in words."""
        return self.channels // per_word(self.element)

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of an image along its two axes; the last ones may reach beyond the result."""
        lines, columns = (-(-window.count // OUTPUT) for window in self.windows)
        return lines, columns

    @property
    def tiles(self) -> Dim:
        return self.batch * product(self.grid)

    @property
    def scratch_words(self) -> int:
        """Both intermediates, [36][block][depth] and [36][block][columns]; the table of places; a pixel of zeros."""
        table = 2 * INPUT * TABLE_LANES  # of int64
        return PRODUCTS * self.block * (self.depth + self.columns) + table + self.depth

    @property
    def summary(self) -> str:
        kind = "" if self.element is DType.FLOAT32 else f"{self.element} "
        return f"conv {kind}3x3 winograd 4x4 {self.tile}"


@covers("FusedConv", "Conv")
def winograd(request: Request) -> KernelCall | None:
    """For the convolutions that `core.kernels.catalog.conv.is_winograd` picks."""
    node, weight, windows = request.node, request.constant(1), windows_of(request.node)
    if weight is None or windows is None or not is_winograd(node, weight, windows, request.target):
        return None
    columns, channels = weight.shape[:2]
    batch, finish = node.output.shape[0], finish_of(node)
    tile = choose_tile(request.target, _BLOCK, columns, request.rank)
    (lines, places), element = windows, node.inputs[0].dtype if node.inputs[0] is not None else DType.FLOAT32
    spec = WinogradSpec(batch, (lines, places), channels, columns, finish, tile, _BLOCK, element)
    pack_weights = Packed(1, f"winograd{tile.columns}x{tile.lanes}{element}", partial(pack, tile=tile, element=element))
    return KernelCall(
        spec,
        (
            In(0),
            pack_weights,
            *(In(i) for i in extra_indices(node)),
            Out(0),
            Scratch(spec.scratch_words * WORD_BYTES),
        ),
        inplace=inplace_extras(node),
        flops=node.output.tensor.size * (2 * weight[0].size),
        bytes=traffic(node),
    )


def pack(weight: Array, tile: Tile, element: DType = DType.FLOAT32) -> Array:
    """[O, I, 3, 3] as panels of 36 transformed matrices [I, O]."""
    outputs, inputs = weight.shape[:2]
    both = np.kron(_WEIGHT, _WEIGHT)  # [36, 9]: the transform of rows and of columns in one product
    transformed = both @ weight.reshape(-1, 9).T.astype(np.float64)
    matrices = transformed.astype(np.float32).reshape(PRODUCTS, outputs, inputs).swapaxes(1, 2)
    return pack_panels(pack_words(matrices, element), tile)
