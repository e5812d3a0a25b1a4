"""The frozen plan: a tape of steps with addresses, and what memory it needs.

A plan is plain data: it can be printed, stored beside its object code, and executed for every batch size `n`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd

import numpy as np

from core.amounts import amount
from core.ir.dim import SymDim, affine, evaluate, floor_div, symbols
from core.ir.dims import is_sized
from core.ir.graph import Array, Graph
from core.ir.types import Dim, TensorType, ValueType
from core.kernels.catalog.base import KernelCall, KernelSpec
from core.ops.registry import may_not_end
from core.plan.liveness import Affine

ARENA, WEIGHTS = 0, 1  # the first bases; model inputs, states and outputs follow in this order, then flags
FIRST_PORT = WEIGHTS + 1
NO_BATCH: Dim = -1  # what a plan supposes that serves no batch size
FLAG_BYTES = 16  # from one flag to the next: operands of GPUs are that far aligned


@dataclass(frozen=True, slots=True)
class Address:
    """`bases[base] + a*n + b`, in bytes. An empty batch has the addresses of n = 1: only from there on do buffers that
    are not proportional to n keep clear of the others."""

    base: int
    offset: Affine = Affine()


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel of the tape."""

    symbol: str  # of the native function
    operands: tuple[Address, ...]
    label: str  # the node it came from
    op: str
    summary: str  # algorithm and tile, for people
    outputs: tuple[str, ...]  # types, for people
    flops: Affine = Affine()
    bytes: Affine = Affine()
    grid: tuple[Dim, ...] = ()  # on a GPU: programs along up to three axes
    flag: int | None = None  # on a GPU: the place among the plan's flags, where the kernel may refuse its data
    may_not_end: bool = False  # data can make it go on for ever
    meets: bool = True  # whether threads wait for each other behind it: not where the next step is of the same stage


@dataclass(frozen=True, slots=True)
class Fallback:
    """A node that runs on its NumPy reference, between two native segments; `index` is its place in Plan.fallbacks."""

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
    """An input, output or state of the model: its name, type and base."""

    name: str
    type: ValueType
    base: int


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of the arena and what they hold, from node `first` of the order to node `last`."""

    offset: Affine
    size: Affine
    first: int
    last: int
    values: tuple[str, ...]  # none: scratch memory


@dataclass(frozen=True, slots=True)
class Seam:
    """A place between steps that one value of the arena crosses, and nothing else of it."""

    step: int  # the first one behind
    place: Affine  # of the value in the arena
    row: int  # bytes of the value for each row of the batch, one after the other
    arena: Affine  # what the steps behind need, the value included


@dataclass(frozen=True, slots=True)
class Memory:
    """What the arena costs: `peak` as planned, `lower_bound` the most bytes alive at one step, both for n = 1;
    `unshared` is the sum of all buffers."""

    peak: int
    lower_bound: int
    unshared: int
    weights: int

    def __str__(self) -> str:
        over = self.peak / self.lower_bound - 1 if self.lower_bound else 0.0
        return (
            f"arena {amount(self.peak)} per row (lower bound {amount(self.lower_bound)}, {over:+.1%}; "
            f"without sharing {amount(self.unshared)}), weights {amount(self.weights)}"
        )


@dataclass(frozen=True)
class Plan:
    """Everything the runtime needs besides object code and weight bytes."""

    inputs: tuple[Port, ...]
    states: tuple[Port, ...]
    outputs: tuple[Port, ...]
    steps: tuple[Step, ...]
    schedule: tuple[Segment | Fallback, ...]
    arena: Affine
    weights: int
    memory: Memory
    fallbacks: Graph = field(default_factory=Graph)  # the nodes that run on the reference, and their constants
    located: dict[str, tuple[Address, TensorType]] = field(default_factory=dict)  # values fallbacks touch, in memory
    copies: tuple[tuple[str, int], ...] = ()  # values that must be copied to a base (an output or a state) at the end
    log: tuple[str, ...] = ()  # what the passes did, for people
    threads: int = 1  # scratch memory is for so many: no more may take part in a run
    regions: tuple[Region, ...] = ()  # the map of the arena, for people
    most_rows: int | None = None  # that kernels reach; None: any
    seams: tuple[Seam, ...] = ()  # where a batch may be parted otherwise than before
    supposed: tuple[Dim, ...] = ()  # of n: the plan is right as long as none is negative
    sizes: tuple[str, ...] = ()  # of code for any sizes: the model's symbols, whose values its table has

    @property
    def serves_none(self) -> bool:
        """Whether it is no code, but stands for all batch sizes where each has code of its own."""
        return NO_BATCH in self.supposed

    @property
    def may_not_end(self) -> bool:
        """Whether data can make a run go on for ever."""
        return any(step.may_not_end for step in self.steps) or may_not_end(self.fallbacks.nodes)

    @property
    def flags(self) -> int:
        """How many steps have a flag: a word that is 0 when a run begins."""
        return sum(step.flag is not None for step in self.steps)

    @property
    def flags_base(self) -> int:
        """The base of the flags, behind those of all ports."""
        return WEIGHTS + 1 + len(self.inputs) + len(self.states) + len(self.outputs)

    @property
    def flops(self) -> Affine:
        return sum((step.flops for step in self.steps), Affine())

    @property
    def work(self) -> Affine:
        """A rough measure of the run's length: arithmetic, and bytes at eight operations each."""
        return sum((step.flops + step.bytes.times(8) for step in self.steps), Affine())


