"""Reductions over any axes, global pooling among them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

from core.ir.dim import product
from core.ir.graph import Node, Value
from core.ir.types import Dim, DType
from core.kernels.catalog.attributes import attribute, axis_of, integers
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Request, covers
from core.kernels.catalog.nest import Nest, has_plannable_types, row_major, traffic
from core.kernels.catalog.words import NARROW, computed_dtype

FLOATS = frozenset({DType.FLOAT32, DType.FLOAT64})
_NARROW = {"ReduceMean", "ReduceMax", "GlobalAveragePool", "GlobalMaxPool"}  # of narrow floats, too
NUMBERS = FLOATS | {DType.INT32, DType.INT64}

# Operator -> (what is reduced, element types). Exponentials exist in float32 only.
KINDS = {
    "ReduceSum": NUMBERS, "ReduceMean": FLOATS, "ReduceMax": NUMBERS | {DType.INT8, DType.UINT8}, "ReduceProd": NUMBERS,
    "ReduceMin": NUMBERS | {DType.INT8, DType.UINT8}, "ReduceL1": NUMBERS, "ReduceL2": FLOATS,
    "ReduceSumSquare": NUMBERS, "ReduceLogSum": {DType.FLOAT32}, "ReduceLogSumExp": {DType.FLOAT32},
    "GlobalAveragePool": FLOATS, "GlobalMaxPool": FLOATS,
}  # fmt: skip
_SAME_AS = {"GlobalAveragePool": "ReduceMean", "GlobalMaxPool": "ReduceMax"}


@dataclass(frozen=True)
class ReduceSpec(KernelSpec):
    """`kind` (the operator's name) over the loops of `nest` in which the output, its second operand, stands still."""

    family: ClassVar[str] = "reduce"
    kind: str
    dtype: DType
    nest: Nest
    count: Dim  # elements that make one result

    @property
    def computed(self) -> DType:
        """The type in registers."""
        return computed_dtype(self.dtype)

    @property
    def reduced(self) -> tuple[int, ...]:
        """The loops that are summed away."""
        return tuple(k for k, stride in enumerate(self.nest.strides[1]) if stride == 0)

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(k for k, stride in enumerate(self.nest.strides[1]) if stride != 0)

    @property
    def horizontal(self) -> bool:
        """Whether neighbours in memory go into one result; otherwise they go into neighbouring results."""
        return self.nest.strides[1][-1] == 0

    @property
    def summary(self) -> str:
        return f"reduce({self.kind}, {'along' if self.horizontal else 'across'} rows)"


@dataclass(frozen=True)
class ArgReduceSpec(KernelSpec):
    """Index (int64) of the greatest or least along the middle axis of [outer, length, inner]."""

    family: ClassVar[str] = "argreduce"
    dtype: DType
    outer: Dim
    length: Dim
    inner: Dim
    least: bool
    last: bool  # of equals, the last one

    @property
    def summary(self) -> str:
        return f"arg{'min' if self.least else 'max'}({self.length})"


@covers(*KINDS)
def reduce(request: Request) -> KernelCall | None:
    return call_of(request, _is_covered)


def _is_covered(op: str, dtype: DType) -> bool:
    return dtype in KINDS[op] or (dtype in NARROW and op in _NARROW)


def call_of(request: Request, is_covered: Callable[[str, DType], bool]) -> KernelCall | None:
    """What is the same on every device; None for unplannable shapes, unknown axes and element types that are not
    covered."""
    node = request.node
    source = _input(node)
    if not has_plannable_types(node) or not is_covered(node.op, source.dtype):
        return None
    axes = _spatial(node) if node.op in _SAME_AS else _reduced_axes(node)
    if axes is None:
        return None
    spec = ReduceSpec(
        _SAME_AS.get(node.op, node.op), source.dtype, _nest(source, axes), product(source.shape[axis] for axis in axes)
    )
    return KernelCall(spec, (In(0), Out()), flops=source.tensor.size, bytes=traffic(node))


@covers("ArgMax", "ArgMin")
def arg_reduce(request: Request) -> KernelCall | None:
    return arg_call_of(request, NUMBERS)


def arg_call_of(request: Request, dtypes: Collection[DType]) -> KernelCall | None:
    """What is the same on every device; None for unplannable shapes and other element types."""
    node = request.node
    source = _input(node)
    if not has_plannable_types(node) or source.dtype not in dtypes or not source.shape:
        return None
    axis = axis_of(attribute(node, "axis"), len(source.shape))
    before, after = product(source.shape[:axis]), product(source.shape[axis + 1 :])
    last = bool(attribute(node, "select_last_index"))
    spec = ArgReduceSpec(source.dtype, before, source.shape[axis], after, node.op == "ArgMin", last)
    return KernelCall(spec, (In(0), Out()), flops=source.tensor.size, bytes=traffic(node))


def _reduced_axes(node: Node) -> set[int] | None:
    """The axes of a Reduce node; None when they are not known yet."""
    rank = len(_input(node).shape)
    axes = integers(node, "axes")
    if len(node.inputs) > 1:
        return None
    if axes:
        return {axis_of(axis, rank) for axis in axes}
    return set() if attribute(node, "noop_with_empty_axes") else set(range(rank))


def _spatial(node: Node) -> set[int]:
    rank = len(_input(node).shape)
    return set(range(1, rank - 1)) if attribute(node, "layout") == "NHWC" else set(range(2, rank))


def _nest(source: Value, axes: Collection[int]) -> Nest:
    kept = row_major([extent for axis, extent in enumerate(source.shape) if axis not in axes])
    remaining = iter(kept)
    out = tuple(0 if axis in axes else next(remaining) for axis in range(len(source.shape)))
    return Nest(source.shape, (row_major(source.shape), out)).collapsed()


def _input(node: Node) -> Value:
    value = node.inputs[0]
    if value is None:
        raise ValueError(f"node '{node.name}' ({node.op}) has no first input")
    return value
