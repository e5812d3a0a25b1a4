"""Elementwise nodes, single or fused, over inputs of any broadcast pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from core.ir.graph import Array, Graph, Value
from core.ir.types import DType
from core.kernels.catalog import body as bodies
from core.kernels.catalog.base import VIEWS, In, KernelCall, KernelSpec, Out, Request, covers
from core.kernels.catalog.nest import Nest, has_plannable_types, traffic
from core.kernels.catalog.numbers import Numbers
from core.kernels.catalog.words import NARROW
from core.kernels.target import Target
from core.ops import registry

DTYPES = frozenset(
    {DType.FLOAT32, DType.FLOAT64, DType.INT64, DType.INT32, DType.INT16, DType.INT8, DType.BOOL}
    | {DType.UINT64, DType.UINT32, DType.UINT16, DType.UINT8}
)
STORED = NARROW  # kernels convert such elements, they do not compute with them

_LONG_ROW = 1024  # elements; of shorter ones a task takes several
_MOST_NAMED = 4  # operators of a kernel that `summary` lists


@dataclass(frozen=True)
class ElementwiseSpec(KernelSpec):
    """`body` applied along `nest`; the nest's operands are the body's inputs and then one output for all."""

    family: ClassVar[str] = "elementwise"
    body: Graph
    nest: Nest

    def general(self, target: Target, place: int) -> tuple[KernelSpec, tuple[int, ...]] | None:
        """Rows that are long enough to be worth dividing are known to the code."""
        inner = self.nest.extents[-1]
        if self.nest.rank > 1 and isinstance(inner, int) and inner > _LONG_ROW:
            return None
        numbers = Numbers()
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


@covers(*OPS)
def elementwise(request: Request) -> KernelCall | None:
    """None for element types or bodies outside the scalar algebra, and for unplannable shapes."""
    return call_of(request, _is_covered)


def call_of(request: Request, can_compute: Callable[[Graph], bool]) -> KernelCall | None:
    """What is the same on every device; None for shapes that cannot be planned, or what `can_compute` says no to."""
    node = request.node
    source = node.attrs["body"] if node.op == "FusedElementwise" else bodies.single_body(node)
    if not isinstance(source, Graph) or not has_plannable_types(node) or not can_compute(source):
        return None
    given = [(index, value) for index, value in enumerate(node.inputs) if value is not None]
    known = _known(given, request.constants)
    body = bodies.canonical(source, known)
    operands = [(index, value) for position, (index, value) in enumerate(given) if position not in known]
    nest = _nest(request, [value for _, value in operands])
    inputs, outputs = [In(index) for index, _ in operands], [Out(i) for i in range(len(node.outputs))]
    return KernelCall(
        ElementwiseSpec(body, nest),
        (*inputs, *outputs),
        strided=(*inputs, *(outputs if len(outputs) == 1 else [])) if _in_lines(nest) else (),
        inplace=tuple(index for index, value in operands if _can_take_over(value, node.output)),
        pointwise=True,
        flops=node.output.tensor.size * len(body.nodes),
        bytes=traffic(node),
    )


def _in_lines(nest: Nest) -> bool:
    """Whether neighbours in the innermost loop are neighbours in memory, or one value for all."""
    return all(stride in (0, 1) for stride in nest.loop(nest.rank - 1))


def _is_covered(body: Graph) -> bool:
    return bodies.dtypes(body) <= DTYPES | STORED and bodies.is_scalar(body) and _computes_wide(body)


def _computes_wide(body: Graph) -> bool:
    """Whether types that are only stored occur in nothing but conversions."""
    nodes = [node for node in body.nodes if node.op not in ("Cast", "Identity")]
    return all(value.dtype not in STORED for node in nodes for value in (*node.inputs, *node.outputs) if value)


def _known(given: list[tuple[int, Value]], constants: Mapping[Value, Array]) -> dict[int, Array]:
    """Constants of one element: they become part of the code."""
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
