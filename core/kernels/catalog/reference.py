"""Kernels of a simulated device: the facts of those for CUDA, the arithmetic of the references.

Where a kernel for CUDA covers a node, one of these does, too, with the same operands as far as values go: plans have
the same steps, lifetimes, results in place and values inside others. Only constants stay as they are, unpacked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from core.ir.graph import Graph, Node, Value
from core.ir.types import Dim
from core.kernels.catalog.base import (
    Flag,
    In,
    KernelCall,
    KernelSpec,
    Operand,
    Out,
    Request,
    Scratch,
    candidates,
    covers,
    offers,
    select,
)
from core.kernels.catalog.cuda.library import LibrarySpec
from core.ops import registry

DEVICE = "simulated"  # of `GpuTarget.device`


@dataclass(frozen=True)
class ReferenceSpec(KernelSpec):
    """The one node of `graph` by its reference. Operands are the graph's inputs, then its outputs; `strides` are
    theirs, in elements."""

    family: ClassVar[str] = "reference"
    graph: Graph
    strides: tuple[tuple[Dim, ...], ...]
    scratch: int  # operands behind those, of memory that nobody needs here
    flagged: bool  # whether the last operand is a flag, for data that the reference refuses
    kernel: str  # what CUDA has for this node, for people

    @property
    def summary(self) -> str:
        return f"{self.kernel}, simulated"


@covers(*registry.names(), "FusedElementwise", device=DEVICE)
def reference(request: Request) -> KernelCall | None:
    """None where CUDA has no kernel."""
    call = select(on_cuda(request))
    return simulating(call, request) if call is not None else None


@offers(*registry.names(), "FusedElementwise", device=DEVICE)
def others(request: Request) -> Iterator[KernelCall]:
    """As many as CUDA has: they only differ in the time that a test may say they take. What a library does is left as
    it is, where a test has one."""
    for call in candidates(on_cuda(request)):
        yield call if isinstance(call.spec, LibrarySpec) else simulating(call, request)


def on_cuda(request: Request) -> Request:
    return replace(request, target=replace(request.gpu, device="cuda"))


def simulating(call: KernelCall, request: Request) -> KernelCall:
    """A call with the facts of one for CUDA."""
    node = request.node
    given = [index for index, value in enumerate(node.inputs) if value is not None]
    values = [*(node.inputs[index] for index in given), *node.outputs]
    strides = tuple(request.strides_of(value) for value in values if value is not None)
    memory = [operand for operand in call.operands if isinstance(operand, Scratch)]
    flag = [operand for operand in call.operands if isinstance(operand, Flag)]
    operands: tuple[Operand, ...] = (
        *(In(index) for index in given),
        *(Out(index) for index in range(len(node.outputs))),
        *memory,
        *flag,
    )
    return replace(
        call,
        spec=ReferenceSpec(alone(node), strides, len(memory), bool(flag), call.spec.summary),
        operands=operands,
        parts=(),
    )


def alone(node: Node) -> Graph:
    """A graph of this node only. Its values are named by their places, so that equal nodes give equal graphs."""
    inputs = [Value(f"x{i}", v.type) if v is not None else None for i, v in enumerate(node.inputs)]
    twin = Node(node.op, list(inputs), [], dict(node.attrs))
    twin.outputs = [Value(f"y{i}", v.type, twin) for i, v in enumerate(node.outputs)]
    return Graph("step", [value for value in inputs if value is not None], list(twin.outputs), [twin])
