"""The reference runner: the NumPy references of a graph, one node at a time, while code for a new shape is compiled.

It answers any shape at once, at NumPy's speed. It stops when compiled code is there, and does not begin if compiling
takes no longer than the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, prod
from typing import Any

import numpy as np

from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Array, Graph, Node, Value, node_reads
from lathe.core.ir.types import TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.reference import bind_result_symbols, bind_symbols, run_node
from lathe.core.runtime.session.background import Background
from lathe.core.runtime.session.prepared_calls import Run
from lathe.core.runtime.session.run_inputs import RunInputs
from lathe.core.runtime.session.runner import Runner
from lathe.core.runtime.session.script import PART

MAX_OPERATIONS = (
    2e10  # operations: NumPy does about as many in the time that a model of about fifty layers takes to compile
)
_ELEMENT_OPERATIONS = 30  # operations per output element of a node that is not a product
_NODE_OPERATIONS = 1e5  # operations in the fixed time of a node, about ten microseconds
_NODES_PER_STEP = 20  # a step of a recurrent layer is several NumPy calls and takes as long as this number of nodes
_RECURRENT = frozenset({"GRU", "LSTM", "RNN", "RecurrentSteps"})
_CONTROL = frozenset({"If", "Loop", "Scan", "SequenceMap"})


class ReferenceRunner:
    """A stand-in that runs a graph without state on the references. Thread-safe."""

    prepared, is_cached, quick, is_lasting = True, True, False, False
    name = "the reference runner"
    failure: str | None = None
    runners: tuple[Runner, ...] = ()

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        kept = graph.live_outs()
        last = {value: node for node in graph.nodes for value in node_reads(node) if value not in kept}
        self._last_reads: dict[Node, list[Value]] = {}
        for value, node in last.items():
            self._last_reads.setdefault(node, []).append(value)

    def prepare(self, background: Background | None = None) -> None:
        """No effect: nothing has to be prepared."""

    def close(self) -> None:
        """No effect: there is nothing to free."""

    def call(self, given: RunInputs) -> Run | None:
        """Always None: nothing is prepared."""
        return None

    def run(self, given: RunInputs, enough: Callable[[], bool]) -> list[Any] | None:
        """Outputs in the model's order.

        None if the estimated work exceeds `MAX_OPERATIONS`, once `enough` returns true, and on any error, which
        compiled code then reports.
        """
        environment: dict[Value, Any] = dict(zip(self._graph.inputs, given.arrays, strict=True))
        try:
            known = bind_symbols(self._graph.inputs, environment)
            if operation_count(self._graph, known) > MAX_OPERATIONS:
                return None
            return self._run_nodes(environment, known, enough)
        except Exception:  # any error: a stand-in that fails must not make the model fail
            return None

    def _run_nodes(self, environment: dict[Value, Any], known: dict[str, int], enough: Callable[[], bool]) -> list[Any]:
        environment.update(self._graph.constants)
        for node in self._graph.nodes:
            _stop_if(enough)
            arguments = [environment[v] if v is not None else None for v in node.inputs]
            results = run_node(node, arguments, environment, known, partial(_stop_if, enough))
            environment.update(zip(node.outputs, results, strict=False))
            bind_result_symbols(node, results, known)
            for value in self._last_reads.get(node, ()):
                del environment[value]
        return [_copy_of(environment[value]) for value in self._graph.outputs]


class _Stop(Exception):
    """Compiled code has arrived, so the results of this run are not needed."""


def _stop_if(enough: Callable[[], bool]) -> None:
    if enough():
        raise _Stop


def copy_borrowed(results: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Results in the form of compiled code: contiguous, writable, and not shared with `given` or each other.

    `given`: the arrays of the caller. Arrays that the run has allocated itself in this form are not copied.
    """
    taken = set(map(id, given))
    found = []
    for result in results:
        own = isinstance(result, np.ndarray) and result.base is None and result.flags.c_contiguous
        found.append(result if own and result.flags.writeable and id(result) not in taken else _copy_of(result))
        taken.add(id(result))
    return found


def _copy_of(result: Any) -> Any:
    """A copy of an array in C order, or of a list with copies of its items; anything else as it is."""
    if isinstance(result, list):
        return [_copy_of(item) for item in result]
    return np.array(result, order="C") if isinstance(result, np.ndarray) else result


