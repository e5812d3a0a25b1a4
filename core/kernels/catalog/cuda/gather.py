"""Gather along one axis on a GPU: rows picked by an index tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from core.ir.dim import product
from core.ir.types import Dim, DType
from core.kernels.catalog import gather as on_cpu
from core.kernels.catalog.base import Flag, KernelCall, KernelSpec, Request, covers, offers
from core.kernels.catalog.cuda.tiling import blocks

_BLOCKS = ((1024, 4), (256, 2), (2048, 8))  # elements, warps


@dataclass(frozen=True)
class GatherSpec(KernelSpec):
    """As `core.kernels.catalog.gather.GatherSpec`; the last operand is the flag. A program has `size` results."""

    family: ClassVar[str] = "gather"
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


@covers("Gather", device="cuda")
def gather(request: Request) -> KernelCall | None:
    return next(_calls(request), None)


@offers("Gather", device="cuda")
def other_sizes(request: Request) -> Iterable[KernelCall]:
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    call = on_cpu.gather(request)
    if call is None or not isinstance(call.spec, on_cpu.GatherSpec):
        return
    old = call.spec
    for size, warps in _BLOCKS:
        spec = GatherSpec(old.itemsize, old.index, old.outer, old.extent, old.count, old.inner, size, warps)
        yield replace(call, spec=spec, operands=(*call.operands, Flag()), grid=(blocks(spec.results, size),))
