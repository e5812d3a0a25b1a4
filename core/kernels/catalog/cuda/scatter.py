"""Scatter on a GPU: what an index tensor says is written into a copy of a tensor, or added to it, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from core.ir.dim import product
from core.ir.types import Dim
from core.kernels.catalog import scatter as on_cpu
from core.kernels.catalog.base import Flag, KernelCall, Request, covers, offers
from core.kernels.catalog.cuda.tiling import blocks

_ROW_TILES = ((64, 64, 4), (16, 128, 4), (256, 16, 4))  # rows, elements of each, warps
_LINES = (128, 4)  # of a program, and its warps: one for each thread, which alone may touch it


@dataclass(frozen=True)
class ScatterRowsSpec(on_cpu.ScatterRowsSpec):
    """As on the CPU; the last operand is the flag.

    A program owns `rows` rows, of which it has `columns` elements each in registers while it goes through all indices:
    what is added to a row is added in one order.
    """

    rows: int
    columns: int
    warps: int

    @property
    def height(self) -> Dim:
        return product(self.extents)

    @property
    def summary(self) -> str:
        return f"scatter({self.reduction}, {self.rows} rows by {self.columns})"


@dataclass(frozen=True)
class ScatterElementsSpec(on_cpu.ScatterElementsSpec):
    """As on the CPU; the last operand is the flag. Each thread owns one line along the axis of the indices."""

    lines: int
    warps: int


@covers("ScatterND", device="cuda")
def scatter_rows(request: Request) -> KernelCall | None:
    return next(_rows(request), None)


@offers("ScatterND", device="cuda")
def other_tiles(request: Request) -> Iterable[KernelCall]:
    return _rows(request)


@covers("ScatterElements", device="cuda")
def scatter_elements(request: Request) -> KernelCall | None:
    call = on_cpu.scatter_elements(request)
    if call is None or not isinstance(call.spec, on_cpu.ScatterElementsSpec):
        return None
    lines, warps = _LINES
    spec = ScatterElementsSpec(**call.spec.facts, lines=lines, warps=warps)
    return replace(call, spec=spec, operands=(*call.operands, Flag()), grid=(blocks(spec.outer * spec.inner, lines),))


def _rows(request: Request) -> Iterator[KernelCall]:
    call = on_cpu.scatter_rows(request)
    if call is None or not isinstance(call.spec, on_cpu.ScatterRowsSpec):
        return
    for rows, columns, warps in _ROW_TILES:
        spec = ScatterRowsSpec(**call.spec.facts, rows=rows, columns=columns, warps=warps)
        grid = (blocks(spec.height, rows) * blocks(spec.inner, columns),)
        yield replace(call, spec=spec, operands=(*call.operands, Flag()), grid=grid)
