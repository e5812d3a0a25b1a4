"""CacheWrite: each task writes some tokens."""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.codegen.registers import Pointer
from lathe.core.ir.types import DType
from lathe.core.kernels.call import Status
from lathe.core.kernels.cpu.nest import for_each_vector, has_masks
from lathe.core.kernels.paged_cache.write_spec import CacheWriteSpec
from lathe.core.kernels.target import Target

_TOKENS = 16  # per task


def generate(spec: CacheWriteSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    pages, written = k.operand(0, spec.dtype), k.operand(3, spec.dtype)
    rows, slots = k.operand(1, spec.row_dtype), k.operand(2, DType.INT64)
    tokens, in_place = k.dim(spec.tokens), written.distance_from(pages).equals(0)
    # A copy of all pages comes before all rows, so one task does everything. No plan of a decoder copies.
    chunk = k.ops.select(in_place, k.index(_TOKENS), k.ops.max(tokens, 1))
    count = k.ops.select(in_place, (tokens + (_TOKENS - 1)) // _TOKENS, 1)
    with k.tasks(count) as task:
        with k.when(~in_place):
            _copy(k, spec, pages, written, target)
        start = task * chunk
        with k.loop(start, k.ops.min(start + chunk, tokens)) as token:
            slot = slots.load(token)
            inside = (slot >= 0) & (slot < spec.count * spec.page)
            with k.when(~inside):
                k.refuse(Status.INDEX_OUT_OF_RANGE)
            with k.when(inside):
                _write_token(k, spec, rows.at(token * (spec.heads * spec.size)), written, slot, target)
    return k


def _copy(k: Kernel, spec: CacheWriteSpec, pages: Pointer, written: Pointer, target: Target) -> None:
    def move(i: Val, lanes: int, mask: Val | None) -> None:
        written.store(pages.load(i, lanes, mask), i, mask)

    total = spec.count * spec.heads * spec.page * spec.size
    lanes = target.vector_bytes // spec.dtype.itemsize
    for_each_vector(k, k.index(total), move, lanes, has_masks(target, [spec.dtype.itemsize]))


def _write_token(k: Kernel, spec: CacheWriteSpec, row: Pointer, written: Pointer, slot: Val, target: Target) -> None:
    """Write the heads of one token to its slot; elements are converted to the type of the cache."""
    number, place = slot // spec.page, slot % spec.page
    begin = written.at(number * (spec.heads * spec.page * spec.size)).converting(spec.row_dtype)
    with k.loop(0, spec.heads) as head:
        source, block = row.at(head * spec.size), begin.at(head * (spec.page * spec.size))
        if spec.transposed:
            with k.loop(0, spec.size) as i:
                block.store(source.load(i), i * spec.page + place)
        else:
            _write_line(k, spec, source, block.at(place * spec.size), target)


def _write_line(k: Kernel, spec: CacheWriteSpec, source: Pointer, line: Pointer, target: Target) -> None:
    def move(i: Val, lanes: int, mask: Val | None) -> None:
        line.store(source.load(i, lanes, mask), i, mask)

    for_each_vector(
        k, k.index(spec.size), move, target.lanes, has_masks(target, [spec.row_dtype.itemsize, spec.dtype.itemsize])
    )
