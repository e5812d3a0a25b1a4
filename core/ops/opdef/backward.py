"""The views of a node in differentiation: `Rewrite` for slopes and definitions, `Backward` for gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from lathe.core.ir.graph import Attr, Graph, Node, Value
from lathe.core.ir.types import Dim, TensorType
from lathe.core.ops.opdef.inference import infer_node
from lathe.core.ops.opdef.registry import Infer
from lathe.core.ops.opdef.terms import Term, Writer

if TYPE_CHECKING:
    from lathe.core.ops.opdef.registry import OpDef

Slope: TypeAlias = Term | float | None  # None: zero

# differentiate(writer, results, gradients of the results, values) returns the gradients of the values; None is zero.
Differentiate: TypeAlias = Callable[
    [Writer, Sequence[Value], Sequence[Value | None], Sequence[Value]], list[Value | None]
]


class Rewrite(Infer):
    """The view for `OpDef.slopes` and `OpDef.definition`: the node's inputs as terms of its graph."""

    def __init__(self, op: OpDef, node: Node, writer: Writer) -> None:
        super().__init__(op, node, writer.known)
        self.writer = writer

    def x(self, index: int = 0) -> Term:
        """Input `index` of the node as a `Term`; ModelError if the node does not have this input."""
        value = self.node.input(index)
        if value is None:
            return self.fail(f"input {index} ({self.op.input_name(index)}) is missing")
        return Term(self.writer, value)

    def x_or_none(self, index: int) -> Term | None:
        """Input `index` of the node as a `Term`; None if the node does not have this input."""
        return self.x(index) if self.has_input(index) else None

    @property
    def terms(self) -> list[Term]:
        """All inputs as `Term`s, for operators without optional inputs; ModelError if the node leaves an input out."""
        return [self.x(i) for i in range(len(self.node.inputs))]

    def again(self, *inputs: Term | None, outputs: int = 1, **attrs: Attr) -> list[Term]:
        """Emits the node's operator on other inputs, its attributes updated by `attrs`; returns `outputs` outputs."""
        values = [None if term is None else term.value for term in inputs]
        return [
            Term(self.writer, value)
            for value in self.writer.emit(self.node.op, values, {**self.node.attrs, **attrs}, outputs)
        ]


class Backward(Rewrite):
    """The view for `OpDef.gradient`: inputs, outputs, and the gradients with respect to the outputs.

    `wants(i)`: whether the gradient with respect to input i is needed.
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
        """The gradient with respect to output `index`; zeros if the loss does not depend on it."""
        value = self.node.outputs[index]
        found = self._gradients.get(value)
        return self.writer.zeros_like(value) if found is None else Term(self.writer, found)

    def has_dy(self, index: int) -> bool:
        return index < len(self.node.outputs) and self.node.outputs[index] in self._gradients

    def wants(self, index: int) -> bool:
        value = self.node.input(index)
        return value is not None and self._wanted(value)

    def wanted_captures(self, bodies: Sequence[Graph]) -> list[Value]:
        """The values that `bodies` capture and whose gradients are needed, each once."""
        from lathe.core.ir.graph import captures

        found = dict.fromkeys(value for body in bodies for value in captures(body))
        return [value for value in found if self._wanted(value)]

    def seed(self, index: int) -> Value | None:
        """The gradient with respect to output `index`; None if the loss does not depend on it or the node lacks it."""
        return self._gradients.get(self.node.outputs[index]) if index < len(self.node.outputs) else None

    def record(self, body: Graph, values: Sequence[Value]) -> list[Term]:
        """Adds scan outputs to the node, a Loop or Scan: these values of its body, stacked over all iterations.

        Returns the new outputs. Changes the node and `body`.
        """
        inner, first = self.writer.nested(body), len(self.node.outputs)
        for value in values:
            body.outputs.append(Term(inner, value).op("Identity").value)
            self.node.outputs.append(Value(self.writer.fresh(f"{value.name}.record"), value.type, self.node))
        infer_node(self.node, self.writer.known)
        return [Term(self.writer, value) for value in self.node.outputs[first:]]

    def capture(self, value: Value, gradient: Value) -> None:
        """Records in `captured` that `gradient` is a summand of the gradient with respect to `value`.

        A body of the node captures `value`.
        """
        self.captured.append((value, gradient))


def is_differentiable(value: Value) -> bool:
    """Whether a value is a tensor of floats of at least two bytes: only those have gradients."""
    return isinstance(value.type, TensorType) and value.type.dtype.is_float and value.type.dtype.itemsize >= 2


def nested_gradients(
    g: Backward, writer: Writer, results: Sequence[Value], seeds: Sequence[Value | None], targets: Sequence[Value]
) -> list[Value]:
    """The gradients with respect to `targets`, computed by new nodes in the nested graph of `writer`.

    `seeds` are the gradients with respect to `results`; None means zero. A target on which no result depends gets
    zeros.
    """
    found = g.differentiate(writer, results, seeds, targets)
    return [
        value if value is not None else writer.zeros_like(target).value
        for value, target in zip(found, targets, strict=True)
    ]


def scatter_along(dy: Term, indices: Term, axis: int, extent: Dim) -> Term:
    """The gradient with respect to the data of a Gather, from the gradient `dy` with respect to its result.

    Gather reads slices at `indices` along `axis` (0 or more), which has extent `extent` in the data. The gradients of a
    slice that is gathered twice add up.
    """
    ranks = range(axis + indices.rank, dy.rank)
    moved = dy.transpose(*range(axis, axis + indices.rank), *range(axis), *ranks)
    others = [*dy.shape[:axis], *dy.shape[axis + indices.rank :]]
    zeros = dy.writer.fill(0, dy.dtype, (extent, *others))
    placed = zeros.op("ScatterND", indices.unsqueeze(indices.rank), moved, reduction="add")
    return placed.transpose(*range(1, axis + 1), 0, *range(axis + 1, placed.rank))
