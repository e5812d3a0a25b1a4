"""Products of dynamic depth and width: a task computes a row, in vectors along its columns or along the depth."""

from __future__ import annotations

from collections.abc import Callable

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.dim import product
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.microkernel import accumulate, zeros
from lathe.core.kernels.cpu.nest import offsets_of
from lathe.core.kernels.cpu.register_shuffles import row_sums
from lathe.core.kernels.cpu.result_writer import ResultWriter
from lathe.core.kernels.gemm.varying_spec import VaryingGemmSpec
from lathe.core.kernels.target import Target

F32 = DType.FLOAT32
_VECTORS = 4  # of adjacent columns in one pass over the depth


def generate(spec: VaryingGemmSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    multiply(k, spec)
    return k


def multiply(k: Kernel, spec: VaryingGemmSpec) -> None:
    """Generate the code of the product in kernel `k`, whose first operands are A, B, the extras and Y."""
    dtypes = (F32, F32, *spec.extra_dtypes, spec.dtype)
    operands = [k.operand(i, dtype) for i, dtype in enumerate(dtypes)]
    write = _along_columns if spec.b_steps[1] == 1 else _along_depth
    with k.parallel(k.dim(product(spec.nest.extents))) as (row,):
        offsets = offsets_of(k, spec.nest, row)
        a, b, *rest = (pointer.at(offset) for pointer, offset in zip(operands, offsets, strict=True))
        steps = tuple(step if isinstance(step, int) else k.dim(step) for step in spec.result_steps)
        write(k, spec, a, b, ResultWriter(k, spec.epilogue, tuple(rest), steps))


def _along_columns(k: Kernel, spec: VaryingGemmSpec, a: Pointer, b: Pointer, results: ResultWriter) -> None:
    a_step, b_step, depth = k.dim(spec.a_step), k.dim(spec.b_steps[0]), k.dim(spec.depth)

    def columns(at: Val, vectors: int, count: Val) -> None:
        mask = None if count.constant == vectors * k.lanes else k.lane_mask(count, k.lanes)
        grid = accumulate(k, zeros(k, 1, vectors, k.lanes), [a], a_step, b.at(at), b_step, depth, mask)
        _store(results, at, grid[0], mask)

    _cover(k, spec, columns, (_VECTORS, 1))


def _along_depth(k: Kernel, spec: VaryingGemmSpec, a: Pointer, b: Pointer, results: ResultWriter) -> None:
    """Compute one row of Y with vectors along the depth: a vector of partial sums per column.

    The lanes are added up for `lanes` columns at once. `a` points to the row of A, `b` to the matrix B.
    """
    step, depth, lanes = k.dim(spec.b_steps[1]), k.dim(spec.depth), k.lanes
    whole = depth // lanes * lanes

    def columns(at: Val, vectors: int, count: Val) -> None:
        """Compute `count` columns from `at` on; if fewer than `lanes`, the last one stands in for those missing."""
        known = count.constant == lanes
        rows = [b.at((at + (r if known else k.ops.min(count - 1, r))) * step) for r in range(lanes)]

        def add(sums: list[Val], i: Val, mask: Val | None) -> list[Val]:
            factor = a.load(i, lanes, mask)
            pairs = zip(rows, sums, strict=True)
            return [k.ops.fma(line.load(i, lanes, mask), factor, total) for line, total in pairs]

        with k.fold(0, whole, [k.zeros(F32, lanes)] * lanes, lanes) as fold:
            fold.values = add(fold.values, fold.index, None)
        sums, rest = fold.values, depth - whole
        if rest.constant is None:
            sums = k.choose(rest > 0, lambda: add(fold.values, whole, k.lane_mask(rest, lanes)), lambda: fold.values)
        elif rest.constant:
            sums = add(sums, whole, k.lane_mask(rest, lanes))
        _store(results, at, [row_sums(k, sums)], None if known else k.lane_mask(count, lanes))

    _cover(k, spec, columns, (1,))


def _store(results: ResultWriter, at: Val, values: list[Val], mask: Val | None) -> None:
    """Run the epilogue on vectors of sums of one row, from column `at` on, and store the results.

    `mask` guards the last vector.
    """
    no_offset = [at.kernel.index(0)] * len(results.operands)
    results.at_column(at).store([values], [no_offset], mask)


def _cover(
    k: Kernel, spec: VaryingGemmSpec, columns: Callable[[Val, int, Val], None], vectors: tuple[int, ...]
) -> None:
    """Generate calls `columns(first, vectors, count)` that cover all columns of Y.

    As many columns as possible go by the first number of `vectors` at a time, the rest by the next number. The last
    call has one vector, and may have fewer columns than lanes.
    """
    size, done = k.dim(spec.columns), k.index(0)
    for count in vectors:
        width = count * k.lanes
        until = size // width * width
        with k.loop(done, until, width) as at:
            columns(at, count, k.index(width))
        done = until
    rest = size - done
    if rest.constant is None:
        with k.when(rest > 0):
            columns(done, 1, rest)
    elif rest.constant:
        columns(done, 1, rest)
