"""The interface between planner and kernels: `KernelSpec`, `KernelCall`, and the selectors that make them.

A selector turns one node into a `KernelCall`: the generator and its parameters (`KernelSpec`), the operands, the
scratch memory, and the cost. The planner needs no more, and no code is generated for it. The dimensions that kernels
compute have no symbols but `n` or, in dynamic-shape code, those of sizes (`lathe.core.ir.dims`). A selector returns
None if its kernel does not cover the node, always if a type has other dimensions (`nest.has_plannable_types`).
`lathe.core.kernels.kernel_table` lists the selectors of each operator, in the order in which they are asked.

For a CPU every kernel is one native function `void kernel(i8** operands, i64 n, i64 tid, i64 threads, i64* counter)`.
`operands` are the addresses in the order of `KernelCall.operands`. In dynamic-shape code, `n` is the address of the
table of sizes. All threads of a run call the function with their own `tid`, and share the zeroed `counter`, which hands
out tasks. The function returns when its thread finds no more work; other threads may still be busy.

`counter` points to a cache line of eight int64 words. Word 0 hands out tasks. Word 1 is the step's status: a kernel
sets it to a `Status` when it meets invalid data, and the run raises after the step. A kernel never reads or writes out
of bounds.

For a GPU a kernel is a Triton function of the operands' addresses, each a multiple of
`lathe.core.kernels.target.GPU_ALIGNMENT` bytes, followed by n as int32. `KernelCall.grid` counts its programs; every
operand has fewer than 2**31 elements.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import numpy as np

from lathe.core.ir.dim import SymDim
from lathe.core.ir.dims import size_index
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.text import Weights, print_graph
from lathe.core.ir.types import Dim, DType, TensorType
from lathe.core.kernels.shared.nest import broadcast_strides, row_major
from lathe.core.kernels.target import GpuTarget, Target
from lathe.core.ops.opdef import registry

_RANGE, _NEXT_RANGE = ": ", "; "  # in the finding of a call with a kernel for each range of batch sizes


class Status(IntEnum):
    """The status word of a step: OK, or the reason why its kernel rejected the data."""

    OK = 0
    INDEX_OUT_OF_RANGE = 1
    INTERRUPTED = 2  # set by `Session.interrupt`, not by a kernel
    AXIS_OUT_OF_RANGE = 3


@dataclass(frozen=True)
class KernelSpec:
    """Parameters of a code generator: one subclass per family of kernels.

    Fields hold only plain data, dimensions, types and bodies. Specs of equal `key` produce the same code, so equal
    nodes share their code, and the object cache can find it.
    """

    family: ClassVar[str] = ""  # the algorithm's name in symbols, `explain()` and the tuner's findings
    generator: ClassVar[str] = ""  # module below `lathe.core.kernels` whose `generate(spec, target)` writes the kernel
    cuda_generator: ClassVar[str] = ""  # the same for GPUs, where one spec serves both kinds of device
    represents_family: ClassVar[bool] = False  # whether one loss implies that the whole family loses on this machine

    @cached_property
    def key(self) -> str:
        """Text of the family and all fields, the same in every process: equal specs have equal keys.

        TypeError if a field holds anything but numbers, text, None, dimensions, dtypes, graphs, arrays, and tuples and
        dataclasses of these.
        """
        fields = ", ".join(f"{f.name}={_key(getattr(self, f.name))}" for f in dataclasses.fields(self))
        return f"{self.family}({fields})"

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.key.encode()).hexdigest()[:24]

    @cached_property
    def size_names(self) -> tuple[str, ...]:
        """The symbols of sizes (`size0`, `filled1`, see `lathe.core.ir.dims`) in the spec's dimensions, sorted as text.

        Dynamic-shape code reads these sizes from the table. Empty for other code.
        """
        return tuple(sorted(name for name in _symbols_in(self) if size_index(name) is not None))

    @property
    def facts(self) -> dict[str, Any]:
        """The fields by name, for building a spec of another class from this one."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def symbol(self) -> str:
        """The name of the native function."""
        return f"lathe_{self.family}_{self.digest}"

    @property
    def summary(self) -> str:
        """A short text for `explain()`: algorithm and tile."""
        return self.family

    @property
    def finding(self) -> str:
        """The tuner's record of this kernel: its symbol.

        Classes to whose specs tuning adds something override it: the symbol of the selector's spec, a blank, and what
        tuning added.
        """
        return self.symbol

    def general(self, target: Target, place: int) -> tuple[KernelSpec, tuple[int, ...]] | None:
        """The spec of code that reads some numbers of this spec at run time, and those numbers.

        Specs that differ in nothing but these numbers give the same general spec, so their kernels are compiled once.
        None if the numbers must be compiled in. `place` is the index of the operand that holds the numbers. See
        `lathe.core.kernels.shared.runtime_numbers`.
        """
        return None

    def settled(self, call: KernelCall, n: int, way: str) -> KernelCall:
        """`call`, whose spec is this one, with `way` added: the algorithm that tuning found fastest for batches of `n`.

        `way` is text in a form that the class of the spec defines. Specs without a choice of algorithm return `call`
        unchanged.
        """
        return call

    def recalled(self, call: KernelCall, added: str) -> KernelCall:
        """`call`, whose spec is this one, with `added` applied: the part of a recorded `finding` after its blank.

        Specs to which tuning adds nothing return `call` unchanged.
        """
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
    """The address of a constant input in the kernel's own layout, which `pack` makes once at compile time.

    `key` names the layout: an input that several kernels pack in the same layout is stored once. `nbytes` is the size
    of the packed array where it is known without packing. Then the compiler packs large weights while it writes them,
    so that they are never all in memory.
    """

    index: int
    key: str
    pack: Callable[[Array], Array] = field(compare=False)
    nbytes: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Scratch:
    """The address of scratch memory, a multiple of 64: thread t owns the bytes [t*nbytes, (t+1)*nbytes).

    With `shared=True` all threads, or all programs of a GPU kernel, share one block of `nbytes`.
    """

    nbytes: Dim
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Outer:
    """The address of captured value `index` of the node's bodies (see `lathe.core.ir.graph.node_reads`)."""

    index: int


