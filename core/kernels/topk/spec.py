"""TopK: the greatest or least elements along any axis, in order, with their indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Request, Scratch
from lathe.core.kernels.shared.attributes import attribute, axis_of, integers
from lathe.core.kernels.shared.nest import has_plannable_types, is_plannable, traffic

_KEY_BYTES = 8
_RANKED = frozenset(
    {DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.INT32, DType.INT16, DType.UINT16, DType.INT8, DType.UINT8}
)  # types whose order fits int32: a key is the rank as int32, and the index


@dataclass(frozen=True)
class TopKSpec(KernelSpec):
    """The first `count` elements along the middle axis of [outer, length, inner], greatest or `least` first.

    Equal elements are ordered by index; NaN is the greatest. `indices`: whether indices (int64) are an output.
    """

    family: ClassVar[str] = "topk"
    generator: ClassVar[str] = "topk.cpu"
    dtype: DType
    outer: Dim
    length: Dim
    inner: Dim
    count: int
    least: bool
    indices: bool

    @property
    def summary(self) -> str:
        return f"top {self.count} of {self.length}"


def topk(request: Request) -> KernelCall | None:
    """Selector of TopK with a known, positive number of results (`K`), along any axis.

    The types are float32, float16, bfloat16, int32, and integers of 16 and 8 bits. None for other types, if `K` is an
    input or not a number, and if generated code cannot compute a dimension.
    """
    node, count = request.node, integers(request.node, "K")
    x = node.inputs[0]
    if x is None or count is None or not has_plannable_types(node) or any(value for value in node.inputs[1:]):
        return None
    if x.dtype not in _RANKED or not isinstance(count[0], int) or count[0] < 1:
        return None
    at = axis_of(attribute(node, "axis"), len(x.shape))
    outer, length, inner = product(x.shape[:at]), x.shape[at], product(x.shape[at + 1 :])
    if not all(map(is_plannable, (outer, length, inner))):
        return None
    indices = len(node.outputs) > 1
    spec = TopKSpec(x.dtype, outer, length, inner, count[0], not attribute(node, "largest"), indices)
    results: tuple[Operand, ...] = (Out(0), Out(1)) if indices else (Out(0),)
    operands = (In(0), *results, Scratch(count[0] * _KEY_BYTES))
    return KernelCall(spec, operands, flops=x.tensor.size * 2, bytes=traffic(node))
