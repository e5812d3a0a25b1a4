"""MaxPool and AveragePool on a GPU, in any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.cuda_image import Image, image_axes, spatial, strided_image
from lathe.core.kernels.shared.cuda_product import FACTORS
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.kernels.shared.nest import has_plannable_types, traffic
from lathe.core.kernels.shared.window import windows_of

_TILES = ((16, 64, 4), (64, 32, 4), (256, 4, 4))  # pixels, channels, warps
_ACROSS = ((4, 256, 4), (16, 64, 4))  # for images whose channels are not contiguous: channels, pixels, warps
_DTYPES = {"MaxPool": FACTORS | {DType.INT8, DType.UINT8}, "AveragePool": FACTORS}


@dataclass(frozen=True)
class PoolSpec(KernelSpec):
    """Each result is the maximum or the mean of a window.

    `to` are the strides of Y along batch, spatial axes and channels. A program computes `rows` pixels of `columns`
    channels.
    """

    family: ClassVar[str] = "pool"
    generator: ClassVar[str] = "pool.cuda"
    image: Image
    channels: Dim
    to: tuple[Dim, ...]
    average: bool
    include_pad: bool  # padding counts in an average's divisor
    rows: int
    columns: int
    warps: int

    @property
    def summary(self) -> str:
        kind = "average" if self.average else "max"
        return f"{kind}pool({'x'.join(map(str, self.image.kernel))}, {self.rows} pixels by {self.columns} channels)"


def pool(request: Request) -> KernelCall | None:
    """Selector of MaxPool without indices and of AveragePool; batch and channels may have symbols.

    The types are float32, float16 and bfloat16, for MaxPool also int8 and uint8. None for other nodes, and if an extent
    of the image or of the result along a spatial axis is not a number.
    """
    return next(_calls(request), None)


def other_tiles(request: Request) -> Iterable[KernelCall]:
    """Offers of the pool of `pool` with every candidate tile, the selector's own included.

    No offers for nodes that `pool` does not cover.
    """
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    node, x = request.node, request.node.inputs[0]
    if x is None or not has_plannable_types(node) or len(node.outputs) > 1 or x.dtype not in _DTYPES[node.op]:
        return
    windows = windows_of(node, spatial(node, x), spatial(node, node.output))
    if windows is None:
        return
    image, axes = strided_image(request, x, windows), image_axes(node, len(x.shape))
    strides = request.strides_of(node.output)
    to, channels = tuple(strides[axis] for axis in axes), x.shape[axes[-1]]
    average, padded = node.op == "AveragePool", bool(attribute(node, "count_include_pad"))
    flops = node.output.tensor.size * image.places
    for rows, columns, warps in image_tiles(image):
        spec = PoolSpec(image, channels, to, average, padded, rows, columns, warps)
        grid = (blocks(image.pixels, rows) * blocks(channels, columns),)
        yield KernelCall(spec, (In(0), Out()), strided=(In(0), Out()), flops=flops, bytes=traffic(node), grid=grid)


def image_tiles(image: Image) -> tuple[tuple[int, int, int], ...]:
    """The candidate tiles as (pixels, channels, warps) of a program, the preferred one first.

    Most elements lie along the axis that is contiguous in memory: channels if their stride is 1, otherwise pixels.
    """
    if image.channel_step == 1:
        return _TILES
    return tuple((pixels, channels, warps) for channels, pixels, warps in _ACROSS)
