"""Pad by dynamic widths, row by row along the last axis: rows outside of x are filled, or copied from other rows."""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.dim import product
from lathe.core.kernels.copy.pad_spec import PadAxis, PadSpec
from lathe.core.kernels.cpu.nest import even_chunks, for_each_vector, grain, has_masks, unsigned_type
from lathe.core.kernels.target import Target


def generate(spec: PadSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    dtype = unsigned_type(spec.itemsize)
    x, y = k.operand(0, dtype).at(k.dim(spec.first)), k.operand(1, dtype)
    *outer, last = spec.axes
    line = _Line(k, spec, last)
    rows = k.dim(product(axis.length for axis in outer))
    steps = k.index(grain(2 * spec.itemsize)) // k.ops.max(line.length, 1)
    with even_chunks(k, rows, steps) as (start, stop), k.loop(start, stop) as row:
        offset, beside = k.index(0), []
        for axis, place in zip(outer, k.unravel(row, [k.dim(axis.length) for axis in outer]), strict=False):
            moved = place - k.dim(axis.before)
            if spec.mode == "constant" and not axis.is_plain:
                beside.append((moved < 0) | (moved >= k.dim(axis.extent)))
            offset = offset + (moved if axis.is_plain else _source_place(k, spec.mode, moved, axis)) * k.dim(axis.step)
        line.write(x.at(offset), y.at(row * line.length), beside)
    return k


class _Line:
    """Generates code that writes one row of the result along the last axis, with its padding."""

    def __init__(self, k: Kernel, spec: PadSpec, axis: PadAxis) -> None:
        self.k, self.axis, self.mode = k, axis, spec.mode
        self.length, self.before, self.extent = k.dim(axis.length), k.dim(axis.before), k.dim(axis.extent)
        dtype = unsigned_type(spec.itemsize)
        self.lanes, self.masks = k.target.vector_bytes // spec.itemsize, has_masks(k.target, [spec.itemsize])
        self.fill = None
        if spec.mode == "constant":
            self.fill = k.operand(2, dtype).load() if spec.fill is None else k.constant(spec.fill, dtype)

    def write(self, source: Pointer, target: Pointer, beside: list[Val]) -> None:
        """Write one row of the result at `target`; `source` is its row of x.

        The whole row gets the fill value if a condition in `beside` holds: it lies outside of x along another axis.
        """
        k = self.k
        if not beside:
            self._copy(source, target)
            return
        outside = beside[0]
        for each in beside[1:]:
            outside = outside | each
        with k.when(outside):
            self._fill(target, k.index(0), self.length)
        with k.when(~outside):
            self._copy(source, target)

    def _copy(self, source: Pointer, target: Pointer) -> None:
        middle = target.at(self.before)

        def step(i: Val, lanes: int, mask: Val | None) -> None:
            middle.store(source.load(i, lanes, mask), i, mask)

        for_each_vector(self.k, self.extent, step, self.lanes, self.masks, unroll=4)
        if not self.axis.is_plain:
            for start, stop in ((self.k.index(0), self.before), (self.before + self.extent, self.length)):
                self._border(source, target, start, stop)

    def _border(self, source: Pointer, target: Pointer, start: Val, stop: Val) -> None:
        k = self.k
        if self.fill is not None:
            self._fill(target, start, stop)
            return
        with k.loop(start, stop) as place:
            target.store(source.load(_source_place(k, self.mode, place - self.before, self.axis)), place)

    def _fill(self, target: Pointer, start: Val, stop: Val) -> None:
        fill = self.fill
        assert fill is not None

        def step(i: Val, lanes: int, mask: Val | None) -> None:
            target.store(self.k.ops.splat(fill, lanes), start + i, mask)

        for_each_vector(self.k, stop - start, step, self.lanes, self.masks)


def _source_place(k: Kernel, mode: str, place: Val, axis: PadAxis) -> Val:
    """The index in x along `axis` from which the result at index `place`, which may lie outside of x, is read.

    `mode` is "edge", "reflect" or "wrap"; "constant" gives a valid index, too, as "edge" does. `place` 0 is the first
    element of x.
    """
    extent, ops = k.dim(axis.extent), k.ops
    if mode == "wrap":
        back = extent - 1 - (k.index(-1) - place) % extent  # quotients are unsigned
        return ops.select(place < 0, back, place % extent)
    if mode == "reflect":
        turn = (extent - 1) * 2
        within = ops.abs(place) % ops.max(turn, 1)
        return ops.min(within, turn - within)
    return ops.max(ops.min(place, extent - 1), 0)
