"""The plan: the kernel calls of a run in order, the addresses of their operands, and the memory that they need.

A plan is plain, immutable data. It can be printed, stored next to its object code, and run for every batch size `n`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import gcd

import numpy as np

from lathe.core.byte_sizes import format_bytes
from lathe.core.ir.dim import SymDim, affine, floor_div, substitute
from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import Dim, TensorType, ValueType
from lathe.core.kernels.call import KernelCall, KernelSpec, range_at
from lathe.core.ops.opdef.registry import may_run_forever
from lathe.core.plan.liveness import Affine

ARENA, WEIGHTS = 0, 1  # the first bases; model inputs, states and outputs follow in this order, then flags
FIRST_PORT = WEIGHTS + 1
NO_BATCH: Dim = -1  # in `Plan.supposed`: an assumption that never holds, so that the plan serves no batch size
FLAG_BYTES = 16  # the distance between flags: operands on GPUs are aligned to 16 bytes


@dataclass(frozen=True, slots=True)
class Address:
    """The address `bases[base] + offset` of an operand, in bytes, where `offset` is `a*n + b` (`Affine`).

    A run of an empty batch uses the addresses of n = 1, because buffers of constant size are disjoint from the others
    for n >= 1 only; see also `Plan.least_rows`.
    """

    base: int
    offset: Affine = Affine()


@dataclass(frozen=True, slots=True)
class StepRange:
    """The kernel of a step on a GPU for batches of `first` and more; `operands` are positions among the step's."""

    first: int
    symbol: str
    summary: str
    grid: tuple[Dim, ...]
    operands: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel call of the tape.

    If it has `ranges`, ascending from 0, each batch size has the kernel of its range; `symbol`, `summary` and `grid`
    are then those of the first one.
    """

    symbol: str  # of the native function
    operands: tuple[Address, ...]
    label: str  # the name of the node that it runs
    op: str
    summary: str  # algorithm and tile, for people
    outputs: tuple[str, ...]  # types, for people
    flops: Affine = Affine()
    bytes: Affine = Affine()  # read and written
    grid: tuple[Dim, ...] = ()  # on a GPU: programs along up to three axes
    flag: int | None = None  # on a GPU: the index of the flag that the kernel sets if it refuses its data
    may_not_end: bool = False  # some inputs can make it run for ever
    has_barrier: bool = (
        True  # the threads wait at a barrier after this step; False if the next step is in the same stage
    )
    ranges: tuple[StepRange, ...] = ()  # on a GPU: the kernels by batch size, if there are several

    def at(self, n: int) -> Step:
        """The step as batches of `n` run it, with one kernel and its operands only."""
        if not self.ranges:
            return self
        chosen = range_at(self.ranges, n)
        operands = tuple(self.operands[place] for place in chosen.operands)
        return replace(
            self, symbol=chosen.symbol, summary=chosen.summary, grid=chosen.grid, operands=operands, ranges=()
        )

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols of all kernels of the step."""
        return tuple(each.symbol for each in self.ranges) or (self.symbol,)


@dataclass(frozen=True, slots=True)
class Fallback:
    """A node that runs on its NumPy reference, between native segments. `index` is its index in `Plan.fallbacks`."""

    index: int
    label: str
    op: str
    reason: str


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps [first, last) of the tape, run by one native call."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Port:
    """An input, output or state of the model: its name, type and the number of its base."""

    name: str
    type: ValueType
    base: int


