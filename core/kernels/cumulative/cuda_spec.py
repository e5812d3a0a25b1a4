"""Cumulative sums along any axis on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute, axis_of, integers
from lathe.core.kernels.shared.cuda_lines import NUMBERS, LineTile, covering, middle_axis
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.kernels.shared.nest import has_plannable_types, traffic


@dataclass(frozen=True)
class CumulativeSpec(KernelSpec):
    """Each element of [outer, length, inner] becomes the sum of all elements up to it along the middle axis.

    The element itself is left out if `exclusive`; the sum runs from the end if `reverse`. A program computes
    `tile.rows` lines, chunk by chunk.
    """

    family: ClassVar[str] = "cumulative"
    generator: ClassVar[str] = "cumulative.cuda"
    dtype: DType
    outer: Dim
    length: Dim
    inner: Dim
    exclusive: bool
    reverse: bool
    tile: LineTile

    @property
    def summary(self) -> str:
        return f"running sums({self.length}, {self.tile})"


def running_sums(request: Request) -> KernelCall | None:
    """Selector of CumSum of integers of 8 to 64 bits and floats of 16 to 64 bits, along an axis that is an attribute.

    None for other nodes, if the axis is an input, for scalars, and if generated code cannot compute a dimension.
    """
    return next(_calls(request), None)


def other_tiles(request: Request) -> Iterable[KernelCall]:
    """Offers of the kernel of `running_sums` with every candidate tile, the selector's own included.

    No offers for nodes that `running_sums` does not cover.
    """
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    node, axis = request.node, integers(request.node, "axis")
    y = node.output
    known = axis is not None and all(value is None for value in node.inputs[1:])
    if axis is None or not known or not has_plannable_types(node) or y.dtype not in NUMBERS or not y.shape:
        return
    at = axis_of(axis[0], len(y.shape))
    outer, length, inner = product(y.shape[:at]), y.shape[at], product(y.shape[at + 1 :])
    exclusive, reverse = (bool(attribute(node, name)) for name in ("exclusive", "reverse"))
    for lines in covering(*middle_axis(outer, length, inner)):
        spec = CumulativeSpec(y.dtype, outer, length, inner, exclusive, reverse, lines.tile)
        grid = (blocks(outer * inner, lines.tile.rows),)
        yield KernelCall(spec, (In(0), Out()), flops=y.tensor.size, bytes=traffic(node), grid=grid)
