"""Reductions over any axes, including global pooling, ArgMax and ArgMin."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Node, Value
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute, axis_of, integers
from lathe.core.kernels.shared.nest import Nest, has_plannable_types, row_major, traffic
from lathe.core.kernels.shared.words import NARROW, compute_dtype

FLOATS = frozenset({DType.FLOAT32, DType.FLOAT64})
_NARROW = {"ReduceMean", "ReduceMax", "GlobalAveragePool", "GlobalMaxPool"}  # also for narrow floats
NUMBERS = FLOATS | {DType.INT32, DType.INT64}

# Operator -> element types. Exponentials and logarithms are vectorised in float32 only.
KINDS = {
    "ReduceSum": NUMBERS, "ReduceMean": FLOATS, "ReduceMax": NUMBERS | {DType.INT8, DType.UINT8}, "ReduceProd": NUMBERS,
    "ReduceMin": NUMBERS | {DType.INT8, DType.UINT8}, "ReduceL1": NUMBERS, "ReduceL2": FLOATS,
    "ReduceSumSquare": NUMBERS, "ReduceLogSum": {DType.FLOAT32}, "ReduceLogSumExp": {DType.FLOAT32},
    "GlobalAveragePool": FLOATS, "GlobalMaxPool": FLOATS,
}  # fmt: skip
_SAME_AS = {"GlobalAveragePool": "ReduceMean", "GlobalMaxPool": "ReduceMax"}


@dataclass(frozen=True)
class ReduceSpec(KernelSpec):
    """The reduction `kind` over the loops of `nest` along which the output does not move.

    `kind` is the name of a Reduce operator, also for global pools. The operands of the nest are input and output.
    """

    family: ClassVar[str] = "reduce"
    generator: ClassVar[str] = "reduce.cpu"
    kind: str
    dtype: DType
    nest: Nest
    count: Dim  # elements per result

    @property
    def computed(self) -> DType:
        """The type of elements in registers: float32 for narrow floats, otherwise `dtype`."""
        return compute_dtype(self.dtype)

    @property
    def reduced_loops(self) -> tuple[int, ...]:
        """The indices of the nest's loops that are reduced."""
        return tuple(k for k, stride in enumerate(self.nest.strides[1]) if stride == 0)

    @property
    def kept_loops(self) -> tuple[int, ...]:
        """The indices of the nest's loops along which the output moves, which are not reduced."""
        return tuple(k for k, stride in enumerate(self.nest.strides[1]) if stride != 0)

    @property
    def horizontal(self) -> bool:
        """Whether adjacent elements contribute to one result; otherwise they contribute to adjacent results."""
        return self.nest.strides[1][-1] == 0

    @property
    def summary(self) -> str:
        return f"reduce({self.kind}, {'along' if self.horizontal else 'across'} rows)"


@dataclass(frozen=True)
class ArgReduceSpec(KernelSpec):
    """The index (int64) of the maximum or minimum along the middle axis of [outer, length, inner]."""

    family: ClassVar[str] = "argreduce"
    generator: ClassVar[str] = "reduce.arg_cpu"
    dtype: DType
    outer: Dim
    length: Dim
    inner: Dim
    least: bool
    last: bool  # of equals, the last one

    @property
    def summary(self) -> str:
        return f"arg{'min' if self.least else 'max'}({self.length})"


def reduce(request: Request) -> KernelCall | None:
    """Selector of Reduce operators over known axes, GlobalAveragePool and GlobalMaxPool, for the types in `KINDS`.

    These are float32 and float64 for all but the logarithms (float32); int32 and int64 for sums, products, maxima,
    minima, ReduceL1 and ReduceSumSquare; int8 and uint8 for maxima and minima. ReduceMean, ReduceMax and the pools also
    take float16 and bfloat16. None for other nodes, if the axes are an input, and if generated code cannot compute a
    dimension.
    """
    return call_of(request, _is_covered)


def _is_covered(op: str, dtype: DType) -> bool:
    return dtype in KINDS[op] or (dtype in NARROW and op in _NARROW)


def call_of(request: Request, is_covered: Callable[[str, DType], bool]) -> KernelCall | None:
    """The call of a reduction or global pool with a CPU spec, from which the selectors of all devices start.

    None if an input or output is no tensor with dimensions that generated code can compute, if the axes are an input,
    or if `is_covered(operator, element type)` is false.
    """
    node = request.node
    source = node.required_input(0)
    if not has_plannable_types(node) or not is_covered(node.op, source.dtype):
        return None
    axes = _spatial(node) if node.op in _SAME_AS else _reduced_axes(node)
    if axes is None:
        return None
    spec = ReduceSpec(
        _SAME_AS.get(node.op, node.op), source.dtype, _nest(source, axes), product(source.shape[axis] for axis in axes)
    )
    return KernelCall(spec, (In(0), Out()), flops=source.tensor.size, bytes=traffic(node))


def arg_reduce(request: Request) -> KernelCall | None:
    """Selector of ArgMax and ArgMin of float32, float64, int32 and int64.

    None for other types and for scalars, and if generated code cannot compute a dimension.
    """
    return arg_call_of(request, NUMBERS)


def arg_call_of(request: Request, dtypes: Collection[DType]) -> KernelCall | None:
    """The call of an ArgMax or ArgMin with a CPU spec, from which the selectors of all devices start.

    None if an input or output is no tensor with dimensions that generated code can compute, if the input is a scalar,
    or if its type is not in `dtypes`.
    """
    node = request.node
    source = node.required_input(0)
    if not has_plannable_types(node) or source.dtype not in dtypes or not source.shape:
        return None
    axis = axis_of(attribute(node, "axis"), len(source.shape))
    before, after = product(source.shape[:axis]), product(source.shape[axis + 1 :])
    last = bool(attribute(node, "select_last_index"))
    spec = ArgReduceSpec(source.dtype, before, source.shape[axis], after, node.op == "ArgMin", last)
    return KernelCall(spec, (In(0), Out()), flops=source.tensor.size, bytes=traffic(node))


def _reduced_axes(node: Node) -> set[int] | None:
    """The axes of a Reduce node; None if they are an input."""
    rank = len(node.required_input(0).shape)
    axes = integers(node, "axes")
    if len(node.inputs) > 1:
        return None
    if axes:
        return {axis_of(axis, rank) for axis in axes}
    return set() if attribute(node, "noop_with_empty_axes") else set(range(rank))


def _spatial(node: Node) -> set[int]:
    rank = len(node.required_input(0).shape)
    return set(range(1, rank - 1)) if attribute(node, "layout") == "NHWC" else set(range(2, rank))


def _nest(source: Value, axes: Collection[int]) -> Nest:
    kept = row_major([extent for axis, extent in enumerate(source.shape) if axis not in axes])
    remaining = iter(kept)
    out = tuple(0 if axis in axes else next(remaining) for axis in range(len(source.shape)))
    return Nest(source.shape, (row_major(source.shape), out)).collapsed()
