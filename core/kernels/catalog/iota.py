"""Integers that only depend on their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from core.ir.dim import SymDim
from core.ir.types import Dim, DType
from core.kernels.catalog.base import KernelCall, KernelSpec, Out, Request, covers
from core.kernels.catalog.nest import has_plannable_types, is_plannable, traffic


@dataclass(frozen=True)
class IotaSpec(KernelSpec):
    """The integer at [i, j, ...] is start + steps[0] * i + steps[1] * j + ..."""

    family: ClassVar[str] = "iota"
    dtype: DType
    extents: tuple[Dim, ...]
    start: Dim
    steps: tuple[Dim, ...]


@covers("Iota")
def iota(request: Request) -> KernelCall | None:
    """None where generated code cannot compute the numbers."""
    node, y = request.node, request.node.output
    start, steps = node.attrs.get("start", 0), node.attrs["steps"]
    numbers = (start, *steps) if isinstance(steps, tuple) else ()
    known = [number for number in numbers if isinstance(number, int | SymDim) and is_plannable(number)]
    if len(known) < 1 + len(y.shape) or not has_plannable_types(node):
        return None
    spec = IotaSpec(y.dtype, y.shape, known[0], tuple(known[1:]))
    return KernelCall(spec, (Out(),), flops=y.tensor.size, bytes=traffic(node))
