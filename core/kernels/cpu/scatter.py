"""Scatter of whole rows: every task owns some rows, and goes through all indices for those it owns."""

from __future__ import annotations

from collections.abc import Callable

from core.codegen.lang import Kernel, Val
from core.ir.dim import product
from core.ir.types import DType
from core.kernels.catalog.base import Status
from core.kernels.catalog.scatter import ScatterRowsSpec
from core.kernels.cpu.nest import cover, has_masks
from core.kernels.target import Target

_TASKS = 4  # for each thread: every task goes through all indices


def generate(spec: ScatterRowsSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    indices, updates, y = k.operand(0, spec.index), k.operand(1, spec.dtype), k.operand(2, spec.dtype)
    x = None if spec.cleared else k.operand(3, spec.dtype)
    inner, masks = k.dim(spec.inner), has_masks(target, [spec.dtype.itemsize])
    lanes = 1 if spec.inner == 1 else target.vector_bytes // spec.dtype.itemsize
    join = joined(k, spec.reduction)
    rows = k.dim(product(spec.extents))
    pieces = k.ops.select(k.threads.equals(1), k.index(1), k.threads * _TASKS)
    piece = k.ops.max((rows + pieces - 1) // pieces, 1)
    with k.tasks((rows + piece - 1) // piece) as task:
        start = task * piece
        stop = k.ops.min(start + piece, rows)
        mine = y.at(start * inner)

        def begin(i: Val, lanes: int, mask: Val | None) -> None:
            value = k.zeros(spec.dtype, lanes) if x is None else x.at(start * inner).load(i, lanes, mask)
            mine.store(value, i, mask)

        cover(k, (stop - start) * inner, begin, lanes, masks)
        with k.loop(0, k.dim(spec.count)) as position:
            depth = len(spec.extents)
            row, valid = _row(k, spec, [indices.load(position * depth + i) for i in range(depth)])
            target_row, source = y.at(row * inner), updates.at(position * inner)

            def step(i: Val, lanes: int, mask: Val | None) -> None:
                target_row.store(join(target_row.load(i, lanes, mask), source.load(i, lanes, mask)), i, mask)

            with k.when(valid & (row >= start) & (row < stop)):
                cover(k, inner, step, lanes, masks)
    return k


def _row(k: Kernel, spec: ScatterRowsSpec, coordinates: list[Val]) -> tuple[Val, Val]:
    """The row that coordinates name, and whether there is one; if not, the run is refused."""
    row, valid = k.index(0), k.constant(True, DType.BOOL)
    for coordinate, extent in zip(coordinates, spec.extents, strict=True):
        front, inside = checked(k, coordinate.cast(DType.INT64), k.dim(extent))
        row, valid = row * k.dim(extent) + front, valid & inside
    return row, valid


def checked(k: Kernel, index: Val, extent: Val) -> tuple[Val, Val]:
    """The index counted from the front, and whether it is in range; when it is not, the run is refused."""
    front = k.ops.select(index < 0, index + extent, index)
    valid = (front >= 0) & (front < extent)
    with k.when(~valid):
        k.refuse(Status.INDEX_OUT_OF_RANGE)
    return front, valid


def joined(k: Kernel, reduction: str) -> Callable[[Val, Val], Val]:
    """How what is written joins what is there."""
    if reduction == "none":
        return lambda old, new: new
    return {"add": k.ops.add, "mul": k.ops.mul, "max": k.ops.max, "min": k.ops.min}[reduction]
