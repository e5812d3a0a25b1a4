"""ScatterND and ScatterElements: updates are combined with a copy of a tensor, as an index tensor selects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Node
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute, axis_of
from lathe.core.kernels.shared.nest import has_plannable_types, traffic

_DTYPES = frozenset({DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64})


@dataclass(frozen=True)
class ScatterRowsSpec(KernelSpec):
    """y = x [extents.., inner]; then y[indices[i]] is combined with updates[i] by `reduction`, in order of i.

    `indices` holds one coordinate for each of `extents`; negative coordinates count from the end. A coordinate out of
    range sets `Status.INDEX_OUT_OF_RANGE`, and its update is skipped. A task owns some rows of y and reads all indices,
    so that the order of updates does not depend on the number of threads. If `cleared`, x is all zeros and not an
    operand.
    """

    family: ClassVar[str] = "scatter"
    generator: ClassVar[str] = "indexing.scatter_cpu"
    cuda_generator: ClassVar[str] = "indexing.scatter_cuda"
    dtype: DType
    index: DType
    extents: tuple[Dim, ...]
    count: Dim
    inner: Dim
    reduction: str
    cleared: bool

    @property
    def summary(self) -> str:
        return f"scatter({self.reduction}, rows of {self.inner})"


@dataclass(frozen=True)
class ScatterElementsSpec(KernelSpec):
    """y = x [outer, extent, inner]; then y[o, indices[o, c, i], i] is combined with updates[o, c, i] by `reduction`.

    This happens for c < `count` in order. Negative indices count from the end. An index out of range sets
    `Status.INDEX_OUT_OF_RANGE`, and its update is skipped. If `cleared`, x is all zeros and not an operand.
    """

    family: ClassVar[str] = "scatter_elements"
    generator: ClassVar[str] = "indexing.scatter_elements_cpu"
    cuda_generator: ClassVar[str] = "indexing.scatter_elements_cuda"
    dtype: DType
    index: DType
    outer: Dim
    extent: Dim
    count: Dim
    inner: Dim
    reduction: str
    cleared: bool

    @property
    def summary(self) -> str:
        return f"scatter elements({self.reduction}, {self.count} into {self.extent})"


def scatter_rows(request: Request) -> KernelCall | None:
    """Selector of ScatterND of float32, float64, int32 and int64, by a known number of int32 or int64 coordinates.

    None for other nodes, and if generated code cannot compute a dimension.
    """
    node = request.node
    x, indices, updates = node.inputs
    if x is None or indices is None or updates is None or not _has_types(node):
        return None
    depth = indices.shape[-1]
    if not isinstance(depth, int) or depth < 1:
        return None
    extents, inner = x.shape[:depth], product(x.shape[depth:])
    count = product(indices.shape[:-1])
    spec = ScatterRowsSpec(x.dtype, indices.dtype, extents, count, inner, _reduction(node), _is_zero(request))
    return _call(node, spec, spec.cleared)


def scatter_elements(request: Request) -> KernelCall | None:
    """Selector of ScatterElements of float32, float64, int32 and int64 by int32 or int64 indices.

    None for other nodes, if generated code cannot compute a dimension, and if the indices differ from x in an extent
    along an axis other than the operator's.
    """
    node = request.node
    x, indices, updates = node.inputs
    if x is None or indices is None or updates is None or not _has_types(node):
        return None
    axis = axis_of(attribute(node, "axis"), len(x.shape))
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    if (indices.shape[:axis], indices.shape[axis + 1 :]) != (before, after):
        return None
    spec = ScatterElementsSpec(
        x.dtype,
        indices.dtype,
        product(before),
        x.shape[axis],
        indices.shape[axis],
        product(after),
        _reduction(node),
        _is_zero(request),
    )
    return _call(node, spec, spec.cleared)


def _has_types(node: Node) -> bool:
    x, indices = node.inputs[:2]
    numbers = x is not None and x.dtype in _DTYPES
    whole = indices is not None and indices.dtype in (DType.INT32, DType.INT64)
    return numbers and whole and has_plannable_types(node)


def _reduction(node: Node) -> str:
    return str(attribute(node, "reduction"))


def _is_zero(request: Request) -> bool:
    """Whether the tensor that is updated is a constant of zeros."""
    array = request.constant(0)
    return array is not None and not array.any()


def _call(node: Node, spec: KernelSpec, cleared: bool) -> KernelCall:
    operands = (In(1), In(2), Out()) if cleared else (In(1), In(2), Out(), In(0))
    return KernelCall(spec, operands, inplace=() if cleared else (0,), bytes=traffic(node))
