"""Operators from outside this package: those whose definition writes a kernel, and those that are elementwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from core.ir.types import TensorType
from core.kernels.catalog.attributes import attribute
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Request, covers, uncover
from core.kernels.catalog.cuda.elementwise import elementwise as elementwise_on_gpu
from core.kernels.catalog.elementwise import elementwise
from core.kernels.catalog.nest import has_plannable_types, traffic
from core.ops import registry


@dataclass(frozen=True)
class CustomSpec(KernelSpec):
    """What `OpDef.write_kernel` is given: the types of the inputs (None: absent) and outputs, and the attributes."""

    family: ClassVar[str] = "custom"
    op: str
    revision: str
    inputs: tuple[TensorType | None, ...]
    outputs: tuple[TensorType, ...]
    attrs: tuple[tuple[str, Any], ...]

    def attr(self, name: str) -> Any:
        """The attribute's value, its default filled in."""
        return dict(self.attrs)[name]

    @property
    def summary(self) -> str:
        return f"custom({self.op})"


def cover(op: registry.OpDef) -> None:
    """Let kernels answer for an operator that was registered just now, and no longer those of an earlier definition."""
    uncover(op.name)
    if op.has_kernel:
        covers(op.name)(_own_kernel)
    if op.is_elementwise:
        covers(op.name)(elementwise)
        covers(op.name, device="cuda")(elementwise_on_gpu)


def _own_kernel(request: Request) -> KernelCall | None:
    """None where a shape cannot be planned, or an element type is none that the kernel is written for."""
    node, op = request.node, registry.get(request.node.op)
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    if not op.has_kernel or not has_plannable_types(node) or any(v.dtype not in op.kernel_dtypes for v in values):
        return None
    inputs = tuple(value.tensor if value is not None else None for value in node.inputs)
    attrs = tuple((name, attribute(node, name)) for name in sorted(op.attrs))
    spec = CustomSpec(op.name, registry.revisions([op.name]), inputs, tuple(v.tensor for v in node.outputs), attrs)
    present = [In(index) for index, value in enumerate(node.inputs) if value is not None]
    return KernelCall(spec, (*present, *(Out(i) for i in range(len(node.outputs)))), bytes=traffic(node))
