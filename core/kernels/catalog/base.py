"""What the planner knows of a kernel without generating it.

`select` turns one node into a `KernelCall`: which generator with which parameters (`KernelSpec`), which operands it
takes, what memory it needs besides, and what it costs. The only symbol left in a graph that is being planned is `n`.

For a CPU every kernel is one native function `void kernel(i8** operands, i64 n, i64 tid, i64 threads, i64* counter)`:
`operands` are the addresses in the order of `KernelCall.operands`; all threads of a run call it with their own `tid`,
and share the zeroed `counter` to hand out tiles. It returns when this thread finds no more work; others may
still be busy.

`counter` points to a cache line of eight words: word 0 hands out tasks; word 1 is the step's status, which a kernel
sets to a `Status` when it meets data it must refuse (it never reads or writes out of bounds); then the run raises.

For a GPU it is a Triton function of the operands' addresses, each a multiple of `core.kernels.target.GPU_ALIGNMENT`
bytes, and then n as int32. `KernelCall.grid` counts its programs; no operand may have 2**31 elements or more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from core.ir.dim import SymDim
from core.ir.dims import place_of
from core.ir.graph import Array, Graph, Node, Value
from core.ir.text import Weights, print_graph
from core.ir.types import Dim, DType, TensorType
from core.kernels.catalog.nest import broadcast_strides, row_major
from core.kernels.target import GpuTarget, Target
from core.ops import registry


class Status(IntEnum):
    """Why a kernel refused its data."""

    OK = 0
    INDEX_OUT_OF_RANGE = 1
    INTERRUPTED = 2  # not by a kernel: somebody wants the run to end, see Session.interrupt
    AXIS_OUT_OF_RANGE = 3


@dataclass(frozen=True)
class KernelSpec:
    """Parameters of a generator. Subclass per family, with fields of plain data, dimensions, types and bodies only:
    specs of equal `key` produce the same code, so equal nodes share it and it is cached on disk."""

    family: ClassVar[str] = ""  # the generator is core.kernels.<cpu or cuda>.<family>.generate(spec, target)
    telling: ClassVar[bool] = False  # whether the machine decides: what wins against one of the family beats the others

    @cached_property
    def key(self) -> str:
        """Stable text of all fields."""
        fields = ", ".join(f"{f.name}={_key(getattr(self, f.name))}" for f in dataclasses.fields(self))
        return f"{self.family}({fields})"

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.key.encode()).hexdigest()[:24]

    @cached_property
    def size_names(self) -> tuple[str, ...]:
        """The sizes of a table that the code reads (`core.ir.dims`)."""
        return tuple(sorted(name for name in _symbols_in(self) if place_of(name) is not None))

    @property
    def facts(self) -> dict[str, Any]:
        """The fields by name, for a spec that adds others to them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def symbol(self) -> str:
        """The name of the native function."""
        return f"lathe_{self.family}_{self.digest}"

    @property
    def summary(self) -> str:
        """A few words for `explain()`: tile, algorithm."""
        return self.family

    @property
    def finding(self) -> str:
        """What the tuner notes when it has chosen this kernel: its symbol as the catalog offers it, and behind a blank
        what measuring has added to that."""
        return self.symbol

    def general(self, target: Target, place: int) -> tuple[KernelSpec, tuple[int, ...]] | None:
        """The spec of code that reads some numbers of this one when it runs, and those numbers: the same spec for all
        that differ in nothing else. None where code must be made for them. See `core.kernels.catalog.numbers`.
        `place`: which operand brings the numbers."""
        return None

    def settled(self, call: KernelCall, n: int, way: str) -> KernelCall:
        """The call of this spec with what was found to be the best way to run it for a batch of `n`."""
        return call

    def recalled(self, call: KernelCall, added: str) -> KernelCall:
        """The call of this spec, which the catalog offers, with what measuring had added."""
        return call


@dataclass(frozen=True, slots=True)
class In:
    """The address of the node's input `index` (arena, constant, model input or state)."""

    index: int


@dataclass(frozen=True, slots=True)
class Out:
    """The address of the node's output `index`."""

    index: int = 0


@dataclass(frozen=True, slots=True)
class Packed:
    """The address of a constant input in the kernel's own layout, made once at compile time.

    `key` names the layout: the same input packed the same way is stored once. `nbytes` of the result, where that is
    known without packing: large weights are packed when they are written, so that they are never all in memory.
    """

    index: int
    key: str
    pack: Callable[[Array], Array] = field(compare=False)
    nbytes: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Scratch:
    """The address of `nbytes` of scratch per thread, 64-byte aligned (thread t owns bytes [t*nbytes, (t+1)*nbytes)).

    `shared=True`: one block for all threads together.
    """

    nbytes: Dim
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Outer:
    """The address of the value `index` that the node's bodies capture (see `core.ir.graph.node_reads`)."""

    index: int


