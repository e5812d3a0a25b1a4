"""Code for the rows that a mask selects: blocks of them are gathered, computed and written back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lathe.core.codegen import llvm_ir
from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.control.frame_cpu import Frame
from lathe.core.kernels.control.selected_spec import BASE, MASK, RESULT, SelectedSpec
from lathe.core.kernels.control.spec import Base, Operand, Own
from lathe.core.kernels.target import Target

# With fewer rows of the result for each thread than this part of a block (16 of 256 rows), one thread computes all of
# them: each thread reads all weights of the body.
_LEAST_PART_PER_THREAD = 16


def generate(spec: SelectedSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    first, last = _rows_of_thread(k, k.dim(spec.rows), max(1, spec.block // _LEAST_PART_PER_THREAD))
    with k.when(first < last):
        _SelectedRows(k, spec, first, last).write()
    return k


def _rows_of_thread(k: Kernel, rows: Val, least: int) -> tuple[Val, Val]:
    """The rows of the result that this thread computes: the first one, and the one after the last.

    Both are `rows` for a thread without work. With fewer than `least` rows per thread, thread 0 takes all.
    """
    shared = rows >= k.threads * least
    alone = k.ops.select(k.tid.equals(0), k.index(0), rows)
    first = k.ops.select(shared, rows * k.tid // k.threads, alone)
    last = k.ops.select(shared, rows * (k.tid + 1) // k.threads, rows)
    return first, last


class _SelectedRows:
    """The work of one thread: the rows from `first` up to `last`."""

    def __init__(self, k: Kernel, spec: SelectedSpec, first: Val, last: Val) -> None:
        self.k, self.spec, self.first, self.last = k, spec, first, last
        self.frame = Frame(k, k.scratch(spec.scratch, spec.scratch_bytes, DType.UINT8))
        self.row_indices, self.element_indices = (
            self.frame.own(offset).view(DType.INT64) for offset in (spec.row_indices, spec.element_indices)
        )
        self.mask = k.operand(MASK, DType.UINT8)
        self.result = k.operand(RESULT, spec.dtype)
        self.sources = [k.operand(source.operand, DType.UINT8) for source in spec.sources]
        fixed = {base.index for base in spec.tape.bases if isinstance(base, Operand)}
        self.operands = {index: k.operand(index, DType.UINT8) for index in sorted(fixed)}
        self.all_rows = k.dim(spec.rows)

    def write(self) -> None:
        k, count = self.k, self.last - self.first
        self._copy_base(count)
        elements = count * self.spec.places

        def is_unfinished(done: Val, *_: Val) -> Val:
            return (done < elements) & ~self.frame.must_stop()

        def block(done: Val, row: Val, element: Val) -> Sequence[Val]:
            done, row, element, selected = self._collect(elements, done, row, element)
            with k.when(selected > 0):
                self._compute(selected)
            return done, row, element

        _while(k, [k.index(0), self.first, self.first], is_unfinished, block)
        k.refuse(self.frame.status())

    def _copy_base(self, count: Val) -> None:
        """Copy the thread's rows of the base to the result, unless both are in the same memory."""
        k, row_bytes = self.k, self.spec.width * self.spec.dtype.itemsize
        base, result = k.operand(BASE, DType.UINT8), self.result.view(DType.UINT8)
        with k.when(~base.distance_from(result).equals(0)):
            start = self.first * row_bytes
            self.frame.copy(result.at(start), base.at(start), count * row_bytes)

    def _collect(self, elements: Val, done: Val, row: Val, element: Val) -> tuple[Val, ...]:
        """Write the indices of the next selected elements, up to a whole block, to the two lists in scratch.

        `done` of the mask's `elements` have been read; `row` and `element` are the next row, and the next element of
        the mask. Returns the new `done`, `row` and `element`, and the number of elements found.
        """
        k, skipped = self.k, self.all_rows - (self.last - self.first)

        def has_room(done: Val, row: Val, element: Val, selected: Val) -> Val:
            return (done < elements) & (selected < self.spec.block)

        def step(done: Val, row: Val, element: Val, selected: Val) -> Sequence[Val]:
            self.row_indices.store(row, selected)
            self.element_indices.store(element, selected)
            is_selected = ~self.mask.load(element).equals(0)
            is_last = (row + 1).equals(self.last)  # the next place begins with the thread's first row
            return (
                done + 1,
                k.ops.select(is_last, self.first, row + 1),
                k.ops.select(is_last, element + 1 + skipped, element + 1),
                k.ops.select(is_selected, selected + 1, selected),
            )

        done, row, element, selected = _while(k, [done, row, element, k.index(0)], has_room, step)
        return done, row, element, selected

    def _compute(self, selected: Val) -> None:
        """Gather the rows of a block, run the tape, and write the results."""
        k, spec = self.k, self.spec
        for source, pointer in zip(spec.sources, self.sources, strict=True):
            indices = self.element_indices if source.is_per_place else self.row_indices
            rows = self.frame.own(source.rows)
            with k.loop(0, selected) as i:
                origin = pointer.at(indices.load(i) * source.nbytes)
                self.frame.copy(rows.at(i * source.nbytes), origin, k.index(source.nbytes))
        with self.frame.rows(selected):
            self.frame.run(spec.tape, [self._base(base) for base in spec.tape.bases])
        results = self.frame.own(spec.results).view(spec.dtype)
        with k.loop(0, selected) as i:
            self._write_row(self.result.at(self.row_indices.load(i) * spec.width), results.at(i * spec.width))

    def _write_row(self, target: Pointer, source: Pointer) -> None:
        lanes = self.k.target.vector_bytes // self.spec.dtype.itemsize

        def body(i: Val, mask: Val | None) -> None:
            value = source.load(i, lanes, mask)
            target.store(target.load(i, lanes, mask) + value if self.spec.adds else value, i, mask)

        self.k.strip(self.spec.width, body, lanes=lanes)

    def _base(self, base: Base) -> Pointer:
        match base:
            case Operand(index):
                return self.operands[index]
            case Own(offset):
                return self.frame.own(offset)
        raise TypeError(f"base of the tape: expected Operand or Own, got {base}")


def _while(
    k: Kernel, values: Sequence[Val], goes_on: Callable[..., Val], body: Callable[..., Sequence[Val]]
) -> list[Val]:
    """`while goes_on(*values): values = body(*values)`; returns the last values, int64 scalars."""
    b = k.builder
    before = b.block
    head, inside, after = (b.append_block(name) for name in ("head", "inside", "after"))
    b.branch(head)
    b.block = head
    phis = [b.phi(llvm_ir.I64) for _ in values]
    for phi, value in zip(phis, values, strict=True):
        phi.add_incoming(value.ir, before)
    current = [Val(k, phi, DType.INT64) for phi in phis]
    b.branch_if(goes_on(*current).ir, inside, after)
    b.block = inside
    for phi, value in zip(phis, body(*current), strict=True):
        phi.add_incoming(value.ir, b.block)
    b.branch(head)
    b.block = after
    return current
