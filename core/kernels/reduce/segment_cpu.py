"""Reductions within packed sequences: a task is a sequence; a few vectors of columns at a time run over its tokens."""

from __future__ import annotations

from collections.abc import Callable

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import has_masks
from lathe.core.kernels.cpu.segments import segment_count
from lathe.core.kernels.reduce.segment_spec import SegmentReduceSpec
from lathe.core.kernels.target import Target

_AT_ONCE = 4  # vectors, so that sums need not wait for one another


def generate(spec: SegmentReduceSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, offsets, y = (k.operand(i, dtype) for i, dtype in enumerate((spec.dtype, DType.INT64, spec.dtype)))
    masks = has_masks(target, [spec.dtype.itemsize])
    lanes = max(1, target.vector_bytes // spec.dtype.itemsize) if masks else 1
    combine = _combine(k, spec.mode)
    with k.parallel(segment_count(k, offsets)) as (segment,):
        start, stop = offsets.load(segment), offsets.load(segment + 1)
        source, place = x.at(start * spec.columns), y.at(segment * spec.columns)
        length = stop - start

        def strip(column: Val, vectors: int, mask: Val | None) -> None:
            """Reduce the columns of `vectors` vectors from `column` on; `mask` guards an incomplete last one."""

            def row(token: Val) -> list[Val]:
                here = source.at(token * spec.columns + column)
                return [here.load(v * lanes, lanes, mask if v == vectors - 1 else None) for v in range(vectors)]

            if combine is None:
                results = row(length - 1 if spec.mode == "last" else k.index(0))
            else:
                with k.fold(1, length, row(k.index(0))) as fold:
                    fold.values = [combine(a, b) for a, b in zip(fold.values, row(fold.index), strict=True)]
                results = fold.values
            if spec.mode == "mean":
                count = length.cast(spec.dtype)
                results = [value / (count.splat(lanes) if lanes > 1 else count) for value in results]
            for v, value in enumerate(results):
                place.at(column).store(value, v * lanes, mask if v == vectors - 1 else None)

        wide = _AT_ONCE * lanes
        whole = spec.columns // wide * wide
        with k.loop(0, whole, wide) as column:
            strip(column, _AT_ONCE, None)
        rest = spec.columns - whole
        if rest:
            tail = rest % lanes
            strip(k.index(whole), -(-rest // lanes), k.lane_mask(tail, lanes) if tail else None)
    return k


def _combine(k: Kernel, mode: str) -> Callable[[Val, Val], Val] | None:
    if mode in ("sum", "mean"):
        return lambda a, b: a + b
    return {"max": k.ops.max, "min": k.ops.min}.get(mode)
