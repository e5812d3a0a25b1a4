"""Reverse-mode differentiation, graph to graph.

The sweep visits nodes from the last to the first. When it reaches a node, all readers of its outputs have contributed
to their gradients. The operator turns those into gradients of its inputs (`OpDef.slopes`, `gradient` or `definition`).
The gradient of an operator lies in `core/ops/<group>/<family>.py`, in the method `gradient` of the operator's class (or
in one of the other two). The sweep writes ordinary nodes, so a gradient can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.ir.graph import Graph, Node, Value, node_reads
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.backward import Backward, Rewrite, is_differentiable
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.ops.opdef.terms import Term, Writer


def gradients(graph: Graph, *, of: str | Sequence[str], with_respect_to: Sequence[str]) -> Graph:
    """A copy of `graph` with further outputs: the gradients of the values `of` with respect to the named values.

    The function that is differentiated is the sum of all elements of all values `of`. These and the values named by
    `with_respect_to` are inputs, states, constants (weights) or results of nodes. The gradient of `w` is the output
    `w.gradient` (`w.gradient_2` if that name is taken) with the type of `w`; it is zero if no value `of` depends on
    `w`. The gradients follow the other outputs, in the order of `with_respect_to`. The copy has no defaults
    (`Graph.defaults`) and no nodes that its outputs do not need.

    ModelError for a name that does not exist, or whose value is no tensor of floats of at least 16 bits.
    UnsupportedError, which names the node or value, for an operator that cannot be differentiated and for a tensor of
    unknown rank.
    """
    copy = graph.clone()
    copy.defaults.clear()  # the gradients hold for the present values of the constants only
    writer = Writer(copy, infer_graph(copy))
    by_name = {value.name: value for value in copy.values()}
    sources = [_differentiable_value(by_name, name, graph) for name in ([of] if isinstance(of, str) else of)]
    targets = [_differentiable_value(by_name, name, graph) for name in with_respect_to]
    for target, found in zip(targets, derivatives(writer, sources, targets), strict=True):
        gradient = found if found is not None else writer.zeros_like(target).value
        (output,) = writer.emit("Identity", [gradient])
        output.name = writer.fresh(f"{target.name}.gradient")
        copy.outputs.append(output)
    copy.remove_dead()
    return copy


def derivatives(writer: Writer, of: Sequence[Value], targets: Sequence[Value]) -> list[Value | None]:
    """The gradient of the sum of all elements of the values `of` with respect to each target.

    None stands for a gradient that is zero because no value `of` depends differentiably on the target. The nodes that
    compute the gradients are appended to the writer's graph. UnsupportedError as for `differentiate`.
    """
    seeds: list[Value | None] = [writer.fill(1, value.dtype, value.shape).value for value in of]
    return differentiate(writer, of, seeds, targets)


def differentiate(
    writer: Writer, results: Sequence[Value], seeds: Sequence[Value | None], targets: Sequence[Value]
) -> list[Value | None]:
    """The gradient with respect to each value in `targets`, by backpropagation from `results`.

    `seeds` are the gradients with respect to `results`, one for each (None: zero). None in the result stands for a
    gradient that is zero because no result with a seed depends differentiably on the target. The nodes that compute the
    gradients are appended to the writer's graph. UnsupportedError for an operator that cannot be differentiated, and
    for a tensor of unknown rank.
    """
    nodes = list(writer.graph.nodes)
    sweep = _Sweep(writer, targets)
    sweep.mark_active(nodes)
    for result, seed in zip(results, seeds, strict=True):
        if seed is not None:
            sweep.contribute(result, Term(writer, seed))
    sweep.run(nodes)
    return [sweep.total(target) for target in targets]


def _differentiable_value(values: dict[str, Value], name: str, graph: Graph) -> Value:
    if name not in values:
        raise ModelError(f"has no value '{name}'", where=f"graph '{graph.name}'")
    if not is_differentiable(values[name]):
        raise ModelError(f"is {values[name].type}, expected a tensor of real numbers", where=f"value '{name}'")
    return values[name]


class _Sweep:
    """One backward walk from results to targets: collects the terms of the gradient of each value on the way."""

    def __init__(self, writer: Writer, targets: Iterable[Value]) -> None:
        self.writer = writer
        self._active = set(targets)  # values that depend on a target
        self._parts: dict[Value, list[Term]] = {}
        self._totals: dict[Value, Value] = {}

    def run(self, nodes: Sequence[Node]) -> None:
        """Backpropagate through `nodes`, which are in topological order, from the last to the first.

        Skipped are nodes that depend on no target, and nodes whose outputs have no gradient yet. New nodes have the
        device annotation of the node that they differentiate.
        """
        outside = self.writer.device
        for node in reversed(nodes):
            if any(output in self._parts for output in node.outputs) and self._reads_active(node):
                self.writer.device = node.device or outside
                self._visit(node)
        self.writer.device = outside

    def contribute(self, value: Value, gradient: Term) -> None:
        """Add a term to the gradient of a value, summed over broadcast axes to the value's shape.

        Ignored if the value depends on no target, or is no tensor of floats of at least 16 bits.
        """
        if is_differentiable(value) and value in self._active:
            self._parts.setdefault(value, []).append(gradient.fit(value.shape))
            self._totals.pop(value, None)

    def total(self, value: Value) -> Value | None:
        """The sum of the terms contributed so far to the gradient of a value; None if there are none."""
        parts = self._parts.get(value)
        if not parts:
            return None
        if value not in self._totals:
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            self._parts[value] = [total]
            self._totals[value] = total.value
        return self._totals[value]

    def mark_active(self, nodes: Sequence[Node]) -> None:
        """Mark the float outputs of all nodes that depend on a target; `nodes` are in topological order."""
        for node in nodes:
            if self._reads_active(node):
                self._active.update(filter(is_differentiable, node.outputs))

    def _reads_active(self, node: Node) -> bool:
        return any(value in self._active for value in node_reads(node))

    def _visit(self, node: Node) -> None:
        op = registry.get(node.op)
        match op.differentiation:
            case "definition":
                self._through_definition(op, node)
            case "zero":
                return
            case "none":
                reason = op.no_gradient or f"it is of domain {op.domain}"
                raise UnsupportedError(f"cannot be differentiated: {reason}", where=registry.describe(node))
            case _:
                self._through_gradient(op, node)

    def _through_gradient(self, op: registry.OpDef, node: Node) -> None:
        found = {value: total for value in node.outputs if (total := self.total(value)) is not None}
        view = Backward(op, node, self.writer, found, self._active.__contains__, differentiate)
        for value, gradient in zip(node.inputs, _input_gradients(op, view), strict=False):
            if value is not None and gradient is not None:
                self.contribute(value, gradient)
        for value, captured in view.captured:
            self.contribute(value, Term(self.writer, captured))

    def _through_definition(self, op: registry.OpDef, node: Node) -> None:
        """Write the definition of the node in simpler operators, and differentiate that instead."""
        first = len(self.writer.graph.nodes)
        results = op.definition(Rewrite(op, node, self.writer))
        written = self.writer.graph.nodes[first:]
        self.mark_active(written)
        for output, result in zip(node.outputs, results, strict=False):
            total = self.total(output)
            if total is not None:
                self.contribute(result.value, Term(self.writer, total))
        self.run(written)


def _input_gradients(op: registry.OpDef, view: Backward) -> Sequence[Term | None]:
    if op.differentiation == "gradient":
        return op.gradient(view)
    dy = view.dy()
    return [None if slope is None else dy * slope for slope in op.slopes(view)]
