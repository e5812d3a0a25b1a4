"""Elementwise nodes, single or fused, on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from lathe.core.ir.graph import Graph
from lathe.core.kernels.call import KernelCall, KernelSpec, Request
from lathe.core.kernels.elementwise import spec as on_cpu
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.cuda_tiling import Tiling, programs, tilings
from lathe.core.kernels.shared.nest import Nest

OPS = on_cpu.OPS


@dataclass(frozen=True)
class ElementwiseSpec(KernelSpec):
    """`body` applied to each point of `nest`, whose operands are the body's inputs and then one output for all.

    Programs divide the points by `tiling`. Narrow floats are computed in float32.
    """

    family: ClassVar[str] = "elementwise"
    generator: ClassVar[str] = "elementwise.cuda"
    body: Graph
    nest: Nest
    tiling: Tiling

    @property
    def summary(self) -> str:
        return f"{on_cpu.ElementwiseSpec(self.body, self.nest).summary[:-1]}, {_tile_text(self.tiling)})"


def _tile_text(tiling: Tiling) -> str:
    return "x".join(map(str, tiling.sizes)) + " a program"


def elementwise(request: Request) -> KernelCall | None:
    """Selector of elementwise operators and FusedElementwise, in bool, integers of 8 to 64 and floats of 16 to 64 bits.

    float16 and bfloat16 are computed in float32. None for other types, if a body has operators that are not
    elementwise, and if generated code cannot compute a dimension.
    """
    found = on_cpu.call_of(request, bodies.is_computable_on_gpu)
    return next(iter(tiled(found)), None) if found is not None else None


def other_tilings(request: Request) -> Iterable[KernelCall]:
    """Offers of the kernel of `elementwise` with every candidate tiling, the selector's own included.

    No offers for nodes that `elementwise` does not cover.
    """
    found = on_cpu.call_of(request, bodies.is_computable_on_gpu)
    return tiled(found) if found is not None else ()


def tiled(call: KernelCall) -> Iterable[KernelCall]:
    """The call of an elementwise CPU kernel, converted for a GPU: one call for each candidate tiling, preferred first.

    The first iteration raises TypeError if the call has another spec.
    """
    if not isinstance(call.spec, on_cpu.ElementwiseSpec):
        raise TypeError(f"spec: expected an elementwise kernel, got {call.spec.key}")
    body, nest = call.spec.body, call.spec.nest
    for tiling in tilings(nest):
        yield replace(call, spec=ElementwiseSpec(body, nest, tiling), grid=(programs(nest, tiling),))
