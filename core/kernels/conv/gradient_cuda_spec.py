"""The gradient of a convolution with respect to its weights, on a GPU: a matrix product over all pixels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from lathe.core.ir.types import Dim
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.conv.cuda_spec import sizes_of
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.cuda_image import Image, spatial, strided_image
from lathe.core.kernels.shared.cuda_product import FACTORS, TiledProduct, precisions, split_operands
from lathe.core.kernels.shared.cuda_product_tiles import ProductTile, parts_of, ranked_tiles
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.kernels.shared.nest import has_plannable_types, traffic
from lathe.core.kernels.shared.window import windows_of


@dataclass(frozen=True)
class ConvGradientSpec(KernelSpec):
    """dW[g, m, c, place] = sum over pixels of dY[pixel, g, m] * X[place of the pixel's window, g, c].

    Rows are output channels m of a group, columns are (c, place), depth is the pixels. `parts` programs share the depth
    of a tile (split-K).
    """

    family: ClassVar[str] = "conv_gradient"
    generator: ClassVar[str] = "conv.gradient_cuda"
    image: Image  # X
    results: Image  # dY, with a pixel for each window
    groups: int
    rows: int
    channels: int  # of X in a group
    tile: ProductTile
    precision: str
    parts: int

    @property
    def columns(self) -> int:
        return self.channels * self.image.places

    @property
    def programs(self) -> Dim:
        return self.groups * blocks(self.rows, self.tile.rows) * blocks(self.columns, self.tile.columns)

    @property
    def summary(self) -> str:
        return f"conv weight gradient {self.image.dtype} {self.tile}, {self.parts} parts"


def conv_gradient(request: Request) -> KernelCall | None:
    """Selector of ConvWeightGradient of float32, float16 and bfloat16 whose spatial sizes are numbers, in any layout.

    X and dY have the same type. None for other nodes, and if generated code cannot compute a dimension.
    """
    kernels = _kernels(request)
    return kernels.preferred() if kernels is not None else None


def other_tiles(request: Request) -> Iterable[KernelCall]:
    """Offers of the gradient of `conv_gradient` with other tiles and precisions, the selector's own included.

    No offers for nodes that `conv_gradient` does not cover.
    """
    kernels = _kernels(request)
    return kernels.offers() if kernels is not None else ()


def _kernels(request: Request) -> TiledProduct | None:
    """The kernels of a gradient; None if it is not covered."""
    node, (x, dy) = request.node, request.node.inputs
    if x is None or dy is None or not has_plannable_types(node) or x.dtype not in FACTORS:
        return None
    windows = windows_of(node, spatial(node, x), spatial(node, dy)) if dy.dtype is x.dtype else None
    if windows is None:
        return None
    image, groups = strided_image(request, x, windows), int(attribute(node, "group"))
    outputs, channels, *_ = sizes_of(node.output)
    columns = channels * image.places
    results = strided_image(request, dy, windows)

    def call(tile: ProductTile, precision: str) -> KernelCall:
        spec = ConvGradientSpec(image, results, groups, outputs // groups, channels, tile, precision, 1)
        parts = parts_of(request.gpu, tile, spec.programs, image.pixels)
        return KernelCall(
            replace(spec, parts=parts),
            (In(0), In(1), Out(), *split_operands(tile, spec.programs, parts)),
            strided=(In(0), In(1)),
            flops=image.pixels * (2 * outputs * columns),
            bytes=traffic(node),
            grid=(spec.programs, parts),
        )

    tiles = ranked_tiles(request.gpu, outputs // groups, columns, image.pixels, groups, x.dtype)
    return TiledProduct(call, tiles, precisions(x.dtype, request.gpu))
