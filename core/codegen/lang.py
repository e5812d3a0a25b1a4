"""The vector language: a `Kernel` is one native function under construction.

    def generate(spec, target):                       # y = x + 1 over a*n + b elements
        k = Kernel(spec, target)
        x, y = k.operand(0, DType.FLOAT32), k.operand(1, DType.FLOAT32)
        with k.chunks(k.dim(spec.size), grain=4096) as (start, stop):
            def body(i, mask):
                y.store(x.load(start + i, target.lanes, mask) + 1.0, start + i, mask)
            k.strip(stop - start, body)
        return k

Python's control flow runs while code is generated (unrolling, choosing); `loop`, `fold`, `when` and the like generate
control flow of the kernel. Nothing is allocated on the stack: `fold` carries values around a loop, and scratch operands
hold what must be in memory. `lathe.core.kernels.call` defines the native signature and the meaning of `counter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TypeAlias

import numpy as np

from lathe.core.codegen import llvm_ir
from lathe.core.codegen.arithmetic import Arithmetic
from lathe.core.codegen.llvm_ir import I64, POINTER, Block, Builder, Module, Phi, Type, Value
from lathe.core.codegen.registers import Pointer, Val, element_type, register_type
from lathe.core.ir.dim import Atom, FloorDiv, Maximum, is_never_negative
from lathe.core.ir.dims import size_index
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import KernelSpec, Status
from lathe.core.kernels.shared.runtime_numbers import runtime_numbers_in
from lathe.core.kernels.target import Target

Index: TypeAlias = "Val | int"
Strip: TypeAlias = Callable[..., "Sequence[Val] | None"]

_STATUS_WORD = 1  # of `counter`, see lathe.core.kernels.call


class Fold:
    """A loop over `index` with carried values, as `Kernel.fold` yields it.

    Inside the loop, `values` are those of this iteration; code that assigns `values` sets those of the next one. After
    the loop, `values` are the last.
    """

    def __init__(self, index: Val, values: list[Val]) -> None:
        self.index = index
        self.values = values


class Kernel:
    """The native function `symbol` under construction: its spec, target and LLVM module, and methods that add code.

    `n`, `tid` and `threads` are the function's arguments: the batch size (in dynamic-shape code the address of the
    table of sizes), this thread's number, and the number of threads.
    """

    def __init__(self, spec: KernelSpec, target: Target) -> None:
        self.spec = spec
        self.target = target
        self.symbol = symbol_of(spec)
        self.module = Module(self.symbol, [POINTER, I64, I64, I64, POINTER])
        self.builder = Builder(self.module)
        self.ops = Arithmetic(self)
        self._table, n, tid, threads, self._counter = self.module.arguments
        self.n, self.tid, self.threads = (Val(self, arg, DType.INT64) for arg in (n, tid, threads))
        self._numbers: dict[str, Val] = self._sizes(spec)
        self._finished = False

    @property
    def lanes(self) -> int:
        """float32 elements in one vector register."""
        return self.target.lanes

    def _sizes(self, spec: KernelSpec) -> dict[str, Val]:
        """Load the dynamic dimensions that the spec uses from the table of sizes; returns them by name.

        In dynamic-shape code the argument `n` is the address of that table. Empty if the spec uses none.
        """
        places = {name: place for name in spec.size_names if (place := size_index(name)) is not None}
        if not places:
            return {}
        table = Pointer(self, self.builder.convert("inttoptr", self.n.ir, POINTER), DType.INT64)
        return {name: table.load(place) for name, place in places.items()}

    # Operands and numbers

    def operand(self, index: int, dtype: DType) -> Pointer:
        """The address of operand `index`. Each call generates a load of it, so call it outside loops."""
        slot = self.builder.offset(self._table, POINTER, llvm_ir.number(I64, index))
        return Pointer(self, self.builder.load(POINTER, slot, 8), dtype)

    def read_numbers(self, index: int, dims: Iterable[Dim]) -> None:
        """Load the run-time numbers that the dimensions use from operand `index`, so that `dim` knows their symbols.

        They are numbers of the spec that code reads in a run (`lathe.core.kernels.shared.runtime_numbers`). Call it
        outside loops, before `dim` is called with these dimensions.
        """
        if wanted := runtime_numbers_in(dims):
            block = self.operand(index, DType.INT64)
            self._numbers |= {name: block.load(place) for name, place in wanted}

    def scratch(self, index: int, nbytes: Dim, dtype: DType) -> Pointer:
        """The address of this thread's part of operand `index`, a `Scratch(nbytes)`, as elements of `dtype`."""
        base = self.operand(index, DType.UINT8).at(self.tid * self.dim(nbytes))
        return base.view(dtype)

    def index(self, value: Index) -> Val:
        """`value` as an int64 scalar, the type of all sizes and offsets."""
        return value if isinstance(value, Val) else Val(self, llvm_ir.number(I64, int(value)), DType.INT64)

    def dim(self, dim: Dim) -> Val:
        """The value of `dim` as an int64 scalar, computed at run time if it has symbols.

        Its symbols may be `n`, the sizes that the spec names (`size0`, `filled0`, ...), and the run-time numbers that
        `read_numbers` has loaded; ValueError for others.
        """
        if isinstance(dim, int):
            return self.index(dim)
        total = self.index(0)
        for monomial, coefficient in dim.terms:
            term = self.index(coefficient)
            for atom in monomial:
                term = term * self._atom(atom)
            total = total + term
        return total

    def constant(self, value: float | int | bool, dtype: DType, lanes: int = 1) -> Val:
        """A constant of an element type, in all lanes of a vector if `lanes` is above 1."""
        scalar = Val(self, llvm_ir.number(element_type(dtype), _literal(value, dtype)), dtype)
        return scalar if lanes == 1 else scalar.splat(lanes)

    def zeros(self, dtype: DType, lanes: int = 1) -> Val:
        return self.constant(0, dtype, lanes)

    def lane_numbers(self, lanes: int) -> Val:
        """The int64 vector 0, 1, ..., `lanes` - 1."""
        return Val(self, llvm_ir.numbers(register_type(DType.INT64, lanes), range(lanes)), DType.INT64, lanes)

    def lane_mask(self, count: Index, lanes: int) -> Val:
        """A mask that is true in the first `count` lanes: in all if `count` is larger, in none if it is <= 0."""
        known = self.index(count).constant
        if known is not None:
            type_ = register_type(DType.BOOL, lanes)
            return Val(self, llvm_ir.numbers(type_, [lane < known for lane in range(lanes)]), DType.BOOL, lanes)
        least = self.ops.max(self.ops.min(count, lanes), 0).cast(DType.INT32)
        numbers = Val(self, llvm_ir.numbers(register_type(DType.INT32, lanes), range(lanes)), DType.INT32, lanes)
        return numbers < least

    # Control flow

    @contextmanager
    def loop(self, start: Index, stop: Index, step: Index = 1) -> Iterator[Val]:
        """`for index in range(start, stop, step)`, with a positive step."""
        with self.fold(start, stop, (), step) as fold:
            yield fold.index

    @contextmanager
    def fold(self, start: Index, stop: Index, init: Sequence[Val], step: Index = 1) -> Iterator[Fold]:
        """A loop with carried values: assign `fold.values` inside; read them after the loop, `init` if it runs 0 times.

        The step is positive. ValueError or TypeError if the number or a type of the values changes.
        """
        b = self.builder
        first, last, stride = self.index(start), self.index(stop), self.index(step)
        before, head = b.block, b.append_block("loop")
        body, after = b.append_block("body"), b.append_block("after")
        b.branch(head)
        b.block = head
        index = self._phi(first, before)
        phis = [self._phi(value, before) for value in init]
        b.branch_if(b.compare_signed("<", index.ir, last.ir), body, after)
        b.block = body
        fold = Fold(index, list(phis))
        yield fold
        for phi, value in zip([index, *phis], [index + stride, *fold.values], strict=True):
            self._add_incoming(phi, value, b.block)
        b.branch(head)
        b.block = after
        fold.values = phis

    @contextmanager
    def when(self, condition: Val) -> Iterator[None]:
        """`if condition`, for code that has no results except its stores."""
        with self.builder.if_then(condition.ir):
            yield

    def choose(
        self, condition: Val, then: Callable[[], Sequence[Val]], other: Callable[[], Sequence[Val]]
    ) -> list[Val]:
        """The values of one of two branches; only the chosen branch is executed.

        ValueError or TypeError unless both branches give equally many values of the same types.
        """
        results: list[tuple[Block, Sequence[Val]]] = []
        with self.builder.if_else(condition.ir) as (yes, no):
            for block, make in ((yes, then), (no, other)):
                with block:
                    values = make()
                    results.append((self.builder.block, values))
        (first_block, first), (second_block, second) = results
        merged = []
        for a, c in zip(first, second, strict=True):
            phi = self._phi(a, first_block)
            self._add_incoming(phi, c, second_block)
            merged.append(phi)
        return merged

    def strip(self, extent: Index, body: Strip, init: Sequence[Val] = (), lanes: int = 0) -> list[Val]:
        """Strip mining: cover `extent` elements by vectors of `lanes` (0: `self.lanes`); returns the carried values.

        `body(i, mask, *values)` runs for every full vector (mask None), then at most once for the elements that remain.
        With an `init`, `values` are carried: `init` in the first call, then what the call before returned. Without
        one, `body` returns None.
        """
        lanes = lanes or self.lanes
        size = self.index(extent)
        full = size // lanes * lanes
        with self.fold(0, full, init, lanes) as fold:
            fold.values = list(body(fold.index, None, *fold.values) or [])
        return self._tail(size, full, lanes, body, fold.values)

    def _tail(self, size: Val, full: Val, lanes: int, body: Strip, values: list[Val]) -> list[Val]:
        rest = size - full
        if rest.constant == 0:
            return values
        mask = self.lane_mask(rest, lanes)
        if rest.constant is not None:
            return list(body(full, mask, *values) or [])
        if not values:
            with self.when(rest > 0):
                body(full, mask)
            return []
        return self.choose(rest > 0, lambda: list(body(full, mask, *values) or []), lambda: values)

    def hidden(self, value: Val) -> Val:
        """The same integer, whose origin LLVM cannot see.

        For the index of an outer loop with many dependent addresses: otherwise LLVM's loop strength reduction weighs
        how to step each of them, which takes longer than everything else that LLVM does.
        """
        return Val(self, self.builder.hidden(value.ir), value.dtype)

    # Sharing work among the threads of a run

    @contextmanager
    def tasks(self, count: Index) -> Iterator[Val]:
        """A loop over task numbers below `count`; each task runs on exactly one thread.

        A single thread counts by itself; several threads share the atomic counter. Nothing resets the counter, so a run
        of the kernel may reach only one such loop.
        """
        b = self.builder
        alone = self.threads.equals(1)
        before, head = b.block, b.append_block("next_task")
        b.branch(head)
        b.block = head
        following = self._phi(self.index(0), before)
        task = self.choose(alone, lambda: [following], lambda: [self._take_task()])[0]
        body, after = b.append_block("task"), b.append_block("no_more_tasks")
        b.branch_if((task < count).ir, body, after)
        b.block = body
        yield task
        self._add_incoming(following, task + 1, b.block)
        b.branch(head)
        b.block = after

    @contextmanager
    def parallel(self, *extents: Index) -> Iterator[tuple[Val, ...]]:
        """A loop over the tasks of a grid: yields coordinates, of which the last varies fastest."""
        sizes = [self.index(extent) for extent in extents]
        with self.tasks(prod(sizes, start=self.index(1))) as task:
            yield self.unravel(task, sizes)

    @contextmanager
    def chunks(self, extent: Index, grain: int) -> Iterator[tuple[Val, Val]]:
        """Tasks `[start, stop)` of a range: `grain` elements each, in the last perhaps fewer.

        A single thread gets one task with the whole range; an empty range has no tasks.
        """
        size = self.index(extent)
        chunk = self.ops.select(self.threads.equals(1), self.ops.max(size, 1), self.index(grain))
        with self.tasks((size + chunk - 1) // chunk) as task:
            start = task * chunk
            yield start, self.ops.min(start + chunk, size)

    def unravel(self, flat: Val, extents: Sequence[Index]) -> tuple[Val, ...]:
        """The coordinates of the row-major position `flat` in an array of shape `extents`."""
        coordinates: list[Val] = []
        for extent in reversed(extents[1:]):
            coordinates.append(flat % extent)
            flat = flat // extent
        return (flat, *reversed(coordinates))

    @property
    def counter(self) -> Pointer:
        """The address of the step's eight int64 words: word 0 hands out tasks, word 1 is the status (a `Status`)."""
        return Pointer(self, self._counter, DType.INT64)

    def refuse(self, status: Status | Val) -> None:
        """Generate code that reports invalid data: it raises the step's status word to `status` atomically.

        The kernel does not stop. After it, the run reads the status and raises an error unless it is OK.
        """
        slot = self.builder.offset(self._counter, I64, llvm_ir.number(I64, _STATUS_WORD))
        self.builder.atomic("max", slot, self.index(status).ir)

    # Internals

    def call(self, name: str, result: Type, arguments: Sequence[Value]) -> Value:
        """Call an LLVM intrinsic or C function on raw LLVM values, and declare it at its first use."""
        return self.builder.call(name, result, arguments)

    def finish(self) -> str:
        """The LLVM assembly of the whole module. No code can be added afterwards."""
        if not self._finished:
            self.builder.return_void()
            self._finished = True
        return str(self.module)

    def _atom(self, atom: Atom) -> Val:
        if isinstance(atom, FloorDiv):
            return self._floor_div(self.dim(atom.numerator), self.dim(atom.denominator), atom.numerator)
        if isinstance(atom, Maximum):
            return self.ops.max(self.dim(atom.one), self.dim(atom.other))
        if atom in self._numbers:
            return self._numbers[atom]
        if atom != "n":
            raise ValueError(f"kernel {self.symbol}: dimension {atom} is unknown, expected n or an entry of the spec")
        return self.n

    def _floor_div(self, above: Val, below: Val, numerator: Dim) -> Val:
        """The floor of `above / below` for a positive `below`; `numerator` is the dimension whose value is `above`.

        `//` of `Val` is correct for non-negative numerators only, so others take further instructions.
        """
        if is_never_negative(numerator):
            return above // below
        below_zero = self.ops.neg((self.ops.neg(above) + (below - 1)) // below)
        return self.ops.select(self.ops.lt(above, 0), below_zero, above // below)

    def _phi(self, value: Val, block: Block) -> Val:
        phi = self.builder.phi(value.ir.type)
        phi.add_incoming(value.ir, block)
        return Val(self, phi, value.dtype, value.lanes)

    def _add_incoming(self, phi: Val, value: Val, block: Block) -> None:
        """Add to `phi` the value that it has when control comes from `block`. TypeError if the types differ."""
        if phi.dtype is not value.dtype or phi.lanes != value.lanes or not isinstance(phi.ir, Phi):
            carried, given = (f"{each.dtype} x {each.lanes}" for each in (phi, value))
            raise TypeError(f"carried value of a loop or branch: expected {carried}, got {given}")
        phi.ir.add_incoming(value.ir, block)

    def _take_task(self) -> Val:
        return Val(self, self.builder.atomic("add", self._counter, llvm_ir.number(I64, 1)), DType.INT64)


def symbol_of(spec: KernelSpec) -> str:
    """The name of the native function generated for `spec`."""
    return spec.symbol


def _literal(value: float | int | bool, dtype: DType) -> float | int:
    if dtype is DType.BFLOAT16:
        return int(np.asarray(value, dtype.numpy).view(np.uint16))
    return float(value) if dtype.is_float else int(value)


__all__ = ["Fold", "Index", "Kernel", "Pointer", "Val", "symbol_of"]
