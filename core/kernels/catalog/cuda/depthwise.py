"""Depthwise convolutions on a GPU: every channel has a window of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from core.ir.graph import Array
from core.ir.types import DType
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Operand, Out, Packed, Request, covers, offers
from core.kernels.catalog.conv import extra_indices, inplace_extras, windows_along
from core.kernels.catalog.cuda.conv import is_covered, is_depthwise, sizes_of
from core.kernels.catalog.cuda.image import Image, results_of, spatial, walked
from core.kernels.catalog.cuda.product import Results
from core.kernels.catalog.cuda.tiling import blocks
from core.kernels.catalog.nest import Nest, traffic

_TILES = ((64, 32, 4), (16, 64, 4), (128, 16, 4))  # pixels, channels, warps


@dataclass(frozen=True)
class DepthwiseSpec(KernelSpec):
    """A program makes `rows` pixels of `columns` neighbouring channels. Otherwise as `ConvSpec`."""

    family: ClassVar[str] = "depthwise"
    image: Image
    channels: int
    weight: DType
    weight_steps: tuple[int, int]  # along window places and channels
    pixels: Nest
    results: Results
    rows: int
    columns: int
    warps: int

    @property
    def summary(self) -> str:
        return f"depthwise {'x'.join(map(str, self.image.kernel))}, {self.rows} pixels by {self.columns} channels"


@covers("FusedConv", "Conv", device="cuda")
def depthwise(request: Request) -> KernelCall | None:
    return next(_calls(request), None)


@offers("FusedConv", "Conv", device="cuda")
def other_tiles(request: Request) -> Iterable[KernelCall]:
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    node, (x, w) = request.node, request.node.inputs[:2]
    if x is None or w is None or not is_covered(node) or not is_depthwise(node, w):
        return
    windows = windows_along(node, spatial(node, x), spatial(node, node.output), w.shape[2:])
    if windows is None:
        return
    image, channels = walked(request, x, windows), sizes_of(w)[0]
    pixels, results = results_of(request, extra_indices(node))
    operand: Operand = In(1)
    dtype, steps = w.dtype, (1, image.places)
    if request.constant(1) is not None:
        operand, dtype = Packed(1, f"depthwise{x.dtype}", partial(_pack, element=x.dtype)), x.dtype
        steps = (channels, 1)
    extras = [In(i) for i in extra_indices(node)]
    for rows, columns, warps in _TILES:
        yield KernelCall(
            DepthwiseSpec(image, channels, dtype, steps, pixels, results, rows, columns, warps),
            (In(0), operand, *extras, Out()),
            inplace=inplace_extras(node),
            strided=(In(0), *extras, Out()),
            flops=node.output.tensor.size * (2 * image.places),
            bytes=traffic(node),
            grid=(blocks(image.pixels, rows) * blocks(channels, columns),),
        )


def _pack(weight: Array, element: DType) -> Array:
    """[C, 1, K...] as [K..., C]."""
    return np.ascontiguousarray(weight.reshape(weight.shape[0], -1).T.astype(element.numpy))
