"""Iota: tensors whose integers are a linear function of their indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import SymDim
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.nest import has_plannable_types, is_plannable, traffic


@dataclass(frozen=True)
class IotaSpec(KernelSpec):
    """The integer at [i, j, ...] is start + steps[0] * i + steps[1] * j + ..."""

    family: ClassVar[str] = "iota"
    generator: ClassVar[str] = "copy.iota_cpu"
    dtype: DType
    extents: tuple[Dim, ...]
    start: Dim
    steps: tuple[Dim, ...]


def iota(request: Request) -> KernelCall | None:
    """Selector of Iota whose start, steps and shape generated code can compute; all types of the operator.

    None for other nodes.
    """
    node, y = request.node, request.node.output
    start, steps = node.attrs.get("start", 0), node.attrs["steps"]
    numbers = (start, *steps) if isinstance(steps, tuple) else ()
    known = [number for number in numbers if isinstance(number, int | SymDim) and is_plannable(number)]
    if len(known) < 1 + len(y.shape) or not has_plannable_types(node):
        return None
    spec = IotaSpec(y.dtype, y.shape, known[0], tuple(known[1:]))
    return KernelCall(spec, (Out(),), flops=y.tensor.size, bytes=traffic(node))
