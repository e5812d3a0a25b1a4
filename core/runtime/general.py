"""The general version of a model: its references, one node at a time, while code for a new shape is being compiled.

It answers any shape at once, at NumPy's speed. It gives up as soon as compiled code is there, and does not begin where
the work is so much that compiling takes no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from core.runtime.executable import Executable
from core.runtime.given import Given

_MOST_WORK = 2e10  # operations: about what NumPy does while a model of some fifty layers compiles
_STEP = 30  # operations that an element of anything but a product takes
_NODE = 1e5  # operations in the time that a node takes whatever its sizes: about ten microseconds
_STEP_NODES = 20  # nodes that take as long as a step of a recurrent layer, which is some calls of NumPy
_RECURRENT = frozenset({"GRU", "LSTM", "RNN", "RecurrentSteps"})
_CONTROL = frozenset({"If", "Loop", "Scan", "SequenceMap"})


class General:
    """Runs a graph without state; thread-safe."""

    prepared, at_hand, quick, lasting = True, True, False, False
    name = "the general version"
    runners: tuple[Executable, ...] = ()

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
            if work(self._graph, known) > _MOST_WORK:
                return None
            return self._run_nodes(environment, known, enough)
        except Exception:  # whatever it is: a model is not refused by what only stands in
            return None

    def _run_nodes(
        self, environment: dict[Value, Any], known: dict[str, int], enough: Callable[[], bool]
    ) -> list[Any]:
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


def _fresh(result: Any) -> Any:
    """A result as compiled code gives it: in rows, and no view of what others own."""
    if isinstance(result, list):
        return [_fresh(item) for item in result]
    return np.array(result, order="C") if isinstance(result, np.ndarray) else result


def work(graph: Graph, known: Mapping[str, int]) -> float:
    """About how many operations the references need; infinity where that cannot be told. The graph's types are set."""
    values = _values_of(graph) if any(node.op == "Loop" for node in graph.nodes) else {}
    return work_of_nodes(graph.nodes, known, values)


def work_of_nodes(nodes: Sequence[Node], known: Mapping[str, int], values: Mapping[Value, Array]) -> float:
    """The same of some nodes of a graph. `values`: what inference knows of its values, of which loops count."""
    try:
        return sum(_NODE + _work_of(node, known, values) for node in nodes)
    except (KeyError, ValueError):  # a size that only shows in a run
        return inf


def _values_of(graph: Graph) -> dict[Value, Array]:
    """What inference knows of the values of a graph, whose own types stay as they are: other threads may run it."""
    twin = graph.clone()
    values = infer_graph(twin)
    pairs = zip(graph.values(), twin.values(), strict=True)
    return {own: values[other] for own, other in pairs if other in values}


def _work_of(node: Node, known: Mapping[str, int], values: Mapping[Value, Array]) -> float:
    if node.op in _RECURRENT:
        return _recurrent_work(node, known)
    if node.op in _CONTROL:
        return _work_inside(node, known, values)
    size = sum(prod(_shape(value, known)) for value in node.outputs)
    match node.op:
        case "MatMul" | "Gemm":
            return 2 * size * prod(_shape(node.inputs[0], known)[-1:])
        case "Conv":
            return 2 * size * prod(_shape(node.inputs[1], known)[1:])
        case "ConvTranspose":
            return 2 * prod(_shape(node.inputs[0], known)) * prod(_shape(node.inputs[1], known)[1:])
    return _STEP * size * max([len(body.nodes) for body in node.subgraphs], default=1)


def _recurrent_work(node: Node, known: Mapping[str, int]) -> float:
    """Every row of every step multiplies the weights, in a Python loop over time."""
    given, weights = _shape(node.inputs[0], known), [_shape(value, known) for value in node.inputs[1:3] if value]
    steps = given[1 if node.attrs.get("layout", 0) and node.op != "RecurrentSteps" else 0]
    directions = weights[0][0]
    return directions * steps * _STEP_NODES * _NODE + 2 * prod(given[:2]) * sum(map(prod, weights))


def _work_inside(node: Node, known: Mapping[str, int], values: Mapping[Value, Array]) -> float:
    """The work of the longest body, as often as it runs."""
    bodies = [work_of_nodes(body.nodes, known, values) for body in node.subgraphs]
    return _trips(node, known, values) * max(bodies)


def _trips(node: Node, known: Mapping[str, int], values: Mapping[Value, Array]) -> float:
    """How often a node runs its body at most; infinity where that only shows in a run."""
    view = registry.Infer(registry.get(node.op), node, values)
    match node.op:
        case "If":
            return 1
        case "Loop":
            limit = view.value(0)
            return evaluate(limit.reshape(-1)[0], known) if limit is not None and limit.size == 1 else inf
        case "Scan":
            count, axes = view.attr("num_scan_inputs"), view.attr("scan_input_axes")
            return _shape(node.inputs[-count], known)[axes[0] if axes else 0]
    return inf


def _shape(value: Value | None, known: Mapping[str, int]) -> tuple[int, ...]:
    if value is None or not isinstance(value.type, TensorType):
        raise ValueError("not a tensor")
    return value.type.evaluate(known)