@dataclass(frozen=True, slots=True)
class Block:
    """The address of constant data that belongs to one node, such as the weights of its body.

    `key` names the data among the blocks of the node.
    """

    key: str
    data: Array = field(compare=False)


@dataclass(frozen=True, slots=True)
class Flag:
    """The address of the status word of a step on a GPU: an int32 that is 0 when a run begins.

    A kernel that meets invalid data stores a `Status` there, and the run raises.
    """


Operand: TypeAlias = In | Out | Packed | Scratch | Outer | Block | Flag


@dataclass(frozen=True, slots=True)
class BatchRange:
    """The kernel of a call for batches of `first` and more, up to the next range.

    `operands` are positions among those of the call, in the order in which the kernel takes them.
    """

    first: int
    spec: KernelSpec
    grid: tuple[Dim, ...]
    operands: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel launch (step) of a plan before its operands have addresses.

    On a GPU a call may have several kernels, each for a range of batch sizes (`ranges`): the best tile depends on the
    number of rows. `spec` and `grid` are then those of the first range, which begins at 0.
    """

    spec: KernelSpec
    operands: tuple[Operand, ...]
    inplace: tuple[int, ...] = ()  # inputs whose memory output 0 may reuse, unless another operand lies there as well
    strided: tuple[In | Out, ...] = ()  # operands that may lie inside other tensors: the spec has their strides
    pointwise: bool = False  # reads each element of `inplace` before it writes there: any output may reuse that memory
    flops: Dim = 0
    bytes: Dim = 0  # minimum memory traffic: inputs read once, outputs written once
    parts: tuple[KernelSpec, ...] = ()  # further kernels that this kernel calls
    grid: tuple[Dim, ...] = ()  # on a GPU: programs along up to three axes, at most 65535 along the last two
    shared: KernelSpec | None = None  # general spec, if the code reads the numbers of `spec` from the last operand
    ranges: tuple[BatchRange, ...] = ()  # ascending; empty: one kernel for all batch sizes

    @property
    def code(self) -> KernelSpec:
        """The spec whose generated code runs: the general spec `shared` if there is one, otherwise `spec`."""
        return self.shared or self.spec

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        """The specs of all code that the call needs."""
        return (self.code, *self.parts, *(each.spec for each in self.ranges))

    @property
    def key(self) -> str:
        """Text that identifies the kernels of the call: equal calls of one node have equal keys."""
        return self.spec.key if not self.ranges else "; ".join(f"{r.first}: {r.spec.key}" for r in self.ranges)

    @property
    def finding(self) -> str:
        """The tuner's record of the call: that of its spec, or those of all ranges, such as `0: A; 17: B`."""
        found = [f"{each.first}{_RANGE}{each.spec.finding}" for each in self.ranges]
        return _NEXT_RANGE.join(found) if found else self.spec.finding

    @property
    def kernels(self) -> tuple[tuple[int, KernelCall], ...]:
        """The calls of the single kernels, each with the first batch size of its range; `by_batch` joins them again."""
        return tuple((each.first, self.at(each.first)) for each in self.ranges) if self.ranges else ((0, self),)

    def at(self, n: int) -> KernelCall:
        """The call of the kernel that runs batches of `n`, with its operands only."""
        if not self.ranges:
            return self
        chosen = range_at(self.ranges, n)
        operands = tuple(self.operands[place] for place in chosen.operands)
        return replace(self, spec=chosen.spec, operands=operands, grid=chosen.grid, ranges=())


