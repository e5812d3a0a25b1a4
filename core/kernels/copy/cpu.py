"""Strided copies: rows are copied by vectors, a transpose of two axes goes by tiles in registers."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim
from lathe.core.kernels.copy.spec import CopySpec, Piece
from lathe.core.kernels.cpu.nest import (
    even_chunks,
    for_each_row,
    for_each_vector,
    grain,
    has_masks,
    offsets_of,
    unsigned_type,
)
from lathe.core.kernels.cpu.register_shuffles import interleave, tile_side, transpose_rows
from lathe.core.kernels.shared.nest import Nest
from lathe.core.kernels.target import Target

_SMALL = 1 << 18  # bytes that one thread moves alone, because sharing them would cost more
_MOST_SLICES = 64
_LONG_ROW = 1 << 14  # elements
_MOST_PLANES = 4  # more planes take as many shuffles as a square tile
_ZERO: Dim = 0


def generate(spec: CopySpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    k.read_numbers(spec.numbers, spec.dims)
    if len(spec.pieces) == 1:
        _copy_shared(k, spec, spec.pieces[0])
    elif spec.pieces:
        _copy_in_slices(k, spec)
    return k


def _copy_shared(k: Kernel, spec: CopySpec, piece: Piece) -> None:
    """Copy one piece, which the threads share."""
    mover = _mover(k, spec, piece)
    if isinstance(mover, _Row):
        for_each_row(k, piece.nest, grain(2 * spec.itemsize), mover.copy)
        return
    with even_chunks(k, mover.rows, mover.grain) as (start, stop):
        mover.copy_part(start, stop)


def _copy_in_slices(k: Kernel, spec: CopySpec) -> None:
    """Copy several pieces: task t of T copies slice t of each, so that all threads write near each other."""
    movers = [_mover(k, spec, _with_short_rows(piece)) for piece in spec.pieces]
    moved = sum((product(piece.nest.extents) for piece in spec.pieces), start=_ZERO) * spec.itemsize
    parts = k.ops.min(k.ops.max(k.dim(moved) // _SMALL, 1), _MOST_SLICES)
    parts = k.ops.select(k.threads.equals(1), k.index(1), parts)
    with k.tasks(parts) as part:
        for mover in movers:
            mover.copy_part(mover.rows * part // parts, mover.rows * (part + 1) // parts)


def _mover(k: Kernel, spec: CopySpec, piece: Piece) -> _Row | _Swap:
    axis = swapped_axis(piece)
    return _Row(k, spec, piece) if axis is None else _Swap(k, spec, piece, axis)


def _with_short_rows(piece: Piece) -> Piece:
    """The same copy with long rows cut into several equal ones, so that threads can share even few rows.

    The piece itself if its rows are short, of dynamic length, or without a suitable divisor, or if it transposes.
    """
    nest, length = piece.nest, piece.nest.extents[-1]
    if not isinstance(length, int) or length <= _LONG_ROW or swapped_axis(piece) is not None:
        return piece
    part = next((size for size in range(_LONG_ROW, _LONG_ROW // 16, -1) if length % size == 0), length)
    strides = tuple((*steps[:-1], steps[-1] * part, steps[-1]) for steps in nest.strides)
    return replace(piece, nest=Nest((*nest.extents[:-1], length // part, part), strides))


def swapped_axis(piece: Piece) -> int | None:
    """The loop before the last along which the source is contiguous, while the target is so along the last loop.

    Such a copy is a transpose of two axes. None if the copy is not one.
    """
    nest = piece.nest
    last = nest.rank - 1
    source, target = nest.strides
    if piece.source is None or target[last] != 1 or source[last] in (0, 1):
        return None
    return next((loop for loop in range(last) if source[loop] == 1 and nest.extents[loop] != 1), None)


def _pointers(k: Kernel, spec: CopySpec, piece: Piece) -> tuple[Pointer | None, Pointer]:
    dtype = unsigned_type(spec.itemsize)
    source = None if piece.source is None else k.operand(piece.source, dtype).at(k.dim(piece.offsets[0]))
    return source, k.operand(piece.target, dtype).at(k.dim(piece.offsets[1]))


class _Row:
    """Copies a piece row by row, along its last loop. In a nest of one loop each element counts as a row."""

    def __init__(self, k: Kernel, spec: CopySpec, piece: Piece) -> None:
        self.k, self.nest, self.dtype, self.fill = k, piece.nest, unsigned_type(spec.itemsize), spec.fill
        self.source, self.target = _pointers(k, spec, piece)
        self.step_in, self.step_out = piece.nest.loop(piece.nest.rank - 1)
        dense = self.step_out == 1 and (self.source is None or self.step_in in (0, 1))
        self.lanes = k.target.vector_bytes // spec.itemsize if dense else 1
        self.masks = has_masks(k.target, [spec.itemsize])
        self.outer = piece.nest.take(range(piece.nest.rank - 1))
        self.rows = k.dim(product(self.outer.extents) if self.outer.rank else piece.nest.extents[0])

    def copy_part(self, start: Val, stop: Val) -> None:
        """Copy rows `start` to `stop`."""
        if self.outer.rank == 0:
            self.copy([start * self.k.dim(stride) for stride in self.nest.loop(0)], stop - start)
            return
        with self.k.loop(start, stop) as row:
            self.copy(offsets_of(self.k, self.outer, row), self.k.dim(self.nest.extents[-1]))

    def copy(self, offsets: list[Val], length: Val) -> None:
        """Copy `length` elements of a row, from these offsets of source and target on."""
        target = self.target.at(offsets[1])
        source = self.source.at(offsets[0]) if self.source else None
        same = self._constant_value(source)

        def step(i: Val, lanes: int, mask: Val | None) -> None:
            place = i * self.k.dim(self.step_out)
            if same is not None:
                target.store(self.k.ops.splat(same, lanes), place, mask)
            elif source is not None:
                target.store(source.load(i * self.k.dim(self.step_in), lanes, mask), place, mask)

        for_each_vector(self.k, length, step, self.lanes, self.masks, unroll=4)

    def _constant_value(self, source: Pointer | None) -> Val | None:
        """The value that fills the row, if it is the same for all elements, otherwise None."""
        if source is None:
            return self.k.constant(self.fill, self.dtype)
        return source.load() if self.step_in == 0 else None


def _planes(piece: Piece, axis: int) -> int:
    """The extent of the last loop if the target is contiguous over `axis` and that loop; 0 if it is not, or above 4.

    An example is an image whose colour planes are interleaved.
    """
    across, step = piece.nest.extents[-1], piece.nest.strides[1][axis]
    return across if isinstance(across, int) and across <= _MOST_PLANES and step == across else 0


class _Swap:
    """Copies a piece by square tiles over its last loop (`across`) and the loop `axis`, where the source is contiguous.

    A "row" is one strip of tiles: one iteration of the other loops, and a band of `side` iterations of `axis`.
    """

    def __init__(self, k: Kernel, spec: CopySpec, piece: Piece, axis: int) -> None:
        self.k, self.nest, self.axis = k, piece.nest, axis
        source, self.target = _pointers(k, spec, piece)
        if source is None:
            raise ValueError("a fill has no axes to swap")
        self.source = source
        self.side = tile_side(k.target, spec.itemsize)
        self.masks = has_masks(k.target, [spec.itemsize])
        last = piece.nest.rank - 1
        self.others = piece.nest.take(loop for loop in range(last) if loop != axis)
        self.along, self.across = k.dim(piece.nest.extents[axis]), k.dim(piece.nest.extents[last])
        self.step_in, self.step_out = k.dim(piece.nest.strides[0][last]), k.dim(piece.nest.strides[1][axis])
        self.planes = _planes(piece, axis) if self.masks else 0
        self.bands = (self.along + (self.side - 1)) // self.side
        self.rows = prod((k.dim(extent) for extent in self.others.extents), start=self.bands)

    @property
    def grain(self) -> Val:
        row = self.across * self.side
        itemsize = self.target.dtype.itemsize
        return self.k.index(grain(2 * itemsize)) // self.k.ops.max(row, 1)

    def copy_part(self, start: Val, stop: Val) -> None:
        """Copy rows `start` to `stop`."""
        with self.k.loop(start, stop) as row:
            self._strip(row)

    def _strip(self, row: Val) -> None:
        k, side = self.k, self.side
        place, band = row // self.bands, row % self.bands
        offset_in, offset_out = offsets_of(k, self.others, place)
        first = band * side
        height = k.ops.min(self.along - first, side)
        source = self.source.at(offset_in + first)
        target = self.target.at(offset_out + first * self.step_out)
        if self.planes:
            self._interleave(source, target, height)
            return
        full = self.across // side * side
        whole = height.equals(side)
        with k.when(whole), k.loop(0, full, side) as j:
            self._tile(source.at(j * self.step_in), target.at(j))
        with k.loop(k.ops.select(whole, full, 0), self.across, side) as j:
            width = k.ops.min(self.across - j, side)
            edge = self._masked_tile if self.masks else self._slow_tile
            edge(source.at(j * self.step_in), target.at(j), height, width)

    def _interleave(self, source: Pointer, target: Pointer, height: Val) -> None:
        """Copy a strip of few columns, which are adjacent in the target: vectors of each are interleaved."""
        k, side = self.k, self.side

        def strip(present: Val | None) -> None:
            rows = [source.load(self.step_in * j, side, present) for j in range(self.planes)]
            for v, value in enumerate(interleave(k, rows)):
                mask = k.lane_mask(height * self.planes - v * side, side) if present is not None else None
                target.store(value, v * side, mask)

        whole = height.equals(side)
        with k.when(whole):
            strip(None)
        with k.when(~whole):
            strip(k.lane_mask(height, side))

    def _tile(self, source: Pointer, target: Pointer) -> None:
        """Transpose side x side elements."""
        rows = [source.load(self.step_in * j, self.side) for j in range(self.side)]
        for i, row in enumerate(transpose_rows(self.k, rows)):
            target.store(row, self.step_out * i)

    def _masked_tile(self, source: Pointer, target: Pointer, height: Val, width: Val) -> None:
        k, side = self.k, self.side
        rows = []
        for j in range(side):
            # Rows that do not exist are read, with an empty mask, from the address of an existing row: if no memory is
            # mapped there, a processor takes hundreds of cycles to find that it may ignore the fault.
            exists = width > j
            present = k.lane_mask(k.ops.select(exists, height, 0), side)
            rows.append(source.load(k.ops.select(exists, self.step_in * j, 0), side, present))
        for i, row in enumerate(transpose_rows(k, rows)):
            with k.when(height > i):
                target.store(row, self.step_out * i, k.lane_mask(width, side))

    def _slow_tile(self, source: Pointer, target: Pointer, height: Val, width: Val) -> None:
        with self.k.loop(0, height) as i, self.k.loop(0, width) as j:
            target.store(source.load(j * self.step_in + i), i * self.step_out + j)
