"""Softmax, GuardedSoftmax and LogSoftmax along any axis."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute, axis_of
from lathe.core.kernels.shared.nest import has_plannable_types, traffic

_FLOPS_PER_ELEMENT = 12  # maximum, subtraction, exponential, sum and scaling


@dataclass(frozen=True)
class SoftmaxSpec(KernelSpec):
    """The softmax over the middle axis of [outer, length, inner].

    Its logarithm if `log`; with zeros in place of NaN if `guarded`.
    """

    family: ClassVar[str] = "softmax"
    generator: ClassVar[str] = "softmax.cpu"
    outer: Dim
    length: Dim
    inner: Dim
    log: bool = False
    guarded: bool = False
    dtype: DType = DType.FLOAT32

    @property
    def summary(self) -> str:
        kind = "" if self.dtype is DType.FLOAT32 else f"{self.dtype} "
        return f"softmax({kind}{'rows' if self.inner == 1 else 'columns'} of {self.length})"


def softmax(request: Request) -> KernelCall | None:
    """Selector of Softmax, GuardedSoftmax and LogSoftmax of float32 and float64, along any axis.

    None for other types, and if generated code cannot compute a dimension.
    """
    return call_of(request, {DType.FLOAT32, DType.FLOAT64})


def call_of(request: Request, dtypes: Collection[DType]) -> KernelCall | None:
    """The call of a softmax with a CPU spec, from which the selectors of all devices start.

    None if an input or output is no tensor with dimensions that generated code can compute, or if the output's type is
    not in `dtypes`.
    """
    node = request.node
    if not has_plannable_types(node) or node.output.dtype not in dtypes:
        return None
    shape = node.output.shape
    axis = axis_of(attribute(node, "axis"), len(shape))
    length = shape[axis] if shape else 1
    extents = product(shape[:axis]), length, product(shape[axis + 1 :])
    dtype = node.output.dtype
    spec = SoftmaxSpec(*extents, node.op == "LogSoftmax", node.op == "GuardedSoftmax", dtype)
    flops = node.output.tensor.size * _FLOPS_PER_ELEMENT
    return KernelCall(spec, (In(0), Out()), inplace=(0,), flops=flops, bytes=traffic(node))