def by_batch(calls: Sequence[tuple[int, KernelCall]]) -> KernelCall:
    """One call of the kernels of several, each for batches from the given size on; the first size is 0.

    The calls have one kernel each, and are of the same node. They need the same memory apart from operands of their
    own, such as scratch memory. ValueError if they do not.
    """
    distinct = [each for at, each in enumerate(calls) if at == 0 or each[1].key != calls[at - 1][1].key]
    base = distinct[0][1]
    if len(distinct) == 1:
        return base
    operands: dict[tuple[Operand, int], int] = {}
    ranges = []
    for first, call in distinct:
        if (call.inplace, call.strided, call.pointwise) != (base.inplace, base.strided, base.pointwise):
            raise ValueError(f"{call.spec.summary} needs other memory than {base.spec.summary}")
        places = tuple(operands.setdefault(key, len(operands)) for key in _numbered(call.operands))
        ranges.append(BatchRange(first, call.spec, call.grid, places))
    return replace(base, operands=tuple(operand for operand, _ in operands), ranges=tuple(ranges))


def recalled_call(finding: str, kernels: Mapping[str, KernelCall]) -> KernelCall | None:
    """The call that `KernelCall.finding` recorded, made of `kernels`, the calls of single kernels by symbol.

    None if a kernel is not among them, or the text is no finding.
    """
    if _RANGE not in finding:
        symbol, _, added = finding.partition(" ")
        call = kernels.get(symbol)
        return call.spec.recalled(call, added) if call is not None and added else call
    calls: list[tuple[int, KernelCall]] = []
    for part in finding.split(_NEXT_RANGE):
        first, _, rest = part.partition(_RANGE)
        call = recalled_call(rest, kernels)
        if call is None or not first.isdecimal():
            return None
        calls.append((int(first), call))
    return by_batch(calls)


class _Range(Protocol):
    @property
    def first(self) -> int: ...


_R = TypeVar("_R", bound=_Range)


def range_at(ranges: Sequence[_R], n: int) -> _R:
    """The range of a batch of `n`: the last one that begins at `n` or before. `ranges` ascend from 0."""
    return next(each for each in reversed(ranges) if each.first <= n)


def first_batches(sizes: Sequence[int]) -> tuple[int, ...]:
    """For ascending batch sizes, the first size of each one's range. Ranges meet at the geometric mean."""
    return (0, *(math.isqrt(small * large) + 1 for small, large in pairwise(sizes)))


def _numbered(operands: Sequence[Operand]) -> Iterator[tuple[Operand, int]]:
    """Each operand with the number of equal ones before it: two equal blocks of scratch memory are two operands."""
    for at, operand in enumerate(operands):
        yield operand, operands[:at].count(operand)


def is_exact(node: Node) -> bool:
    """Whether a product or convolution must be computed by its definition, without Winograd or Strassen.

    `lathe.core.passes.lowering.exact_products` marks products whose result is divided by its own norm.
    """
    return bool(node.attrs.get("exact"))


