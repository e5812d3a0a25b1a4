"""Reductions over any axes on a GPU, global pooling and ArgMax among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from core.ir.types import Dim, DType
from core.kernels.catalog import reduce as on_cpu
from core.kernels.catalog.base import KernelCall, KernelSpec, Request, covers, offers
from core.kernels.catalog.cuda.lines import Lines, covering, middle_axis
from core.kernels.catalog.cuda.product import FACTORS, ProductTile, parts_of, split_operands
from core.kernels.catalog.nest import Nest

_DTYPES = on_cpu.NUMBERS | FACTORS
SUMS = frozenset({"ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum"})


@dataclass(frozen=True)
class ReduceSpec(KernelSpec):
    """`kind` (the operator's name) of every line of the first operand; the second has one element for each. Where there
    are few lines, `parts` programs share each."""

    family: ClassVar[str] = "reduce"
    kind: str
    dtype: DType
    lines: Lines
    count: Dim  # elements that make one result
    parts: int = 1

    @property
    def summary(self) -> str:
        return f"reduce({self.kind}, {self.lines.tile})"


@dataclass(frozen=True)
class ArgReduceSpec(KernelSpec):
    """Where (int64) in each line the greatest or least element is; the first or the last one of equals."""

    family: ClassVar[str] = "argreduce"
    dtype: DType
    lines: Lines
    least: bool
    last: bool

    @property
    def summary(self) -> str:
        return f"arg{'min' if self.least else 'max'}({self.lines.length}, {self.lines.tile})"


@covers(*on_cpu.KINDS, device="cuda")
def reduce(request: Request) -> KernelCall | None:
    return next(_reductions(request), None)


@offers(*on_cpu.KINDS, device="cuda")
def other_tiles(request: Request) -> Iterable[KernelCall]:
    return _reductions(request)


def _reductions(request: Request) -> Iterator[KernelCall]:
    call = on_cpu.call_of(request, lambda kind, dtype: dtype in _DTYPES)
    if call is None or not isinstance(call.spec, on_cpu.ReduceSpec):
        return
    spec = call.spec
    lines, along = _parts(spec.nest, spec.kept), _parts(spec.nest, spec.reduced)
    for cover in covering(lines, along):
        parts = _parts_of(request, spec, cover)
        yield replace(
            call,
            spec=ReduceSpec(spec.kind, spec.dtype, cover, spec.count, parts),
            operands=(*call.operands, *split_operands(_size(cover), cover.programs, parts)),
            grid=(cover.programs, parts),
        )


def _parts_of(request: Request, spec: on_cpu.ReduceSpec, lines: Lines) -> int:
    """Sums of floats only: they are what gradients and statistics need."""
    if spec.kind not in SUMS or spec.dtype not in FACTORS or lines.whole:
        return 1
    return parts_of(request.gpu, _size(lines), lines.programs, lines.length)


def _size(lines: Lines) -> ProductTile:
    tile = lines.tile
    return ProductTile(tile.rows, tile.columns, tile.columns, tile.warps, 1)


def _parts(nest: Nest, loops: tuple[int, ...]) -> Nest:
    return nest.take(loops).collapsed()


@covers("ArgMax", "ArgMin", device="cuda")
def arg_reduce(request: Request) -> KernelCall | None:
    return next(_arg_reductions(request), None)


@offers("ArgMax", "ArgMin", device="cuda")
def other_tiles_of_places(request: Request) -> Iterable[KernelCall]:
    return _arg_reductions(request)


def _arg_reductions(request: Request) -> Iterator[KernelCall]:
    call = on_cpu.arg_call_of(request, _DTYPES)
    if call is None or not isinstance(call.spec, on_cpu.ArgReduceSpec):
        return
    spec = call.spec
    for lines in covering(*middle_axis(spec.outer, spec.length, spec.inner)):
        yield replace(call, spec=ArgReduceSpec(spec.dtype, lines, spec.least, spec.last), grid=(lines.programs,))
