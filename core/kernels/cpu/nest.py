"""Iteration over a loop nest in memory-bound kernels: tasks of equal size over rows, vectors along a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from lathe.core.codegen.lang import Index, Kernel, Val
from lathe.core.ir.dim import product
from lathe.core.ir.types import DType
from lathe.core.kernels.shared.nest import Nest
from lathe.core.kernels.target import Target

# body(i, lanes, mask): handle `lanes` elements from i on; if there is a mask, only those where it is true.
Step: TypeAlias = Callable[[Val, int, Val | None], None]

_TASK_NS = 16_000  # a task must take many times longer than handing it out and waking a thread
_NS_PER_BYTE = 0.04
_NS_PER_OPERATION = 0.02  # per vector lane
_LINE_BYTES = 64


def grain(nbytes: float, operations: float = 0) -> int:
    """The number of loop iterations, at least 1, that make one task worth its overhead.

    An iteration moves `nbytes` and does `operations` vectorised operations.
    """
    return max(1, int(_TASK_NS / (_NS_PER_BYTE * nbytes + _NS_PER_OPERATION * operations + 1e-3)))


@contextmanager
def even_chunks(k: Kernel, extent: Index, steps: Index, multiple: int = 1) -> Iterator[tuple[Val, Val]]:
    """Tasks `[start, stop)` that cut `extent` iterations into parts of equal size, a multiple of `multiple`.

    Each but the last has at least `steps` iterations, unless `extent` has fewer. A single thread gets one task with
    everything.
    """
    size = k.index(extent)
    wanted = k.ops.select(k.threads.equals(1), k.index(1), k.ops.max(size // k.ops.max(steps, k.index(1)), 1))
    chunk = (size + wanted - 1) // wanted
    chunk = k.ops.max((chunk + (multiple - 1)) // multiple * multiple, 1)
    with k.tasks((size + chunk - 1) // chunk) as task:
        start = task * chunk
        yield start, k.ops.min(start + chunk, size)


def for_each_row(k: Kernel, nest: Nest, steps: int, emit: Callable[[list[Val], Val], None]) -> None:
    """Split a nest into tasks of about `steps` elements.

    `emit(offsets, length)` handles `length` iterations of the last loop, from these offsets of the operands on.
    """
    inner = nest.extents[-1]
    if nest.rank == 1:
        with even_chunks(k, k.dim(inner), steps, _LINE_BYTES) as (start, stop):
            emit(_offsets_after(k, nest, start), stop - start)
    elif isinstance(inner, int) and inner >= 2 * steps:
        _each_part_of_row(k, nest, inner, steps, emit)
    else:
        size = k.dim(inner)
        with (
            even_chunks(k, k.dim(product(nest.extents[:-1])), k.index(steps) // k.ops.max(size, 1)) as (start, stop),
            k.loop(start, stop) as row,
        ):
            emit(offsets_of(k, nest.take(range(nest.rank - 1)), row), size)


def _each_part_of_row(k: Kernel, nest: Nest, inner: int, steps: int, emit: Callable[[list[Val], Val], None]) -> None:
    """Split a nest whose rows (last loop) are so long that each makes several tasks; arguments as `for_each_row`."""
    parts = inner // steps
    chunk = -(-inner // parts // _LINE_BYTES) * _LINE_BYTES + _LINE_BYTES
    rows = k.dim(product(nest.extents[:-1]))
    with k.parallel(rows, -(-inner // chunk)) as (row, part):
        start = part * chunk
        first = offsets_of(k, nest.take(range(nest.rank - 1)), row)
        offsets = [a + b for a, b in zip(first, _offsets_after(k, nest, start), strict=True)]
        emit(offsets, k.ops.min(chunk, k.index(inner) - start))


def _offsets_after(k: Kernel, nest: Nest, steps: Val) -> list[Val]:
    return [steps * k.dim(stride) for stride in nest.loop(nest.rank - 1)]


def offsets_of(k: Kernel, nest: Nest, flat: Val) -> list[Val]:
    """The offset of each operand, in elements, at row-major position `flat` of the nest's loops."""
    if nest.rank == 0:
        return [k.index(0) for _ in nest.strides]
    places = k.unravel(flat, [k.dim(extent) for extent in nest.extents])
    return [
        sum((place * k.dim(stride) for place, stride in zip(places, strides, strict=True)), start=k.index(0))
        for strides in nest.strides
    ]


def has_masks(target: Target, itemsizes: Sequence[int]) -> bool:
    """Whether masked loads and stores of elements of all these sizes are single instructions on the target.

    Otherwise each lane is a branch.
    """
    if target.name == "avx512":
        return True
    return target.name == "avx2" and all(size >= 4 for size in itemsizes)


def for_each_vector(k: Kernel, length: Index, body: Step, lanes: int, masks: bool, unroll: int = 1) -> None:
    """Call `body(i, lanes, mask)` for all of `length` elements: in blocks of `unroll` vectors, then in vectors.

    The elements that remain are one masked vector if `masks` is true or their number is known, otherwise single
    elements (with 1 as `lanes`).
    """
    size = k.index(length)
    done = k.index(0)
    for block in sorted({unroll * lanes, lanes}, reverse=True):
        until = size // block * block
        with k.loop(done, until, block) as i:
            for part in range(0, block, lanes):
                body(i + part, lanes, None)
        done = until
    _tail(k, done, size, body, lanes, masks)


def _tail(k: Kernel, done: Val, size: Val, body: Step, lanes: int, masks: bool) -> None:
    rest = size - done
    if lanes == 1 or rest.constant == 0:
        return
    if rest.constant is not None:
        body(done, lanes, k.lane_mask(rest, lanes))
    elif not masks:
        with k.loop(done, size) as i:
            body(i, 1, None)
    else:
        with k.when(rest > 0):
            body(done, lanes, k.lane_mask(rest, lanes))


def unsigned_type(itemsize: int) -> DType:
    """The unsigned integer type with this many bytes (1, 2, 4 or 8), for moving elements of any type."""
    return {1: DType.UINT8, 2: DType.UINT16, 4: DType.UINT32, 8: DType.UINT64}[itemsize]
