"""Gather along one axis on a GPU: rows selected by an index tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import Flag, KernelCall, KernelSpec, Request
from lathe.core.kernels.indexing import gather_spec as on_cpu
from lathe.core.kernels.shared.cuda_tiling import blocks

_BLOCKS = ((1024, 4), (256, 2), (2048, 8))  # elements, warps


@dataclass(frozen=True)
class GatherSpec(KernelSpec):
    """y[o, c, i] = x[o, indices[c], i] for x [outer, extent, inner], `count` indices and y [outer, count, inner].

    An element has `itemsize` bytes. Negative indices count from the end; an index out of range sets the status flag,
    the last operand, and its results are not stored. A program computes `size` results.
    """

    family: ClassVar[str] = "gather"
    generator: ClassVar[str] = "indexing.gather_cuda"
    itemsize: int
    index: DType
    outer: Dim
    extent: Dim
    count: Dim
    inner: Dim
    size: int
    warps: int

    @property
    def results(self) -> Dim:
        return product((self.outer, self.count, self.inner))

    @property
    def summary(self) -> str:
        return f"gather({self.inner} of {self.itemsize} bytes from {self.extent}, {self.size} a program)"


def gather(request: Request) -> KernelCall | None:
    """Selector of Gather of elements of 1, 2, 4 or 8 bytes by int32 or int64 indices, along any axis.

    None for other nodes, and if generated code cannot compute a dimension.
    """
    return next(_calls(request), None)


def other_sizes(request: Request) -> Iterable[KernelCall]:
    """Offers of the kernel of `gather` with every candidate number of results per program, the selector's own included.

    No offers for nodes that `gather` does not cover.
    """
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    call = on_cpu.gather(request)
    if call is None or not isinstance(call.spec, on_cpu.GatherSpec):
        return
    old = call.spec
    for size, warps in _BLOCKS:
        spec = GatherSpec(old.itemsize, old.index, old.outer, old.extent, old.count, old.inner, size, warps)
        yield replace(call, spec=spec, operands=(*call.operands, Flag()), grid=(blocks(spec.results, size),))