@dataclass(frozen=True, slots=True)
class WeightItem:
    """One array of the weight block: a constant as it is, or in a kernel's layout. `make` gives its elements."""

    offset: int
    nbytes: int
    make: Callable[[], Array]

    @property
    def data(self) -> Array:
        return np.ascontiguousarray(self.make())


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan, what code it needs, and the parts of its weight block.

    `calls` names for every step the node that it runs, by its place in `Graph.nodes`, and the call that the step was
    made of. `bodies` holds the plans of the bodies of a control-flow node that is one step, by the node's place. Both
    only serve to check the plan.
    """

    plan: Plan
    specs: dict[str, KernelSpec]
    weights: tuple[WeightItem, ...]
    calls: tuple[tuple[int, KernelCall], ...] = ()
    bodies: Mapping[int, tuple[Planned, ...]] = field(default_factory=dict)


def weight_chunks(planned: Planned) -> Iterator[memoryview]:
    """The weight block of `plan.weights` bytes, piece by piece; what lies between items is zero."""
    end = 0
    for item in planned.weights:
        yield memoryview(bytes(item.offset - end))
        data = item.data.reshape(-1).view(np.uint8).data
        if len(data) != item.nbytes:
            raise ValueError(f"weights at {item.offset} have {len(data)} bytes, {item.nbytes} were announced")
        yield data
        end = item.offset + item.nbytes
    yield memoryview(bytes(planned.plan.weights - end))


def affine_of(dim: Dim) -> Affine:
    """A dimension over `n` as `a*n + b`, rounded up where it is not of that form (only used for costs)."""
    if isinstance(dim, int):
        return Affine(b=dim)
    exact = exact_affine(dim)
    return exact if exact is not None else Affine(b=evaluate(dim, {"n": 1}) if symbols(dim) <= {"n"} else 0)


def exact_affine(dim: Dim) -> Affine | None:
    """`dim` as `a*n + b` with non-negative parts, or over sizes as a multiple of one unit; None for others."""
    parts = affine(dim, "n")
    if parts is None and is_sized(dim):
        return _in_units(dim)
    return Affine(*parts) if parts is not None and min(parts) >= 0 else None


def _in_units(dim: Dim) -> Affine:
    """A dimension over sizes as a multiple of one unit."""
    numbers = [number for _, number in dim.terms] if isinstance(dim, SymDim) else [dim]
    common = gcd(*numbers)
    return Affine(units=((floor_div(dim, common), common),))
