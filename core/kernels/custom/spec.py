"""Kernels for custom operators: by their own `write_kernel`, or by the elementwise kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lathe.core.ir.types import TensorType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request, Row
from lathe.core.kernels.choose import add_row
from lathe.core.kernels.elementwise.cuda_spec import elementwise as elementwise_on_gpu
from lathe.core.kernels.elementwise.spec import elementwise
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import has_plannable_types, traffic
from lathe.core.ops.opdef import registry


@dataclass(frozen=True)
class CustomSpec(KernelSpec):
    """The argument of `OpDef.write_kernel`: the types of the inputs (None: absent) and outputs, and the attributes."""

    family: ClassVar[str] = "custom"
    generator: ClassVar[str] = "custom.cpu"
    op: str
    revision: str
    inputs: tuple[TensorType | None, ...]
    outputs: tuple[TensorType, ...]
    attrs: tuple[tuple[str, Any], ...]

    def attr(self, name: str) -> Any:
        """The value of attribute `name`, or its default. KeyError if the operator has no such attribute."""
        return dict(self.attrs)[name]

    @property
    def summary(self) -> str:
        return f"custom({self.op})"


def register_kernels(op: registry.OpDef) -> None:
    """Add the kernels of a newly registered operator to all devices' tables, in place of an earlier operator's.

    On CPUs these are the operator's own kernel, if it has one, and the elementwise kernel, if it is elementwise; on
    NVIDIA GPUs only the elementwise kernel; on simulated devices none.
    """
    own = (_own_kernel,) if op.has_kernel else ()
    add_row(op.name, Row((*own, elementwise) if op.is_elementwise else own))
    add_row(op.name, Row((elementwise_on_gpu,) if op.is_elementwise else ()), device="cuda")
    add_row(op.name, Row(), device="simulated")


def _own_kernel(request: Request) -> KernelCall | None:
    """Selector of the operator's own kernel.

    None if the operator has none, if generated code cannot compute a shape, or for types outside `kernel_dtypes`.
    """
    node, op = request.node, registry.get(request.node.op)
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    if not op.has_kernel or not has_plannable_types(node) or any(v.dtype not in op.kernel_dtypes for v in values):
        return None
    inputs = tuple(value.tensor if value is not None else None for value in node.inputs)
    attrs = tuple((name, attribute(node, name)) for name in sorted(op.attrs))
    spec = CustomSpec(op.name, registry.revisions([op.name]), inputs, tuple(v.tensor for v in node.outputs), attrs)
    present = [In(index) for index, value in enumerate(node.inputs) if value is not None]
    return KernelCall(spec, (*present, *(Out(i) for i in range(len(node.outputs)))), bytes=traffic(node))
