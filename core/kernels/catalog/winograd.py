"""3x3 convolutions by Winograd's algorithm (Lavin and Gray, 2015): F(4x4, 3x3) takes a quarter of the multiplications,
F(2x2, 3x3) for small images four ninths, with less than half the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, TypeAlias

import numpy as np

from core.ir.dim import product
from core.ir.graph import Array
from core.ir.types import Dim, DType
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Packed, Request, Scratch, covers, offers, select
from core.kernels.catalog.conv import (
    Finish,
    extra_indices,
    finish_of,
    in_lines,
    inplace_extras,
    is_winograd,
    windows_of,
)
from core.kernels.catalog.nest import traffic
from core.kernels.catalog.panels import LINE, Tile, choose_tile, pack_panels
from core.kernels.catalog.pool import Window
from core.kernels.catalog.words import WORD_BYTES, pack_words, per_word

Matrix: TypeAlias = tuple[tuple[float, ...], ...]

TABLE_LANES = 8  # entries of a line in the table of places: those of a tile, rounded up to a vector
_BLOCK = 24  # tiles of a task: few enough that both intermediates stay near, enough to use the weights well
_FAR_BYTES = 16 << 20  # weights that the last-level cache does not hold beside the rest: more tiles must share them
_LARGE_IMAGE = 12  # results along an axis from which large tiles cover an image well and are many


@dataclass(frozen=True)
class Form:
    """F(output x output, 3x3) by evaluating at `points` and at infinity (Toom and Cook). Points come in pairs of either
    sign behind 0, which lets transforms share sums."""

    output: int  # results of a tile along an axis
    points: tuple[float, ...]

    @property
    def input(self) -> int:
        """Places of the image that they need."""
        return self.output + 2

    @property
    def products(self) -> int:
        return self.input**2

    @property
    def image(self) -> Matrix:
        """The transform of a line of the image: row p holds the polynomial that is zero at all other points."""
        rows = [(*_with_zeros(self._others(p)), 0.0) for p in self.points]
        return (*rows, _with_zeros(self.points))

    @property
    def result(self) -> Matrix:
        """The transform of a line of products: row i holds the powers p**i."""
        last = self.output - 1
        return tuple((*(p**i for p in self.points), float(i == last)) for i in range(self.output))

    @property
    def weight(self) -> Matrix:
        """The transform of a line of weights, divided by what the polynomials are at their own points."""
        rows = [tuple(p**i / float(np.prod([p - o for o in self._others(p)])) for i in range(3)) for p in self.points]
        return (*rows, (0.0, 0.0, 1.0))

    def _others(self, point: float) -> list[float]:
        return [other for other in self.points if other != point]


LARGE = Form(4, (0.0, 5 / 8, -5 / 8, 3 / 2, -3 / 2))  # among simple points these lose the least to rounding
SMALL = Form(2, (0.0, 1.0, -1.0))


def _with_zeros(points: Sequence[float]) -> tuple[float, ...]:
    """The coefficients of the polynomial that has these zeros, the constant one first."""
    return tuple(float(c) for c in np.poly(points)[::-1])


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
    form: Form
    element: DType = DType.FLOAT32

    @property
    def depth(self) -> int:
        """Channels in words."""
        return self.channels // per_word(self.element)

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of an image along its two axes; the last ones may reach beyond the result."""
        lines, columns = (-(-window.count // self.form.output) for window in self.windows)
        return lines, columns

    @property
    def tiles(self) -> Dim:
        return self.batch * product(self.grid)

    @property
    def input_step(self) -> int:
        """Words from one matrix of transformed places to the next: a line more than they take, lest all of them meet in
        the same sets of the nearest cache."""
        return self.block * self.depth + LINE

    @property
    def output_step(self) -> int:
        """The same for the products."""
        return self.block * self.columns + LINE

    @property
    def scratch_words(self) -> int:
        """Both intermediates, [products][block][depth] and [products][block][columns]; the table of places; a pixel of
        zeros."""
        table = 2 * self.form.input * TABLE_LANES  # of int64
        return self.form.products * (self.input_step + self.output_step) + table + self.depth

    @property
    def summary(self) -> str:
        kind = "" if self.element is DType.FLOAT32 else f"{self.element} "
        return f"conv {kind}3x3 winograd {self.form.output}x{self.form.output} {self.tile}"


@covers("FusedConv", "Conv")
def winograd(request: Request) -> KernelCall | None:
    """For the convolutions that `core.kernels.catalog.conv.is_winograd` picks."""
    node, weight, windows = request.node, request.constant(1), windows_of(request.node)
    if weight is None or windows is None or not is_winograd(request, weight, windows):
        return None
    columns, channels = weight.shape[:2]
    batch, finish = node.output.shape[0], finish_of(node, request)
    (lines, places), element = windows, node.inputs[0].dtype if node.inputs[0] is not None else DType.FLOAT32
    form = _form((lines, places), element)
    block = _BLOCK if form.products * channels * columns * WORD_BYTES < _FAR_BYTES else 2 * _BLOCK
    tile = choose_tile(request.cpu, block, columns, request.rank)
    spec = WinogradSpec(batch, (lines, places), channels, columns, finish, tile, block, form, element)
    key = f"winograd{form.output}x{tile.columns}x{tile.lanes}{element}"
    pack_weights = Packed(1, key, partial(pack, tile=tile, form=form, element=element))
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
        strided=in_lines(request),
        flops=node.output.tensor.size * (2 * weight[0].size),
        bytes=traffic(node),
    )


def _form(windows: tuple[Window, Window], element: DType) -> Form:
    """The large form multiplies least; in bfloat16 it would lose four times as much to rounding as the definition."""
    large = element is DType.FLOAT32 and all(window.count >= _LARGE_IMAGE for window in windows)
    return LARGE if large else SMALL


@offers("FusedConv", "Conv")
def by_definition(request: Request) -> Iterator[KernelCall]:
    """What would run without Winograd: on machines whose memory is slow, its larger weights may not pay."""
    plain = select(replace(request, winograd=False))
    if plain is not None and winograd(request) is not None:
        yield plain


def pack(weight: Array, tile: Tile, form: Form = LARGE, element: DType = DType.FLOAT32) -> Array:
    """[O, I, 3, 3] as panels of the transformed matrices [I, O]."""
    outputs, inputs = weight.shape[:2]
    both = np.kron(form.weight, form.weight)  # the transform of rows and of columns in one product
    transformed = both @ weight.reshape(-1, 9).T.astype(np.float64)
    matrices = transformed.astype(np.float32).reshape(form.products, outputs, inputs).swapaxes(1, 2)
    return pack_panels(pack_words(matrices, element), tile)
