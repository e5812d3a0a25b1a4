"""Elementwise nodes, single or fused, over inputs of any broadcast pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from lathe.core.ir.graph import Array, Graph, Value
from lathe.core.kernels.call import VIEWS, In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.nest import Nest, has_plannable_types, traffic
from lathe.core.kernels.shared.runtime_numbers import RuntimeNumbers
from lathe.core.kernels.target import Target
from lathe.core.ops.opdef import registry

_LONG_ROW = 1024  # elements; a task takes several shorter rows
_MOST_NAMED = 4  # operators that `summary` lists by name


@dataclass(frozen=True)
class ElementwiseSpec(KernelSpec):
    """`body` applied to each point of `nest`, whose operands are the body's inputs and then one output for all."""

    family: ClassVar[str] = "elementwise"
    generator: ClassVar[str] = "elementwise.cpu"
    body: Graph
    nest: Nest

    def general(self, target: Target, place: int) -> tuple[KernelSpec, tuple[int, ...]] | None:
        """The spec of code that reads the numbers of the loops at run time, and those numbers.

        None for rows so long that the code splits them into tasks, and for dimensions that code cannot compute.
        `place` is the index of the operand that holds the numbers.
        """
        inner = self.nest.extents[-1]
        if self.nest.rank > 1 and isinstance(inner, int) and inner > _LONG_ROW:
            return None
        numbers = RuntimeNumbers()
        nest = numbers.of_nest(self.nest)
        return (replace(self, nest=nest), tuple(numbers.values)) if nest is not None else None

    @property
    def summary(self) -> str:
        names = [node.op for node in self.body.nodes]
        steps = "+".join(names) if len(names) <= _MOST_NAMED else f"{len(names)} ops"
        return f"elementwise({steps}, {self.nest.rank} loops)"


def _names() -> list[str]:
    names = [name for name in registry.names() if registry.get(name).is_elementwise and name not in VIEWS]
    return sorted({*names, "FusedElementwise"})


OPS = _names()


def elementwise(request: Request) -> KernelCall | None:
    """Selector of elementwise operators and FusedElementwise, in bool, integers of 8 to 64 and floats of 16 to 64 bits.

    Bodies compute in bool, integers, float32 and float64; float16 and bfloat16 may only be converted. None for other
    nodes, and if generated code cannot compute a dimension.
    """
    return call_of(request, _is_covered)


def call_of(request: Request, can_compute: Callable[[Graph], bool]) -> KernelCall | None:
    """The call of an elementwise node with a CPU spec, from which the selectors of all devices start.

    None if an input or output is no tensor with dimensions that generated code can compute, or if `can_compute` is
    false for the node's body.
    """
    node = request.node
    source = node.attrs["body"] if node.op == "FusedElementwise" else bodies.single_body(node)
    if not isinstance(source, Graph) or not has_plannable_types(node) or not can_compute(source):
        return None
    given = [(index, value) for index, value in enumerate(node.inputs) if value is not None]
    known = _scalar_constants(given, request.constants)
    body = bodies.canonical(source, known)
    operands = [(index, value) for position, (index, value) in enumerate(given) if position not in known]
    nest = _nest(request, [value for _, value in operands])
    inputs, outputs = [In(index) for index, _ in operands], [Out(i) for i in range(len(node.outputs))]
    return KernelCall(
        ElementwiseSpec(body, nest),
        (*inputs, *outputs),
        strided=(*inputs, *(outputs if len(outputs) == 1 else [])) if _are_contiguous(nest) else (),
        inplace=tuple(index for index, value in operands if _can_take_over(value, node.output)),
        pointwise=True,
        flops=node.output.tensor.size * len(body.nodes),
        bytes=traffic(node),
    )


def _are_contiguous(nest: Nest) -> bool:
    """Whether each operand has stride 1 along the last loop, or stride 0: one value for the whole loop."""
    return all(stride in (0, 1) for stride in nest.loop(nest.rank - 1))


def _is_covered(body: Graph) -> bool:
    return (
        bodies.dtypes(body) <= bodies.DTYPES | bodies.STORED
        and bodies.is_scalar(body)
        and _computes_in_wide_types(body)
    )


def _computes_in_wide_types(body: Graph) -> bool:
    """Whether float16 and bfloat16 occur only as inputs and outputs of Cast and Identity nodes."""
    nodes = [node for node in body.nodes if node.op not in ("Cast", "Identity")]
    return all(value.dtype not in bodies.STORED for node in nodes for value in (*node.inputs, *node.outputs) if value)


def _scalar_constants(given: list[tuple[int, Value]], constants: Mapping[Value, Array]) -> dict[int, Array]:
    """The arrays of those inputs `given` that are constants of one element, by their position in `given`.

    They become constants of the code.
    """
    return {
        position: constants[value]
        for position, (_, value) in enumerate(given)
        if value in constants and constants[value].size == 1
    }


def _nest(request: Request, inputs: list[Value]) -> Nest:
    output = request.node.outputs[0]
    strides = [request.walk(value, output.shape) for value in inputs]
    return Nest(output.shape, (*strides, request.strides_of(output))).collapsed()


def _can_take_over(value: Value, output: Value) -> bool:
    return value.shape == output.shape and value.dtype.itemsize == output.dtype.itemsize
