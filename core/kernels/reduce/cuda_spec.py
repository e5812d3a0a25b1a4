"""Reductions over any axes on a GPU, including global pooling, ArgMax and ArgMin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import KernelCall, KernelSpec, Request
from lathe.core.kernels.reduce import spec as on_cpu
from lathe.core.kernels.shared.cuda_lines import Lines, covering, middle_axis
from lathe.core.kernels.shared.cuda_product import FACTORS, split_operands
from lathe.core.kernels.shared.cuda_product_tiles import ProductTile, parts_of
from lathe.core.kernels.shared.nest import Nest

_DTYPES = on_cpu.NUMBERS | FACTORS
SUMS = frozenset({"ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum"})


@dataclass(frozen=True)
class ReduceSpec(KernelSpec):
    """The reduction `kind` (as on the CPU) of each line of the first operand into one element of the second.

    If there are few lines, `parts` programs share each line.
    """

    family: ClassVar[str] = "reduce"
    generator: ClassVar[str] = "reduce.cuda"
    kind: str
    dtype: DType
    lines: Lines
    count: Dim  # elements per result
    parts: int = 1

    @property
    def summary(self) -> str:
        return f"reduce({self.kind}, {self.lines.tile})"


@dataclass(frozen=True)
class ArgReduceSpec(KernelSpec):
    """The index (int64) of the maximum or minimum of each line; the first or the last of equal elements."""

    family: ClassVar[str] = "argreduce"
    generator: ClassVar[str] = "reduce.arg_cuda"
    dtype: DType
    lines: Lines
    least: bool
    last: bool

    @property
    def summary(self) -> str:
        return f"arg{'min' if self.least else 'max'}({self.lines.length}, {self.lines.tile})"


def reduce(request: Request) -> KernelCall | None:
    """Selector of Reduce operators over known axes, GlobalAveragePool and GlobalMaxPool.

    The types are float64, float32, float16, bfloat16, int64 and int32. None for other types, if the axes are an input,
    and if generated code cannot compute a dimension.
    """
    return next(_reductions(request), None)


def other_tiles(request: Request) -> Iterable[KernelCall]:
    """Offers of the reduction of `reduce` with every candidate tile, the selector's own included.

    No offers for nodes that `reduce` does not cover.
    """
    return _reductions(request)


def _reductions(request: Request) -> Iterator[KernelCall]:
    call = on_cpu.call_of(request, lambda kind, dtype: dtype in _DTYPES)
    if call is None or not isinstance(call.spec, on_cpu.ReduceSpec):
        return
    spec = call.spec
    lines, along = _parts(spec.nest, spec.kept_loops), _parts(spec.nest, spec.reduced_loops)
    for cover in covering(lines, along):
        parts = _parts_of(request, spec, cover)
        yield replace(
            call,
            spec=ReduceSpec(spec.kind, spec.dtype, cover, spec.count, parts),
            operands=(*call.operands, *split_operands(_size(cover), cover.programs, parts)),
            grid=(cover.programs, parts),
        )


def _parts_of(request: Request, spec: on_cpu.ReduceSpec, lines: Lines) -> int:
    """The number of programs per line. Only sums of floats are split, because gradients and statistics need them."""
    if spec.kind not in SUMS or spec.dtype not in FACTORS or lines.whole:
        return 1
    return parts_of(request.gpu, _size(lines), lines.programs, lines.length)


def _size(lines: Lines) -> ProductTile:
    tile = lines.tile
    return ProductTile(tile.rows, tile.columns, tile.columns, tile.warps, 1)


def _parts(nest: Nest, loops: tuple[int, ...]) -> Nest:
    return nest.take(loops).collapsed()


def arg_reduce(request: Request) -> KernelCall | None:
    """Selector of ArgMax and ArgMin of float64, float32, float16, bfloat16, int64 and int32.

    None for other types and for scalars, and if generated code cannot compute a dimension.
    """
    return next(_arg_reductions(request), None)


def other_arg_tiles(request: Request) -> Iterable[KernelCall]:
    """Offers of the kernel of `arg_reduce` with every candidate tile, the selector's own included.

    No offers for nodes that `arg_reduce` does not cover.
    """
    return _arg_reductions(request)


def _arg_reductions(request: Request) -> Iterator[KernelCall]:
    call = on_cpu.arg_call_of(request, _DTYPES)
    if call is None or not isinstance(call.spec, on_cpu.ArgReduceSpec):
        return
    spec = call.spec
    for lines in covering(*middle_axis(spec.outer, spec.length, spec.inner)):
        yield replace(call, spec=ArgReduceSpec(spec.dtype, lines, spec.least, spec.last), grid=(lines.programs,))
