"""Depthwise convolutions on a GPU: each channel has weights of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Packed, Request
from lathe.core.kernels.conv.cuda_spec import conv_windows, is_covered, is_depthwise, sizes_of, transposed_windows
from lathe.core.kernels.conv.spec import extra_indices, inplace_extras
from lathe.core.kernels.shared.cuda_image import Image, results_of, strided_image
from lathe.core.kernels.shared.cuda_product import Results
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.kernels.shared.nest import Nest, traffic

_TILES = ((64, 32, 4), (16, 64, 4), (128, 16, 4))  # pixels, channels, warps


@dataclass(frozen=True)
class DepthwiseSpec(KernelSpec):
    """A depthwise convolution; a program computes `height` pixels of `width` adjacent channels.

    `pixels`, `results` and `transposed` are as in `lathe.core.kernels.conv.cuda_spec.ConvSpec`; `weight` is the type of
    the weights in memory.
    """

    family: ClassVar[str] = "depthwise"
    generator: ClassVar[str] = "depthwise.cuda"
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


def depthwise(request: Request) -> KernelCall | None:
    """Selector of depthwise Conv, FusedConv and ConvTranspose whose spatial sizes are numbers, in any layout.

    The types are float32, float16 and bfloat16, with weights of the same type or float32; several groups have one
    channel each. None for other nodes, if generated code cannot compute a dimension, if the padding is not known or is
    not zero, and if the epilogue has operators that are not elementwise.
    """
    return next(_calls(request), None)


def other_tiles(request: Request) -> Iterable[KernelCall]:
    """Offers of the convolution of `depthwise` with every candidate tile, the selector's own included.

    No offers for nodes that `depthwise` does not cover.
    """
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    node, (x, w), transposed = request.node, request.node.inputs[:2], request.node.op == "ConvTranspose"
    if x is None or w is None or not is_covered(node) or not is_depthwise(node, w):
        return
    windows = (transposed_windows if transposed else conv_windows)(node, x, w)
    if windows is None:
        return
    image, channels = strided_image(request, x, windows), sizes_of(w)[0]
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
