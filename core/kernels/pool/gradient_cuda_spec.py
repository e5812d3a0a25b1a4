"""The gradient of MaxPool on a GPU: each place of the image adds up the gradients of windows whose maximum it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.types import Dim
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.pool.cuda_spec import image_tiles
from lathe.core.kernels.shared.cuda_image import Image, image_axes, spatial, strided_image
from lathe.core.kernels.shared.cuda_product import FACTORS
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.kernels.shared.nest import has_plannable_types, traffic
from lathe.core.kernels.shared.window import windows_of


@dataclass(frozen=True)
class PoolGradientSpec(KernelSpec):
    """dX at a place is the sum of dY over the windows whose first maximum lies there.

    A program computes `rows` places of `columns` channels.
    """

    family: ClassVar[str] = "pool_gradient"
    generator: ClassVar[str] = "pool.gradient_cuda"
    image: Image  # X
    results: Image  # dY, with a pixel for each window
    channels: Dim
    to: tuple[Dim, ...]  # strides of dX along batch, spatial axes and channels
    rows: int
    columns: int
    warps: int

    @property
    def summary(self) -> str:
        kernel = "x".join(map(str, self.image.kernel))
        return f"maxpool gradient({kernel}, {self.rows} places by {self.columns} channels)"


def pool_gradient(request: Request) -> KernelCall | None:
    """Selector of MaxPoolGradient of float32, float16 and bfloat16 whose spatial sizes are numbers, in any layout.

    X and dY have the same type; batch and channels may have symbols. None for other nodes, and if generated code cannot
    compute a dimension.
    """
    return next(_calls(request), None)


def other_tiles(request: Request) -> Iterable[KernelCall]:
    """Offers of the gradient of `pool_gradient` with every candidate tile, the selector's own included.

    No offers for nodes that `pool_gradient` does not cover.
    """
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    node, (x, dy) = request.node, request.node.inputs
    if x is None or dy is None or not has_plannable_types(node) or x.dtype not in FACTORS or dy.dtype is not x.dtype:
        return
    windows = windows_of(node, spatial(node, x), spatial(node, dy))
    if windows is None:
        return
    image, results = strided_image(request, x, windows), strided_image(request, dy, windows)
    axes, strides = image_axes(node, len(x.shape)), request.strides_of(node.output)
    channels = x.shape[axes[-1]]
    for rows, columns, warps in image_tiles(image):
        to = tuple(strides[axis] for axis in axes)
        yield KernelCall(
            PoolGradientSpec(image, results, channels, to, rows, columns, warps),
            (In(0), In(1), Out()),
            strided=(In(0), In(1), Out()),
            flops=dy.tensor.size * (2 * image.places),
            bytes=traffic(node),
            grid=(blocks(image.reached, rows) * blocks(channels, columns),),
        )