@dataclass(frozen=True, slots=True)
class Block:
    """The address of bytes that belong to the node alone, such as the weights of its body."""

    key: str
    data: Array = field(compare=False)


@dataclass(frozen=True, slots=True)
class Flag:
    """The address of an int32 of this step's own, on a GPU: 0 when a run begins. A kernel that meets data it must
    refuse leaves a `Status` there; then the run raises."""


Operand: TypeAlias = In | Out | Packed | Scratch | Outer | Block | Flag


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One step of a plan before it has addresses."""

    spec: KernelSpec
    operands: tuple[Operand, ...]
    inplace: tuple[int, ...] = ()  # inputs whose memory output 0 may take over, as long as no other operand is there
    strided: tuple[In | Out, ...] = ()  # operands that may lie inside other tensors: `Request.strides` was honoured
    pointwise: bool = False  # reads each element of `inplace` before it writes there: any output may take its memory
    flops: Dim = 0
    bytes: Dim = 0  # least memory traffic: inputs read once, outputs written once
    parts: tuple[KernelSpec, ...] = ()  # further kernels, which this one calls
    grid: tuple[Dim, ...] = ()  # on a GPU: programs along up to three axes, the last two at most 65535
    shared: KernelSpec | None = None  # of code for other numbers, too: the last operand is a Block of those of `spec`

    @property
    def code(self) -> KernelSpec:
        """The spec of the code that runs."""
        return self.shared or self.spec


def is_exact(node: Node) -> bool:
    """Whether a product must be computed by its definition, as its result is divided by its own size
    (`core.passes.exact_products`)."""
    return bool(node.attrs.get("exact"))


@dataclass(frozen=True, slots=True)
class Request:
    """What `select` may look at."""

    node: Node
    constants: Mapping[Value, Array]
    target: Target | GpuTarget
    threads: int = 1
    rank: int = 0  # for selectors with tiles to choose from: 0 is the one expected to be fastest, 1 the next, ...
    winograd: bool = True  # whether products may be computed otherwise than by the definition
    strides: Mapping[Value, tuple[Dim, ...]] = field(default_factory=dict)  # of values inside others, in elements
    placed: frozenset[Value] = frozenset()  # inputs that lie in their place inside the output already

    @property
    def cpu(self) -> Target:
        """The target of a selector for CPUs."""
        if not isinstance(self.target, Target):
            raise TypeError(f"a selector for CPUs was asked for a kernel for {self.target.device}")
        return self.target

    @property
    def gpu(self) -> GpuTarget:
        """The target of a selector for GPUs."""
        if not isinstance(self.target, GpuTarget):
            raise TypeError(f"a selector for GPUs was asked for a kernel for {self.target.device}")
        return self.target

    def constant(self, index: int) -> Array | None:
        value = self.node.input(index)
        return self.constants.get(value) if value is not None else None

    def strides_of(self, value: Value) -> tuple[Dim, ...]:
        return self.strides[value] if value in self.strides else row_major(value.shape)

    def walk(self, value: Value, to: Sequence[Dim]) -> tuple[Dim, ...]:
        """Strides of a value while it is walked in the shape that it broadcasts to."""
        return broadcast_strides(value.shape, to, self.strides_of(value))

    def pitch(self, value: Value) -> Dim | None:
        """The step from one row of contiguous elements along the last axis to the next; None where it is not one step
        for all rows."""
        *outer, last = self.strides_of(value)
        step = next((s for s, n in zip(reversed(outer), reversed(value.shape[:-1]), strict=True) if n != 1), 1)
        dense = row_major(value.shape[:-1])
        even = all(n == 1 or s == d * step for s, d, n in zip(outer, dense, value.shape[:-1], strict=True))
        return step if even and (last == 1 or value.shape[-1] == 1) else None


Selector: TypeAlias = Callable[[Request], KernelCall | None]
Offer: TypeAlias = Callable[[Request], Iterable[KernelCall]]
_Asked = TypeVar("_Asked")
_SELECTORS: dict[tuple[str, str], list[Selector]] = {}  # by device and operator
_OFFERS: dict[tuple[str, str], list[Offer]] = {}

_ELSEWHERE = {"cuda": "core.kernels.catalog.cuda"}  # what declares a device's kernels, read when one is asked for

_MOST_OPERANDS = 1024  # code grows with each; a node of more is a mistake or an attack

# Operators whose output is the input's bytes under another shape: no kernel, the planner makes a view.
VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})


def covers(*ops: str, device: str = "cpu", first: bool = False) -> Callable[[Selector], Selector]:
    """Decorator: this selector answers for these operators on a device ("cpu", "cuda"). It returns None for a node it
    cannot do. `first`: it is asked before those that are there already."""

    def add(selector: Selector) -> Selector:
        for op in ops:
            known = _SELECTORS.setdefault((device, op), [])
            known.insert(0 if first else len(known), selector)
        return selector

    return add


def uncover(op: str) -> None:
    """Nothing answers for this operator any more, on any device."""
    for table in (_SELECTORS, _OFFERS):
        for key in [key for key in table if key[1] == op]:
            del table[key]


def covered(device: str = "cpu") -> frozenset[str]:
    """The operators that have kernels on a device."""
    _declare(device)
    return frozenset(op for where, op in _SELECTORS if where == device)


def has_elements(node: Node) -> bool:
    """Whether no operand is empty for every batch size: kernels are written for extents of at least one."""
    types = [value.type for value in (*node.inputs, *node.outputs) if value is not None]
    return not any(isinstance(type_, TensorType) and 0 in (type_.shape or ()) for type_ in types)


def select(request: Request) -> KernelCall | None:
    """The kernel for a node, or None: the node runs on the reference."""
    node = request.node
    if len(node.inputs) + len(node.outputs) > _MOST_OPERANDS or not has_elements(node):
        return None
    for selector in _of(_SELECTORS, request.target.device, node.op):
        call = selector(request)
        if call is not None:
            return call
    return None


def offers(*ops: str, device: str = "cpu") -> Callable[[Offer], Offer]:
    """Decorator: this function names further kernels that could run nodes of these operators, the likeliest first.

    They compute the same with another tile or algorithm. The tuner (`core.tune`) times them against the one that
    `select` prefers; compiling one takes about 0.1 s, so offer what may win, not what can be written.
    """

    def add(offer: Offer) -> Offer:
        for op in ops:
            _OFFERS.setdefault((device, op), []).append(offer)
        return offer

    return add


def candidates(request: Request) -> tuple[KernelCall, ...]:
    """Kernels for a node without repetition: the one that `select` prefers, then what is offered; none where `select`
    has none."""
    first = select(request)
    if first is None:
        return ()
    distinct = {first.spec.key: first}
    for offer in _of(_OFFERS, request.target.device, request.node.op):
        for call in offer(request):
            distinct.setdefault(call.spec.key, call)
    return tuple(distinct.values())


def families(op: str, device: str = "cpu") -> tuple[str, ...]:
    """The families of kernels that answer for an operator on a device."""
    return tuple(dict.fromkeys(each.__module__.rpartition(".")[2] for each in _of(_SELECTORS, device, op)))


def _of(table: Mapping[tuple[str, str], Sequence[_Asked]], device: str, op: str) -> Sequence[_Asked]:
    """Who is asked about an operator on a device."""
    _declare(device)
    return table.get((device, op), ())


def _declare(device: str) -> None:
    if device in _ELSEWHERE:
        importlib.import_module(_ELSEWHERE[device])


def _symbols_in(value: Any) -> frozenset[str]:
    """The symbols of all dimensions that a spec holds. Bodies of kernels compute single elements, and have none."""
    if isinstance(value, SymDim):
        return value.names
    if isinstance(value, tuple):
        return frozenset().union(*map(_symbols_in, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Graph):
        return frozenset().union(*(_symbols_in(getattr(value, f.name)) for f in dataclasses.fields(value)))
    return frozenset()


def _key(value: Any) -> str:
    match value:
        case Graph():
            weights = Weights()
            text = print_graph(value, weights) + registry.revisions(node.op for node in value.nodes)
            return text + hashlib.sha256(weights.tobytes()).hexdigest()
        case SymDim() | DType() | int() | float() | str() | None:
            return str(value)
        case tuple():
            return "(" + ", ".join(_key(item) for item in value) + ")"
        case np.ndarray():
            return hashlib.sha256(value.tobytes()).hexdigest() + str(value.dtype) + str(value.shape)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "(" + ", ".join(f"{f.name}={_key(getattr(value, f.name))}" for f in dataclasses.fields(value)) + ")"
    raise TypeError(f"a kernel spec cannot hold a {type(value).__name__}")