def operation_count(graph: Graph, known: Mapping[str, int]) -> float:
    """The estimated number of operations that the references take; infinity if it cannot be estimated.

    `known`: the values of the graph's symbols. The types of the graph must be inferred.
    """
    values = _values_of(graph) if any(node.op == "Loop" for node in graph.nodes) else {}
    return _Work(known, values, inf).of(graph.nodes)


def script_operation_count(script: Graph, known: Mapping[str, int]) -> float:
    """The estimated number of operations of the nodes that a script leaves to the references (see script.py).

    Nodes with unknown sizes count nothing, and loops of unknown length once: code for given sizes would leave them to
    the references, too.
    """
    return _Work(known, {}, 0).of([node for node in script.nodes if node.op != PART])


@dataclass(frozen=True)
class _Work:
    """Estimates numbers of operations; `of` adds up those of nodes.

    `known`: values of symbols. `values`: constants that inference knows. `unknown`: the count of a node whose sizes
    only a run shows.
    """

    known: Mapping[str, int]
    values: Mapping[Value, Array]
    unknown: float

    def of(self, nodes: Sequence[Node]) -> float:
        return sum(map(self._count_node, nodes))

    def _count_node(self, node: Node) -> float:
        try:
            return _NODE_OPERATIONS + self._work(node)
        except (KeyError, ValueError):
            return self.unknown

    def _work(self, node: Node) -> float:
        if node.op == PART:
            return 0
        if node.op in _RECURRENT:
            return self._recurrent(node)
        if node.op in _CONTROL:
            return self._iterations(node) * max(self.of(body.nodes) for body in node.subgraphs)
        size = sum(prod(self._shape(value)) for value in node.outputs)
        match node.op:
            case "MatMul" | "Gemm":
                return 2 * size * prod(self._shape(node.inputs[0])[-1:])
            case "Conv":
                return 2 * size * prod(self._shape(node.inputs[1])[1:])
            case "ConvTranspose":
                return 2 * prod(self._shape(node.inputs[0])) * prod(self._shape(node.inputs[1])[1:])
        return _ELEMENT_OPERATIONS * size * max([len(body.nodes) for body in node.subgraphs], default=1)

    def _recurrent(self, node: Node) -> float:
        """The operations of a recurrent layer: products with the weights, and a Python loop over time."""
        given, weights = self._shape(node.inputs[0]), [self._shape(value) for value in node.inputs[1:3] if value]
        steps = given[1 if node.attrs.get("layout", 0) and node.op != "RecurrentSteps" else 0]
        directions = weights[0][0]
        return directions * steps * _NODES_PER_STEP * _NODE_OPERATIONS + 2 * prod(given[:2]) * sum(map(prod, weights))

    def _iterations(self, node: Node) -> float:
        """The most iterations of a control flow node's body: 1 for If; if unknown, the larger of `unknown` and 1."""
        view = registry.Infer(registry.get(node.op), node, self.values)
        match node.op:
            case "If":
                return 1
            case "Loop":
                return self._loop_iterations(view)
            case "Scan":
                count, axes = view.attr("num_scan_inputs"), view.attr("scan_input_axes")
                return self._shape(node.inputs[-count])[axes[0] if axes else 0]
        return max(self.unknown, 1)

    def _loop_iterations(self, view: registry.Infer) -> float:
        """The iterations of a Loop: its known trip count, otherwise the longest of its scan outputs.

        If neither is there, the larger of `unknown` and 1.
        """
        limit, stacked = view.value(0), view.node.outputs[max(len(view.node.inputs) - 2, 0) :]
        if limit is not None and limit.size == 1:
            return evaluate(limit.reshape(-1)[0], self.known)
        return max([self._shape(value)[0] for value in stacked], default=max(self.unknown, 1))

    def _shape(self, value: Value | None) -> tuple[int, ...]:
        if value is None or not isinstance(value.type, TensorType):
            raise ValueError("not a tensor")
        return value.type.evaluate(self.known)


def _values_of(graph: Graph) -> dict[Value, Array]:
    """The constants that inference finds in a graph.

    Inference runs on a clone, because other threads may run the graph and read its types.
    """
    twin = graph.clone()
    values = infer_graph(twin)
    pairs = zip(graph.values(), twin.values(), strict=True)
    return {own: values[other] for own, other in pairs if other in values}