@dataclass(frozen=True, slots=True)
class Region:
    """A buffer of the arena, which holds `values` from stage `first` to stage `last`, both included."""

    offset: Affine
    size: Affine
    first: int
    last: int
    values: tuple[str, ...]  # names; empty for scratch memory


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between the arena and memory of the host, in which a value waits for its next use.

    The copy begins when the steps before `begin` have ended, and it has ended before step `end` begins. If the two are
    equal, it happens between two steps. Steps from `end` to `last` use the bytes; it matters only for weights.
    """

    name: str  # of the value
    into: bool  # to the arena, or from it
    begin: int
    end: int
    last: int
    arena: Affine  # the offset of the bytes in the arena
    host: Address  # a weight in the weight block, or the offset in the swap memory (`Plan.swap_base`)
    nbytes: Affine


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A cut point of the tape: later steps need a single value of the arena that earlier steps wrote."""

    step: int  # the index of the first step after the cut point
    place: Affine  # the offset of the value in the arena
    row: int  # bytes of one row of the value; the rows of the batch are contiguous
    arena: Affine  # bytes of the arena that the later steps need, including the value


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes of a plan for n = 1.

    `peak` is the arena as planned, `lower_bound` the most that is live at one time (stage), `unshared` the sum of all
    buffers, `weights` the weight block.
    """

    peak: int
    lower_bound: int
    unshared: int
    weights: int

    def __str__(self) -> str:
        over = self.peak / self.lower_bound - 1 if self.lower_bound else 0.0
        return (
            f"arena {format_bytes(self.peak)} per row (lower bound {format_bytes(self.lower_bound)}, {over:+.1%}; "
            f"without sharing {format_bytes(self.unshared)}), weights {format_bytes(self.weights)}"
        )


@dataclass(frozen=True)
class Plan:
    """Everything that the runtime needs, except object code and the bytes of weights."""

    inputs: tuple[Port, ...]
    states: tuple[Port, ...]
    outputs: tuple[Port, ...]
    steps: tuple[Step, ...]
    schedule: tuple[Segment | Fallback, ...]
    arena: Affine
    weights: int
    memory: Memory
    fallbacks: Graph = field(default_factory=Graph)  # the nodes that run on the reference, and their constants
    value_addresses: dict[str, tuple[Address, TensorType]] = field(
        default_factory=dict
    )  # values of fallbacks and `copies`
    copies: tuple[tuple[str, int], ...] = ()  # values to copy at the end, with the base of the output or state
    log: tuple[str, ...] = ()  # what the passes did, for people
    threads: int = 1  # the most threads that may take part in a run: there is scratch memory for each of them
    regions: tuple[Region, ...] = ()  # the map of the arena, for people
    max_rows: int | None = None  # the largest batch that the kernels can index; None: no limit
    cut_points: tuple[CutPoint, ...] = ()  # the cut points, after which the chunks of a batch may have more rows
    supposed: tuple[Dim, ...] = ()  # assumptions on n: the plan is right as long as none of them is negative
    sizes: tuple[str, ...] = ()  # of dynamic-shape code: the model's symbols, in the order of the table of sizes
    transfers: tuple[Transfer, ...] = ()  # in the order in which they begin
    swap: Affine = field(default_factory=Affine)  # bytes of swap memory on the host
    least_rows: int = 1  # smaller batches have the addresses of a batch of this size, as buffers are disjoint only then
    streamed: int = 0  # bytes at the end of the weight block that stay on the host, and are copied in before their use

    @property
    def swap_base(self) -> int:
        """The number of the base of the swap memory: pinned memory of the host for values that left the arena."""
        return self.flags_base + 1

    def address_rows(self, n: int) -> int:
        """The batch size whose addresses a batch of `n` has."""
        return max(n, self.least_rows)

    @property
    def resident(self) -> int:
        """The bytes of the weight block that stay in the memory of the device."""
        return self.weights - self.streamed

    @property
    def serves_no_batch(self) -> bool:
        """Whether the plan is a placeholder that serves no batch size, as each batch size is compiled separately."""
        return NO_BATCH in self.supposed

    @property
    def may_not_end(self) -> bool:
        """Whether some inputs can make a run last for ever."""
        return any(step.may_not_end for step in self.steps) or may_run_forever(self.fallbacks.nodes)

    @property
    def flags(self) -> int:
        """The number of flags: words of a GPU's memory that are 0 at the start of a run.

        A kernel that refuses its data sets its flag, and the run fails.
        """
        return sum(step.flag is not None for step in self.steps)

    @property
    def flags_base(self) -> int:
        """The number of the base of the flags, which follows the bases of inputs, states and outputs."""
        return WEIGHTS + 1 + len(self.inputs) + len(self.states) + len(self.outputs)

    def state_port(self, name: str, value: Array | None = None) -> Port:
        """The port of the state `name`; KeyError if there is none.

        `value`: an array that the state is to have. ValueError if its dtype or shape is not that of the state.
        """
        port = next((port for port in self.states if port.name == name), None)
        if port is None:
            states = ", ".join(port.name for port in self.states) or "none"
            raise KeyError(f"state '{name}' is unknown, the states are: {states}")
        if value is not None and not _is_of_type(value, port.type):
            raise ValueError(f"state '{name}': expected {port.type}, got {value.dtype}{list(value.shape)}")
        return port

    @property
    def flops(self) -> Affine:
        return sum((step.flops for step in self.steps), Affine())

    @property
    def work(self) -> Affine:
        """A rough estimate of the duration of a run, in operations: arithmetic, plus 8 operations per byte moved."""
        return sum((step.flops + step.bytes.times(8) for step in self.steps), Affine())


def _is_of_type(array: Array, type_: ValueType) -> bool:
    """Whether an array has this dtype, and this shape as far as it is known; True for other types than tensors."""
    if not isinstance(type_, TensorType):
        return True
    return type_.dtype.holds(array.dtype) and (not type_.is_static or array.shape == type_.shape)


@dataclass(frozen=True, slots=True)
class WeightItem:
    """One array of the weight block: a constant as it is or in a kernel's layout, or a table of a kernel.

    `offset` and `nbytes` are in bytes. `make` returns the array, and may compute it at each call.
    """

    offset: int
    nbytes: int
    make: Callable[[], Array]

    @property
    def data(self) -> Array:
        return np.ascontiguousarray(self.make())


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """A plan, the specs of the kernels to generate (by function name), and the arrays of its weight block.

    `calls` has for every step the index of its node in `Graph.nodes`, and the kernel call. `bodies` has the plans of
    the bodies of control-flow nodes that are one step, by the index of the node. Only the checker reads these two.
    """

    plan: Plan
    specs: dict[str, KernelSpec]
    weights: tuple[WeightItem, ...]
    calls: tuple[tuple[int, KernelCall], ...] = ()
    bodies: Mapping[int, tuple[PlannedGraph, ...]] = field(default_factory=dict)


def weight_chunks(planned: PlannedGraph) -> Iterator[memoryview]:
    """Yield the weight block of `plan.weights` bytes as successive chunks; the gaps between items are zero.

    ValueError if the array of an item has another size than the plan says.
    """
    end = 0
    for item in planned.weights:
        yield memoryview(bytes(item.offset - end))
        data = item.data.reshape(-1).view(np.uint8).data
        if len(data) != item.nbytes:
            raise ValueError(f"weights at {item.offset} have {len(data)} bytes, expected {item.nbytes}")
        yield data
        end = item.offset + item.nbytes
    yield memoryview(bytes(planned.plan.weights - end))


def estimated_affine(dim: Dim) -> Affine:
    """A dimension in the form of `exact_affine`, for costs; if it has none, a constant: its value for n = 1.

    The constant is 0 if the dimension depends on symbols other than `n`, or divides by zero for n = 1.
    """
    if isinstance(dim, int):
        return Affine(b=dim)
    exact = exact_affine(dim)
    if exact is not None:
        return exact
    value = substitute(dim, {"n": 1})
    return Affine(b=value if isinstance(value, int) else 0)


def exact_affine(dim: Dim) -> Affine | None:
    """`dim` as `a*n + b` with a, b >= 0, or, over sizes, as a multiple of one unit; None for any other dimension.

    A unit is an expression over the sizes of dynamic-shape code, such as `size0*size1`.
    """
    parts = affine(dim, "n")
    if parts is None and has_only_sizes(dim):
        return _in_units(dim)
    return Affine(*parts) if parts is not None and min(parts) >= 0 else None


def _in_units(dim: Dim) -> Affine:
    """A dimension over sizes as a number times one unit: the common divisor of its coefficients is taken out."""
    numbers = [number for _, number in dim.terms] if isinstance(dim, SymDim) else [dim]
    common = gcd(*numbers)
    return Affine(units=((floor_div(dim, common), common),))
