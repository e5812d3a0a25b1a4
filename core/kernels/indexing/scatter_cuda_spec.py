"""ScatterND and ScatterElements on a GPU: updates are combined with a copy of a tensor, in the order of indices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim
from lathe.core.kernels.call import Flag, KernelCall, Request
from lathe.core.kernels.indexing import scatter_spec as on_cpu
from lathe.core.kernels.shared.cuda_tiling import blocks

_ROW_TILES = ((64, 64, 4), (16, 128, 4), (256, 16, 4))  # rows, elements of each, warps
_LINES = (128, 4)  # lines and warps of a program: each thread owns one line


@dataclass(frozen=True)
class ScatterRowsSpec(on_cpu.ScatterRowsSpec):
    """ScatterND with the fields of the CPU's spec; the last operand is the status flag.

    A program owns `columns` elements of each of `rows` rows. It holds them in registers while it reads all indices, so
    that updates of a row are combined in a fixed order.
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
    """ScatterElements with the fields of the CPU's spec; the last operand is the status flag.

    Each thread owns one line along the axis of the indices; a program has `lines` lines.
    """

    lines: int
    warps: int


def scatter_rows(request: Request) -> KernelCall | None:
    """Selector of ScatterND of float32, float64, int32 and int64, by a known number of int32 or int64 coordinates.

    None for other nodes, and if generated code cannot compute a dimension.
    """
    return next(_rows(request), None)


def other_tiles(request: Request) -> Iterable[KernelCall]:
    """Offers of the kernel of `scatter_rows` with every candidate tile, the selector's own included.

    No offers for nodes that `scatter_rows` does not cover.
    """
    return _rows(request)


def scatter_elements(request: Request) -> KernelCall | None:
    """Selector of ScatterElements of float32, float64, int32 and int64 by int32 or int64 indices.

    None for other nodes, if generated code cannot compute a dimension, and if the indices differ from x in an extent
    along an axis other than the operator's.
    """
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
