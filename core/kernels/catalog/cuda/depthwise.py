"""Depthwise convolutions on a GPU: every channel has a window of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from core.ir.graph import Array
from core.ir.types import Dim, DType
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Operand, Out, Packed, Request, covers, offers
from core.kernels.catalog.conv import extra_indices, inplace_extras
from core.kernels.catalog.cuda.conv import is_covered, is_depthwise, sizes_of, windows_over, windows_under
from core.kernels.catalog.cuda.image import Image, results_of, walked
from core.kernels.catalog.cuda.product import Results
from core.kernels.catalog.cuda.tiling import blocks
from core.kernels.catalog.nest import Nest, traffic

_TILES = ((64, 32, 4), (16, 64, 4), (128, 16, 4))  # pixels, channels, warps


@dataclass(frozen=True)
class DepthwiseSpec(KernelSpec):
    """A program makes `height` pixels of `width` neighbouring channels. Otherwise as `ConvSpec`."""

    family: ClassVar[str] = "depthwise"
    image: Image
    channels: int
    weight: DType
    weight_steps: tuple[int, int]  # along window places and channels
    pixels: Nest
    results: Results
    transposed: bool
    height: int
    width: int
    warps: int

    @property
    def rows(self) -> Dim:
        return self.image.reached if self.transposed else self.image.pixels

    @property
    def summary(self) -> str:
        kind = "transposed depthwise" if self.transposed else "depthwise"
        return f"{kind} {'x'.join(map(str, self.image.kernel))}, {self.height} pixels by {self.width} channels"


@covers("FusedConv", "Conv", "ConvTranspose", device="cuda")
def depthwise(request: Request) -> KernelCall | None:
    return next(_calls(request), None)


@offers("FusedConv", "Conv", "ConvTranspose", device="cuda")
def other_tiles(request: Request) -> Iterable[KernelCall]:
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    node, (x, w), transposed = request.node, request.node.inputs[:2], request.node.op == "ConvTranspose"
    if x is None or w is None or not is_covered(node) or not is_depthwise(node, w):
        return
    windows = (windows_under if transposed else windows_over)(node, x, w)
    if windows is None:
        return
    image, channels = walked(request, x, windows), sizes_of(w)[0]
    operand: Operand = In(1)
    dtype, steps = w.dtype, (1, image.places)
    if request.constant(1) is not None:
        operand, dtype = Packed(1, f"depthwise{x.dtype}", partial(_pack, element=x.dtype)), x.dtype
        steps = (channels, 1)
    extras = [In(i) for i in extra_indices(node)]
    walk = results_of(request, extra_indices(node))
    for height, width, warps in _TILES:
        spec = DepthwiseSpec(image, channels, dtype, steps, *walk, transposed, height, width, warps)
        yield KernelCall(
            spec,
            (In(0), operand, *extras, Out()),
            inplace=inplace_extras(node),
            strided=(In(0), *extras, Out()),
            flops=spec.rows * (2 * channels * image.places),
            bytes=traffic(node),
            grid=(blocks(spec.rows, height) * blocks(channels, width),),
        )


def _pack(weight: Array, element: DType) -> Array:
    """[C, 1, K...] as [K..., C]."""
    return np.ascontiguousarray(weight.reshape(weight.shape[0], -1).T.astype(element.numpy))
