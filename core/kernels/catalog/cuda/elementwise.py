"""Elementwise nodes, single or fused, on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from core.ir.graph import Graph
from core.kernels.catalog import body as bodies
from core.kernels.catalog import elementwise as on_cpu
from core.kernels.catalog.base import KernelCall, KernelSpec, Request, covers, offers
from core.kernels.catalog.cuda.tiling import Tiling, programs, tilings
from core.kernels.catalog.nest import Nest

DTYPES = on_cpu.DTYPES | on_cpu.STORED
OPS = on_cpu.OPS


@dataclass(frozen=True)
class ElementwiseSpec(KernelSpec):
    """As `core.kernels.catalog.elementwise.ElementwiseSpec`: narrow floats are computed as float32."""

    family: ClassVar[str] = "elementwise"
    body: Graph
    nest: Nest
    tiling: Tiling

    @property
    def summary(self) -> str:
        return f"{on_cpu.ElementwiseSpec(self.body, self.nest).summary[:-1]}, {_tile_text(self.tiling)})"


def _tile_text(tiling: Tiling) -> str:
    return "x".join(map(str, tiling.sizes)) + " a program"


def is_computable(body: Graph) -> bool:
    """Whether a body can be part of a GPU's kernel."""
    return bodies.dtypes(body) <= DTYPES and bodies.is_scalar(body)


@covers(*OPS, device="cuda")
def elementwise(request: Request) -> KernelCall | None:
    """None for element types or bodies outside the scalar algebra, and for unplannable shapes."""
    found = on_cpu.call_of(request, is_computable)
    return next(iter(tiled(found)), None) if found is not None else None


@offers(*OPS, device="cuda")
def other_tilings(request: Request) -> Iterable[KernelCall]:
    found = on_cpu.call_of(request, is_computable)
    return tiled(found) if found is not None else ()


def tiled(call: KernelCall) -> Iterable[KernelCall]:
    """An elementwise kernel for CPUs as one for GPUs, with every tiling that may win."""
    if not isinstance(call.spec, on_cpu.ElementwiseSpec):
        raise TypeError(f"{call.spec.key} is no elementwise kernel")
    body, nest = call.spec.body, call.spec.nest
    for tiling in tilings(nest):
        yield replace(call, spec=ElementwiseSpec(body, nest, tiling), grid=(programs(nest, tiling),))
