"""Cumulative sums and products: line by line, or a vector of adjacent lines at once."""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.call import Status
from lathe.core.kernels.cpu.nest import even_chunks, for_each_vector, grain, has_masks
from lathe.core.kernels.cumulative.spec import CumulativeSpec
from lathe.core.kernels.target import Target


def generate(spec: CumulativeSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    x, y = k.operand(0, spec.dtype), k.operand(1 if spec.axis is None else 2, spec.dtype)
    extents = tuple(k.dim(extent) for extent in spec.extents) if spec.axis is None else _around_axis(k, spec)
    lanes = target.vector_bytes // spec.dtype.itemsize
    if spec.axis is None:
        _lines(k, spec, x, y, extents, 1 if spec.extents[2] == 1 else lanes)
    else:
        with k.when(extents[2].equals(1)):
            _lines(k, spec, x, y, (extents[0], extents[1], k.index(1)), 1)
        with k.when(extents[2] > 1):
            _lines(k, spec, x, y, extents, lanes)
    return k


def _around_axis(k: Kernel, spec: CumulativeSpec) -> tuple[Val, ...]:
    """The products of the extents before the axis, along it and after it, for an axis that is an input (operand 1).

    An axis out of range sets `Status.AXIS_OUT_OF_RANGE`, and the first product is 0, so that nothing is computed.
    """
    assert spec.axis is not None
    given, rank = k.operand(1, spec.axis).load().cast(DType.INT64), len(spec.extents)
    axis = k.ops.select(given < 0, given + rank, given)
    known = (axis >= 0) & (axis < rank)
    with k.when(~known):
        k.refuse(Status.AXIS_OUT_OF_RANGE)
    outer, length, inner = (k.index(1) for _ in range(3))
    for place, extent in enumerate(map(k.dim, spec.extents)):
        outer = outer * k.ops.select(axis > place, extent, 1)
        length = length * k.ops.select(axis.equals(place), extent, 1)
        inner = inner * k.ops.select(axis < place, extent, 1)
    return k.ops.select(known, outer, 0), length, inner


def _lines(k: Kernel, spec: CumulativeSpec, x: Pointer, y: Pointer, extents: tuple[Val, ...], lanes: int) -> None:
    outer, length, inner = extents
    neutral = 1 if spec.multiplies else 0
    steps = k.index(grain(2 * spec.dtype.itemsize)) // k.ops.max(length * inner, 1)
    with even_chunks(k, outer, steps) as (start, stop), k.loop(start, stop) as line:
        first = line * length * inner

        def step(i: Val, lanes: int, mask: Val | None) -> None:
            with k.fold(0, length, [k.constant(neutral, spec.dtype, lanes)]) as fold:
                place = length - 1 - fold.index if spec.reverse else fold.index
                at = first + place * inner + i
                value, before = x.load(at, lanes, mask), fold.values[0]
                after = before * value if spec.multiplies else before + value
                y.store(before if spec.exclusive else after, at, mask)
                fold.values = [after]

        for_each_vector(k, inner, step, lanes, has_masks(k.target, [spec.dtype.itemsize]))