@dataclass(frozen=True, slots=True)
class Request:
    """The input of a selector: the node, its constants, the target and what the plan requires."""

    node: Node
    constants: Mapping[Value, Array]
    target: Target | GpuTarget
    threads: int = 1
    rank: int = 0  # which tile to use, where several are possible: 0 is expected to be fastest, 1 the next, ...
    winograd: bool = True  # whether algorithms other than the definition (Winograd, Strassen) may be used
    sparse: bool = True  # whether a kernel may leave out zeros of a constant weight
    strides: Mapping[Value, tuple[Dim, ...]] = field(default_factory=dict)  # in elements, of values inside others
    inputs_in_place: frozenset[Value] = frozenset()  # inputs that already lie at their place inside the output
    select: Callable[[Request], KernelCall | None] | None = field(default=None, compare=False, repr=False)
    # asks the selectors in order; set by `lathe.core.kernels.choose`

    def select_with(self, **changes: Any) -> KernelCall | None:
        """The kernel that would run the node if these fields of the request had the given values.

        For selectors that start from the kernel of another selector. None if no kernel would run it. ValueError if the
        request has no `select`.
        """
        if self.select is None:
            raise ValueError("the request has no `select`: pass it to lathe.core.kernels.choose.select")
        return self.select(replace(self, **changes))

    @property
    def cpu(self) -> Target:
        """The target as a CPU. TypeError if it is another device."""
        if not isinstance(self.target, Target):
            raise TypeError(f"target: expected a CPU, got {self.target.device}")
        return self.target

    @property
    def gpu(self) -> GpuTarget:
        """The target as a GPU. TypeError if it is another device."""
        if not isinstance(self.target, GpuTarget):
            raise TypeError(f"target: expected a GPU, got {self.target.device}")
        return self.target

    def constant(self, index: int) -> Array | None:
        """The array of input `index` if it is constant, otherwise None."""
        value = self.node.input(index)
        return self.constants.get(value) if value is not None else None

    def strides_of(self, value: Value) -> tuple[Dim, ...]:
        """Strides of a value in elements: those of its place inside another value, or row-major."""
        return self.strides[value] if value in self.strides else row_major(value.shape)

    def walk(self, value: Value, to: Sequence[Dim]) -> tuple[Dim, ...]:
        """Strides of a value, in elements, when it is broadcast to the shape `to`.

        They are 0 along axes that the value lacks and along its axes of extent 1.
        """
        return broadcast_strides(value.shape, to, self.strides_of(value))

    def pitch(self, value: Value) -> Dim | None:
        """The distance in elements between rows along the last axis of a value of rank 1 or more; 1 for a single row.

        None if the distance is not the same for all rows, or the elements of a row are not contiguous.
        """
        *outer, last = self.strides_of(value)
        step = next((s for s, n in zip(reversed(outer), reversed(value.shape[:-1]), strict=True) if n != 1), 1)
        dense = row_major(value.shape[:-1])
        even = all(n == 1 or s == d * step for s, d, n in zip(outer, dense, value.shape[:-1], strict=True))
        return step if even and (last == 1 or value.shape[-1] == 1) else None


Selector: TypeAlias = Callable[[Request], KernelCall | None]  # returns None if its kernel cannot run the node
Offer: TypeAlias = Callable[[Request], Iterable[KernelCall]]


@dataclass(frozen=True, slots=True)
class Row:
    """The selectors and offers of one operator on one device."""

    selectors: tuple[Selector, ...] = ()  # asked in this order: the first call that is not None runs the node
    # further kernels for the tuner, most promising first; each takes about 0.1 s to compile and time
    offers: tuple[Offer, ...] = ()


# Operators whose output has the bytes of the input, in any shape: the planner makes a view without a kernel.
VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})


def has_elements(node: Node) -> bool:
    """Whether no input or output of the node has an extent that is zero for every `n`, which kernels do not support."""
    types = [value.type for value in (*node.inputs, *node.outputs) if value is not None]
    return not any(isinstance(type_, TensorType) and 0 in (type_.shape or ()) for type_ in types)


def _symbols_in(value: Any) -> frozenset[str]:
    """The symbols of all dimensions in a spec. Bodies compute single elements, so they have none."""
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
