"""The general version of a model: its references, one node at a time, while code for a new shape is being compiled.

It answers any shape at once, at NumPy's speed. It gives up as soon as compiled code is there, and does not begin where
the work is so much that compiling takes no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, prod
from typing import Any

import numpy as np

from core.ir.dim import evaluate
from core.ir.graph import Array, Graph, Node, Value, node_reads
from core.ir.types import TensorType
from core.ops import registry
from core.ops.inference import infer_graph
from core.reference import bind_symbols, learn_symbols, run_node
from core.runtime.background import Background
from core.runtime.call import Run
from core.runtime.given import Given
from core.runtime.runner import Runner
from core.runtime.script import PART

MOST_WORK = 2e10  # operations: about what NumPy does while a model of some fifty layers compiles
_STEP = 30  # operations that an element of anything but a product takes
_NODE = 1e5  # operations in the time that a node takes whatever its sizes: about ten microseconds
_STEP_NODES = 20  # nodes that take as long as a step of a recurrent layer, which is some calls of NumPy
_RECURRENT = frozenset({"GRU", "LSTM", "RNN", "RecurrentSteps"})
_CONTROL = frozenset({"If", "Loop", "Scan", "SequenceMap"})


class General:
    """Runs a graph without state; thread-safe."""

    prepared, at_hand, quick, lasting = True, True, False, False
    name = "the general version"
    runners: tuple[Runner, ...] = ()

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        kept = graph.live_outs()
        last = {value: node for node in graph.nodes for value in node_reads(node) if value not in kept}
        self._dying: dict[Node, list[Value]] = {}
        for value, node in last.items():
            self._dying.setdefault(node, []).append(value)

    def prepare(self, background: Background | None = None) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def call(self, given: Given) -> Run | None:
        """Nothing is prepared."""
        return None

    def run(self, given: Given, enough: Callable[[], bool]) -> list[Any] | None:
        """Outputs in the model's order; None where it is not worth beginning, once it is `enough`, and where the data
        do not fit: compiled code says why, as always."""
        environment: dict[Value, Any] = dict(zip(self._graph.inputs, given.arrays, strict=True))
        try:
            known = bind_symbols(self._graph.inputs, environment)
            if work(self._graph, known) > MOST_WORK:
                return None
            return self._run_nodes(environment, known, enough)
        except Exception:  # whatever it is: a model is not refused by what only stands in
            return None

    def _run_nodes(self, environment: dict[Value, Any], known: dict[str, int], enough: Callable[[], bool]) -> list[Any]:
        environment.update(self._graph.constants)
        for node in self._graph.nodes:
            _end_if(enough)
            arguments = [environment[v] if v is not None else None for v in node.inputs]
            results = run_node(node, arguments, environment, known, partial(_end_if, enough))
            environment.update(zip(node.outputs, results, strict=False))
            learn_symbols(node, results, known)
            for value in self._dying.get(node, ()):
                del environment[value]
        return [_fresh(environment[value]) for value in self._graph.outputs]


class _Enough(Exception):
    """Nobody waits for what is being computed."""


def _end_if(enough: Callable[[], bool]) -> None:
    if enough():
        raise _Enough


def owned(results: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Results as compiled code gives them; those of arrays of their own that it made stay what they are. `given`: the
    arrays of the caller."""
    taken = set(map(id, given))
    found = []
    for result in results:
        own = isinstance(result, np.ndarray) and result.base is None and result.flags.c_contiguous
        found.append(result if own and result.flags.writeable and id(result) not in taken else _fresh(result))
        taken.add(id(result))
    return found


def _fresh(result: Any) -> Any:
    """A result as compiled code gives it: in rows, and no view of what others own."""
    if isinstance(result, list):
        return [_fresh(item) for item in result]
    return np.array(result, order="C") if isinstance(result, np.ndarray) else result


def work(graph: Graph, known: Mapping[str, int]) -> float:
    """About how many operations the references need; infinity where that cannot be told. The graph's types are set."""
    values = _values_of(graph) if any(node.op == "Loop" for node in graph.nodes) else {}
    return _Work(known, values, inf).of(graph.nodes)


def work_between(script: Graph, known: Mapping[str, int]) -> float:
    """The same of what a script leaves to the references (see in_parts.py), as far as its sizes are known: where they
    are not, code for certain sizes would leave it to the references, too."""
    return _Work(known, {}, 0).of([node for node in script.nodes if node.op != PART])


@dataclass(frozen=True)
class _Work:
    """Counts operations. `values`: what inference knows of values; `unknown`: what a node counts whose sizes only show
    in a run."""

    known: Mapping[str, int]
    values: Mapping[Value, Array]
    unknown: float

    def of(self, nodes: Sequence[Node]) -> float:
        return sum(map(self._counted, nodes))

    def _counted(self, node: Node) -> float:
        try:
            return _NODE + self._work(node)
        except (KeyError, ValueError):
            return self.unknown

    def _work(self, node: Node) -> float:
        if node.op == PART:
            return 0
        if node.op in _RECURRENT:
            return self._recurrent(node)
        if node.op in _CONTROL:
            return self._trips(node) * max(self.of(body.nodes) for body in node.subgraphs)
        size = sum(prod(self._shape(value)) for value in node.outputs)
        match node.op:
            case "MatMul" | "Gemm":
                return 2 * size * prod(self._shape(node.inputs[0])[-1:])
            case "Conv":
                return 2 * size * prod(self._shape(node.inputs[1])[1:])
            case "ConvTranspose":
                return 2 * prod(self._shape(node.inputs[0])) * prod(self._shape(node.inputs[1])[1:])
        return _STEP * size * max([len(body.nodes) for body in node.subgraphs], default=1)

    def _recurrent(self, node: Node) -> float:
        """Every row of every step multiplies the weights, in a Python loop over time."""
        given, weights = self._shape(node.inputs[0]), [self._shape(value) for value in node.inputs[1:3] if value]
        steps = given[1 if node.attrs.get("layout", 0) and node.op != "RecurrentSteps" else 0]
        directions = weights[0][0]
        return directions * steps * _STEP_NODES * _NODE + 2 * prod(given[:2]) * sum(map(prod, weights))

    def _trips(self, node: Node) -> float:
        """How often a node runs its body at most, or so often as to do the work of `unknown`."""
        view = registry.Infer(registry.get(node.op), node, self.values)
        match node.op:
            case "If":
                return 1
            case "Loop":
                return self._rounds(view)
            case "Scan":
                count, axes = view.attr("num_scan_inputs"), view.attr("scan_input_axes")
                return self._shape(node.inputs[-count])[axes[0] if axes else 0]
        return max(self.unknown, 1)

    def _rounds(self, view: registry.Infer) -> float:
        """Of a Loop: its limit, or as many as it stacks."""
        limit, stacked = view.value(0), view.node.outputs[max(len(view.node.inputs) - 2, 0) :]
        if limit is not None and limit.size == 1:
            return evaluate(limit.reshape(-1)[0], self.known)
        return max([self._shape(value)[0] for value in stacked], default=max(self.unknown, 1))

    def _shape(self, value: Value | None) -> tuple[int, ...]:
        if value is None or not isinstance(value.type, TensorType):
            raise ValueError("not a tensor")
        return value.type.evaluate(self.known)


def _values_of(graph: Graph) -> dict[Value, Array]:
    """What inference knows of the values of a graph, whose own types stay as they are: other threads may run it."""
    twin = graph.clone()
    values = infer_graph(twin)
    pairs = zip(graph.values(), twin.values(), strict=True)
    return {own: values[other] for own, other in pairs if other in values}
