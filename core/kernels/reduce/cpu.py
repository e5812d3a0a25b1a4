"""Reductions over any loops of a nest: along rows (adjacent elements combine) or across rows (they do not)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim
from lathe.core.kernels.cpu.nest import even_chunks, grain, offsets_of
from lathe.core.kernels.cpu.reduction import ParallelAccumulators
from lathe.core.kernels.reduce.accumulators_cpu import Reduction, passes
from lathe.core.kernels.reduce.spec import ReduceSpec
from lathe.core.kernels.shared.nest import Nest
from lathe.core.kernels.target import Target

_BLOCK = 512  # rows that are summed separately, so that rounding errors do not grow with the number of rows
_COLUMN_VECTORS = 8  # vectors of adjacent results in one pass down the columns


def generate(spec: ReduceSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, y = (k.operand(i, spec.dtype).converting(spec.computed) for i in range(2))
    if spec.horizontal:
        _along_rows(k, spec, x, y)
    else:
        _across_rows(k, spec, x, y)
    return k


def _steps(k: Kernel, spec: ReduceSpec, results: int = 1) -> Val:
    """The number of groups of `results` results that make one task, if each result has `spec.count` elements."""
    return k.index(grain(spec.dtype.itemsize * results, 2)) // k.ops.max(k.dim(spec.count), 1)


def _along_rows(k: Kernel, spec: ReduceSpec, x: Pointer, y: Pointer) -> None:
    """Compute one result at a time: outer loops, then vectors along the last loop."""
    kept = spec.nest.take(spec.kept_loops)
    reduced = spec.nest.take(spec.reduced_loops)
    count = k.dim(spec.count)
    with even_chunks(k, k.dim(product(kept.extents)), _steps(k, spec)) as (start, stop), k.loop(start, stop) as row:
        offset_in, offset_out = offsets_of(k, kept, row)
        source = x.at(offset_in)

        def sweep(r: Reduction, source: Pointer = source) -> list[Val]:
            return [_sweep(k, spec, reduced, source, r)]

        [result] = passes(k, spec.kind, spec.computed, count, sweep)
        y.store(result, offset_out)


def _sweep(k: Kernel, spec: ReduceSpec, reduced: Nest, x: Pointer, r: Reduction) -> Val:
    """The scalar that the reduction `r` gives for all elements of one result, which begin at `x`.

    `reduced` has the loops over them.
    """
    chains = ParallelAccumulators(k, spec.computed, r.identity, r.combine)

    def step(acc: Val, i: Val, lanes: int, mask: Val | None) -> Val:
        return r.combine(acc, chains.masked(r.prepare(x.load(i, lanes, mask), 0), mask))

    def run(offset: Val, values: list[Val]) -> list[Val]:
        return chains.extend(
            values, k.dim(reduced.extents[-1]), lambda acc, i, lanes, mask: step(acc, offset + i, lanes, mask)
        )

    return chains.result(_nest_loops(k, reduced.extents[:-1], reduced.strides[0], k.index(0), chains.start, run))


def _nest_loops(
    k: Kernel,
    extents: Sequence[Dim],
    strides: Sequence[Dim],
    offset: Val,
    values: list[Val],
    body: Callable[[Val, list[Val]], list[Val]],
) -> list[Val]:
    """Generate nested loops around `body(offset, values) -> values` that carry the values; returns the last values.

    `offset` grows by the stride of each loop.
    """
    if not extents:
        return body(offset, values)
    with k.fold(0, k.dim(extents[0]), values) as fold:
        moved = offset + fold.index * k.dim(strides[0])
        fold.values = _nest_loops(k, extents[1:], strides[1:], moved, fold.values, body)
    return fold.values


def _across_rows(k: Kernel, spec: ReduceSpec, x: Pointer, y: Pointer) -> None:
    """Compute many adjacent results at a time, each in a lane."""
    kept, reduced = spec.nest.take(spec.kept_loops), spec.nest.take(spec.reduced_loops).collapsed()
    lanes = max(1, k.target.vector_bytes // spec.computed.itemsize)
    inner, last = kept.extents[-1], kept.rank - 1
    vectors = _vectors(inner, lanes)
    width = vectors * lanes
    blocks = (k.dim(inner) + (width - 1)) // width
    outer = kept.take(range(last))
    items = k.dim(product(outer.extents)) * blocks
    with even_chunks(k, items, _steps(k, spec, width)) as (start, stop), k.loop(start, stop) as item:
        offset_in, offset_out = offsets_of(k, outer, item // blocks)
        first = item % blocks * width
        masks = _masks(k, inner, first, vectors, lanes)
        source, target = x.at(offset_in + first * k.dim(kept.strides[0][last])), y.at(offset_out + first)
        for i, value in enumerate(_columns(k, spec, reduced, source, lanes, masks)):
            target.store(value, i * lanes, masks[i])


def _vectors(inner: Dim, lanes: int) -> int:
    if not isinstance(inner, int):
        return 1
    return min(_COLUMN_VECTORS, -(-inner // lanes))


def _masks(k: Kernel, inner: Dim, first: Val, vectors: int, lanes: int) -> list[Val | None]:
    if isinstance(inner, int) and inner % (vectors * lanes) == 0:
        return [None] * vectors
    return [k.lane_mask(k.dim(inner) - first - i * lanes, lanes) for i in range(vectors)]


def _columns(
    k: Kernel, spec: ReduceSpec, reduced: Nest, x: Pointer, lanes: int, masks: Sequence[Val | None]
) -> list[Val]:
    """The results of adjacent columns from `x` on: one vector of `lanes` results for each of `masks`.

    `reduced` has the loops over a result's elements.
    """
    length, stride = k.dim(reduced.extents[-1]), k.dim(reduced.strides[0][-1])
    outer = reduced.take(range(reduced.rank - 1))

    def sweep(r: Reduction) -> list[Val]:
        start = [k.constant(r.identity, spec.computed, lanes)] * len(masks)

        def rows(offset: Val, first: Val, last: Val) -> list[Val]:
            with k.fold(first, last, start) as fold:
                places = [offset + fold.index * stride + i * lanes for i in range(len(masks))]
                loads = [x.load(place, lanes, mask) for place, mask in zip(places, masks, strict=True)]
                prepared = [r.prepare(load, i) for i, load in enumerate(loads)]
                fold.values = [r.combine(value, new) for value, new in zip(fold.values, prepared, strict=True)]
            return fold.values

        def block(offset: Val, totals: list[Val]) -> list[Val]:
            with k.fold(0, length, totals, _BLOCK) as fold:
                partial = rows(offset, fold.index, k.ops.min(fold.index + _BLOCK, length))
                fold.values = [r.combine(total, part) for total, part in zip(fold.values, partial, strict=True)]
            return fold.values

        return _nest_loops(k, outer.extents, outer.strides[0], k.index(0), start, block)

    return passes(k, spec.kind, spec.computed, k.dim(spec.count), sweep)
