"""Kernels of a simulated device: the calls of CUDA kernels, computed by the NumPy references.

If a CUDA kernel covers a node, a reference kernel covers it too, with the same values as operands. So plans have the
same steps, lifetimes, in-place results and values inside others. One thing differs: constants are not packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import Dim
from lathe.core.kernels.call import Flag, In, KernelCall, KernelSpec, Operand, Out, Request, Row, Scratch, by_batch
from lathe.core.kernels.choose import candidates, select
from lathe.core.kernels.gemm.cublaslt_spec import LibrarySpec
from lathe.core.ops.opdef import registry


@dataclass(frozen=True)
class ReferenceSpec(KernelSpec):
    """The single node of `graph`, computed by its reference.

    The operands are the graph's inputs, then its outputs; `strides` are their strides in elements.
    """

    family: ClassVar[str] = "reference"
    graph: Graph
    strides: tuple[tuple[Dim, ...], ...]
    scratch: int  # number of unused scratch operands after the outputs
    flagged: bool  # whether the last operand is a status flag, which is set if the reference rejects its data
    kernel: str  # the summary of the CUDA kernel for this node

    @property
    def summary(self) -> str:
        return f"{self.kernel}, simulated"


def reference(request: Request) -> KernelCall | None:
    """Selector of the nodes for which there is a CUDA kernel."""
    call = select(on_cuda(request))
    return simulated_call(call, request) if call is not None else None


def other_kernels(request: Request) -> Iterator[KernelCall]:
    """One offer for each CUDA candidate; they differ only in the time that tests assign to them.

    Calls of a library are passed on unchanged, for tests that have a library.
    """
    for call in candidates(on_cuda(request)):
        yield call if isinstance(call.spec, LibrarySpec) else simulated_call(call, request)


def on_cuda(request: Request) -> Request:
    """The request with its simulated GPU replaced by the CUDA device of the same figures."""
    return replace(request, target=replace(request.gpu, device="cuda"))


def simulated_call(call: KernelCall, request: Request) -> KernelCall:
    """The call of a reference kernel that replaces the CUDA kernel's `call` for the request's node.

    Scratch, status flag, in-place inputs, cost, grid and ranges of batch sizes are those of `call`; constants are not
    packed.
    """
    return by_batch([(first, _simulated_kernel(kernel, request)) for first, kernel in call.kernels])


def _simulated_kernel(call: KernelCall, request: Request) -> KernelCall:
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
        spec=ReferenceSpec(single_node_graph(node), strides, len(memory), bool(flag), call.spec.summary),
        operands=operands,
        parts=(),
    )


def single_node_graph(node: Node) -> Graph:
    """A graph of this node alone.

    Values are named by position: equal nodes give graphs of equal text, so equal keys.
    """
    inputs = [Value(f"x{i}", v.type) if v is not None else None for i, v in enumerate(node.inputs)]
    twin = Node(node.op, list(inputs), [], dict(node.attrs))
    twin.outputs = [Value(f"y{i}", v.type, twin) for i, v in enumerate(node.outputs)]
    return Graph("step", [value for value in inputs if value is not None], list(twin.outputs), [twin])


TABLE = dict.fromkeys((*registry.names(), "FusedElementwise"), Row((reference,), (other_kernels,)))  # by operator
