"""The gradient of MaxPool on a GPU: every place of an image asks the windows over it whether it was their greatest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from core.ir.types import Dim
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Request, covers, offers
from core.kernels.catalog.cuda.image import Image, image_axes, spatial, walked
from core.kernels.catalog.cuda.pool import image_tiles
from core.kernels.catalog.cuda.product import FACTORS
from core.kernels.catalog.cuda.tiling import blocks
from core.kernels.catalog.nest import has_plannable_types, traffic
from core.kernels.catalog.pool import windows_of


@dataclass(frozen=True)
class PoolGradientSpec(KernelSpec):
    """dX, which lies as X does, is the sum of dY over the windows whose first greatest element this is.

    A program has `rows` places of `columns` channels.
    """

    family: ClassVar[str] = "pool_gradient"
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


@covers("MaxPoolGradient", device="cuda")
def pool_gradient(request: Request) -> KernelCall | None:
    """None for other element types, and sizes that are not known."""
    return next(_calls(request), None)


@offers("MaxPoolGradient", device="cuda")
def other_tiles(request: Request) -> Iterable[KernelCall]:
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    node, (x, dy) = request.node, request.node.inputs
    if x is None or dy is None or not has_plannable_types(node) or x.dtype not in FACTORS or dy.dtype is not x.dtype:
        return
    windows = windows_of(node, spatial(node, x), spatial(node, dy))
    if windows is None:
        return
    image, results = walked(request, x, windows), walked(request, dy, windows)
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
