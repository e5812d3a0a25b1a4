"""PackImage on a GPU: one pass over images, which also converts their elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import floor_div, product
from lathe.core.ir.types import DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.cuda_image import image_axes
from lathe.core.kernels.shared.cuda_product import FACTORS
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.kernels.shared.nest import Nest, has_plannable_types, row_major, traffic

_PIXELS = (512, 256, 1024)  # of a program


@dataclass(frozen=True)
class PackImageSpec(KernelSpec):
    """A copy from `source` to `target` that adds channels of zeros.

    The loops of `nest` are image, block row, block column, row and column in the block, and channel; its operands are
    X and Y. The last loop has the channels of Y, of which X has the first `channels`. A program copies `pixels` of
    them.
    """

    family: ClassVar[str] = "pack_image"
    generator: ClassVar[str] = "copy.pack_image_cuda"
    source: DType
    target: DType
    nest: Nest
    channels: int
    pixels: int

    @property
    def summary(self) -> str:
        types = f"{self.source} to {self.target}, " if self.source is not self.target else ""
        added = self.nest.extents[-1] - self.channels
        return f"image({types}{self.channels} channels and {added}, {self.pixels} pixels a program)"


def pack_image(request: Request) -> KernelCall | None:
    """Selector of PackImage of float32, float16 and bfloat16 (x and y), with a known number of channels.

    None for other nodes, and if generated code cannot compute a dimension.
    """
    return next(_calls(request), None)


def other_sizes(request: Request) -> Iterable[KernelCall]:
    """Offers of the kernel of `pack_image` with other numbers of pixels in a program, the selector's own included.

    No offers for nodes that `pack_image` does not cover.
    """
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    node, x = request.node, request.node.required_input(0)
    if not has_plannable_types(node) or not {x.dtype, node.output.dtype} <= FACTORS:
        return
    block, channels = int(attribute(node, "block")), int(attribute(node, "channels"))
    axes = image_axes(node, len(x.shape))
    n, h, w, own = (x.shape[axis] for axis in axes)
    of_n, of_row, of_column, of_channel = (request.strides_of(x)[axis] for axis in axes)
    extents = (n, floor_div(h, block), floor_div(w, block), block, block, channels)
    walk = (of_n, of_row * block, of_column * block, of_row, of_column, of_channel)
    nest = Nest(extents, (walk, row_major(extents)))
    if not isinstance(own, int):
        return
    for pixels in _PIXELS:
        spec = PackImageSpec(x.dtype, node.output.dtype, nest, own, pixels)
        grid = (blocks(product(extents[:-1]), pixels),)
        yield KernelCall(spec, (In(0), Out()), strided=(In(0),), bytes=traffic(node), grid=grid)
