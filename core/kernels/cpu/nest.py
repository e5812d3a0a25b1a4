"""How the memory-bound kernels walk a nest: even tasks over rows, vectors along a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from core.codegen.lang import Index, Kernel, Val
from core.ir.dim import product
from core.ir.types import DType
from core.kernels.catalog.nest import Nest
from core.kernels.target import Target

# body(i, lanes, mask): handle `lanes` elements from i on; where a mask is given, only where it is true.
Step: TypeAlias = Callable[[Val, int, Val | None], None]

_TASK_NS = 16_000  # a task must outlast the costs of handing it out and of waking a thread many times over
_NS_PER_BYTE = 0.04
_NS_PER_OPERATION = 0.02  # of one lane of a vector
_LINE_BYTES = 64


def grain(nbytes: float, operations: float = 0) -> int:
    """Steps of a loop that make a task, when each moves `nbytes` and does so many vectorised operations."""
    return max(1, int(_TASK_NS / (_NS_PER_BYTE * nbytes + _NS_PER_OPERATION * operations + 1e-3)))


@contextmanager
def even_chunks(k: Kernel, extent: Index, steps: Index, multiple: int = 1) -> Iterator[tuple[Val, Val]]:
    """Tasks `[start, stop)` of one size (a multiple of `multiple`), at least `steps` long unless that is all there is;
    a thread alone takes everything at once."""
    size = k.index(extent)
    wanted = k.ops.select(k.threads.equals(1), k.index(1), k.ops.max(size // k.ops.max(steps, k.index(1)), 1))
    piece = (size + wanted - 1) // wanted
    piece = k.ops.max((piece + (multiple - 1)) // multiple * multiple, 1)
    with k.tasks((size + piece - 1) // piece) as task:
        start = task * piece
        yield start, k.ops.min(start + piece, size)


def each_row(k: Kernel, nest: Nest, steps: int, emit: Callable[[list[Val], Val], None]) -> None:
    """Share a nest out in tasks of about `steps` elements; `emit(offsets, length)` handles a run of its last loop that
    begins at these offsets of the operands."""
    inner = nest.extents[-1]
    if nest.rank == 1:
        with even_chunks(k, k.dim(inner), steps, _LINE_BYTES) as (start, stop):
            emit(_moved(k, nest, start), stop - start)
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
    """Rows so long that each is several tasks."""
    parts = inner // steps
    piece = -(-inner // parts // _LINE_BYTES) * _LINE_BYTES + _LINE_BYTES
    rows = k.dim(product(nest.extents[:-1]))
    with k.parallel(rows, -(-inner // piece)) as (row, part):
        start = part * piece
        first = offsets_of(k, nest.take(range(nest.rank - 1)), row)
        offsets = [a + b for a, b in zip(first, _moved(k, nest, start), strict=True)]
        emit(offsets, k.ops.min(piece, k.index(inner) - start))


def _moved(k: Kernel, nest: Nest, steps: Val) -> list[Val]:
    return [steps * k.dim(stride) for stride in nest.loop(nest.rank - 1)]


def offsets_of(k: Kernel, nest: Nest, flat: Val) -> list[Val]:
    """Where every operand is at a row-major position of the nest."""
    if nest.rank == 0:
        return [k.index(0) for _ in nest.strides]
    places = k.unravel(flat, [k.dim(extent) for extent in nest.extents])
    return [
        sum((place * k.dim(stride) for place, stride in zip(places, strides, strict=True)), start=k.index(0))
        for strides in nest.strides
    ]


def has_masks(target: Target, itemsizes: Sequence[int]) -> bool:
    """Whether masked loads and stores of such elements are single instructions; elsewhere each lane is a branch."""
    if target.name == "avx512":
        return True
    return target.name == "avx2" and all(size >= 4 for size in itemsizes)


def cover(k: Kernel, length: Index, body: Step, lanes: int, masks: bool, unroll: int = 1) -> None:
    """Cover `length` elements: blocks of `unroll` vectors, single vectors, and the tail under a mask or one by one."""
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


def unsigned(itemsize: int) -> DType:
    """An integer type that can stand for any element of this many bytes."""
    return {1: DType.UINT8, 2: DType.UINT16, 4: DType.UINT32, 8: DType.UINT64}[itemsize]
