"""What operators see when they are differentiated: `Rewrite` for definitions, `Backward` for gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from core.ir.graph import Attr, Graph, Node, Value
from core.ir.types import Dim, TensorType
from core.ops.inference import infer_node
from core.ops.registry import Infer
from core.ops.terms import Term, Writer

if TYPE_CHECKING:
    from core.ops.registry import OpDef

Slope: TypeAlias = Term | float | None  # None: zero

# differentiate(writer, results, their gradients, values) -> the gradients of those values, None where zero
Differentiate: TypeAlias = Callable[
    [Writer, Sequence[Value], Sequence[Value | None], Sequence[Value]], list[Value | None]
]


class Rewrite(Infer):
    """The view given to `OpDef.definition`: the node's inputs as terms of the graph it stands in."""

    def __init__(self, op: OpDef, node: Node, writer: Writer) -> None:
        super().__init__(op, node, writer.known)
        self.writer = writer

    def x(self, index: int = 0) -> Term:
        """An input that must be present."""
        value = self.node.input(index)
        if value is None:
            return self.fail(f"input {index} ({self.op.input_name(index)}) is missing")
        return Term(self.writer, value)

    def given(self, index: int) -> Term | None:
        """An input, or None when it is absent."""
        return self.x(index) if self.has_input(index) else None

    @property
    def terms(self) -> list[Term]:
        """All inputs of an operator that has no optional ones."""
        return [self.x(i) for i in range(len(self.node.inputs))]

    def again(self, *inputs: Term | None, outputs: int = 1, **attrs: Attr) -> list[Term]:
        """The same operator with the same attributes, but for those given, on other inputs."""
        values = [None if term is None else term.value for term in inputs]
        return [
            Term(self.writer, value)
            for value in self.writer.emit(self.node.op, values, {**self.node.attrs, **attrs}, outputs)
        ]


class Backward(Rewrite):
    """The view given to `OpDef.gradient`: also the outputs, and the gradients with respect to them.

    `wants(i)` says whether anybody needs the gradient with respect to input i.
    """

    def __init__(
        self,
        op: OpDef,
        node: Node,
        writer: Writer,
        gradients: Mapping[Value, Value],
        wanted: Callable[[Value], bool],
        differentiate: Differentiate,
    ) -> None:
        super().__init__(op, node, writer)
        self._gradients = gradients
        self._wanted = wanted
        self.differentiate = differentiate
        self.captured: list[tuple[Value, Value]] = []

    def y(self, index: int = 0) -> Term:
        return Term(self.writer, self.node.outputs[index])

    def dy(self, index: int = 0) -> Term:
        """The gradient with respect to an output; zeros where nothing depends on it."""
        value = self.node.outputs[index]
        found = self._gradients.get(value)
        return self.writer.zeros_like(value) if found is None else Term(self.writer, found)

    def has_dy(self, index: int) -> bool:
        return index < len(self.node.outputs) and self.node.outputs[index] in self._gradients

    def wants(self, index: int) -> bool:
        value = self.node.input(index)
        return value is not None and self._wanted(value)

    def wanted_captures(self, bodies: Sequence[Graph]) -> list[Value]:
        """Values that nested graphs read from around them and whose gradients somebody needs."""
        from core.ir.graph import captures

        found = dict.fromkeys(value for body in bodies for value in captures(body))
        return [value for value in found if self._wanted(value)]

    def seed(self, index: int) -> Value | None:
        """The gradient with respect to an output as it is, None where nothing depends on it."""
        return self._gradients.get(self.node.outputs[index]) if index < len(self.node.outputs) else None

    def record(self, body: Graph, values: Sequence[Value]) -> list[Term]:
        """Make a Loop or Scan stack what values of its body are in every iteration, in the order of iterations."""
        inner, first = self.writer.nested(body), len(self.node.outputs)
        for value in values:
            body.outputs.append(Term(inner, value).op("Identity").value)
            self.node.outputs.append(Value(self.writer.fresh(f"{value.name}.record"), value.type, self.node))
        infer_node(self.node, self.writer.known)
        return [Term(self.writer, value) for value in self.node.outputs[first:]]

    def capture(self, value: Value, gradient: Value) -> None:
        """Note the gradient with respect to a value that a nested graph reads."""
        self.captured.append((value, gradient))


def is_differentiable(value: Value) -> bool:
    """Whether a value is a tensor of real numbers: only those have gradients."""
    return isinstance(value.type, TensorType) and value.type.dtype.is_float and value.type.dtype.itemsize >= 2


def back_through(
    g: Backward, writer: Writer, results: Sequence[Value], seeds: Sequence[Value | None], targets: Sequence[Value]
) -> list[Value]:
    """The gradients of targets written into a nested graph; zeros where there is none."""
    found = g.differentiate(writer, results, seeds, targets)
    return [
        value if value is not None else writer.zeros_like(target).value
        for value, target in zip(found, targets, strict=True)
    ]


def scatter_along(dy: Term, indices: Term, axis: int, extent: Dim) -> Term:
    """The gradient of taking slices at `indices` along `axis`, an axis of so many places: slices taken twice add up."""
    ranks = range(axis + indices.rank, dy.rank)
    moved = dy.transpose(*range(axis, axis + indices.rank), *range(axis), *ranks)
    others = [*dy.shape[:axis], *dy.shape[axis + indices.rank :]]
    zeros = dy.writer.fill(0, dy.dtype, (extent, *others))
    placed = zeros.op("ScatterND", indices.unsqueeze(indices.rank), moved, reduction="add")
    return placed.transpose(*range(1, axis + 1), 0, *range(axis + 1, placed.rank))
