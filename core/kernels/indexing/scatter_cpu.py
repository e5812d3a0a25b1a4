"""ScatterND: each task owns some rows, and reads all indices for those rows."""

from __future__ import annotations

from collections.abc import Callable

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.ir.dim import product
from lathe.core.ir.types import DType
from lathe.core.kernels.call import Status
from lathe.core.kernels.cpu.nest import for_each_vector, has_masks
from lathe.core.kernels.indexing.scatter_spec import ScatterRowsSpec
from lathe.core.kernels.target import Target

_TASKS = 4  # per thread; few, since each task reads all indices


def generate(spec: ScatterRowsSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    indices, updates, y = k.operand(0, spec.index), k.operand(1, spec.dtype), k.operand(2, spec.dtype)
    x = None if spec.cleared else k.operand(3, spec.dtype)
    inner, masks = k.dim(spec.inner), has_masks(target, [spec.dtype.itemsize])
    lanes = 1 if spec.inner == 1 else target.vector_bytes // spec.dtype.itemsize
    join = combiner(k, spec.reduction)
    rows = k.dim(product(spec.extents))
    wanted = k.ops.select(k.threads.equals(1), k.index(1), k.threads * _TASKS)
    chunk = k.ops.max((rows + wanted - 1) // wanted, 1)
    with k.tasks((rows + chunk - 1) // chunk) as task:
        start = task * chunk
        stop = k.ops.min(start + chunk, rows)
        mine = y.at(start * inner)

        def begin(i: Val, lanes: int, mask: Val | None) -> None:
            value = k.zeros(spec.dtype, lanes) if x is None else x.at(start * inner).load(i, lanes, mask)
            mine.store(value, i, mask)

        for_each_vector(k, (stop - start) * inner, begin, lanes, masks)
        with k.loop(0, k.dim(spec.count)) as position:
            depth = len(spec.extents)
            row, valid = _row(k, spec, [indices.load(position * depth + i) for i in range(depth)])
            target_row, source = y.at(row * inner), updates.at(position * inner)

            def step(i: Val, lanes: int, mask: Val | None) -> None:
                target_row.store(join(target_row.load(i, lanes, mask), source.load(i, lanes, mask)), i, mask)

            with k.when(valid & (row >= start) & (row < stop)):
                for_each_vector(k, inner, step, lanes, masks)
    return k


def _row(k: Kernel, spec: ScatterRowsSpec, coordinates: list[Val]) -> tuple[Val, Val]:
    """The row-major number of the row that `coordinates` select, and whether it exists.

    If it does not, the step's status is set to `Status.INDEX_OUT_OF_RANGE`.
    """
    row, valid = k.index(0), k.constant(True, DType.BOOL)
    for coordinate, extent in zip(coordinates, spec.extents, strict=True):
        front, inside = check_index(k, coordinate.cast(DType.INT64), k.dim(extent))
        row, valid = row * k.dim(extent) + front, valid & inside
    return row, valid


def check_index(k: Kernel, index: Val, extent: Val) -> tuple[Val, Val]:
    """The index counted from the front, and whether it is in range; negative ones count from the end of `extent`.

    If it is not in range, the step's status is set to `Status.INDEX_OUT_OF_RANGE`.
    """
    front = k.ops.select(index < 0, index + extent, index)
    valid = (front >= 0) & (front < extent)
    with k.when(~valid):
        k.refuse(Status.INDEX_OUT_OF_RANGE)
    return front, valid


def combiner(k: Kernel, reduction: str) -> Callable[[Val, Val], Val]:
    """The function of (old element, update) that gives the new element by ONNX's `reduction` ("none": the update)."""
    if reduction == "none":
        return lambda old, new: new
    return {"add": k.ops.add, "mul": k.ops.mul, "max": k.ops.max, "min": k.ops.min}[reduction]
