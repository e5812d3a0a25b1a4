"""The general version of a model: its references, one node at a time, while code for a new shape is being compiled.

It answers any shape at once, at NumPy's speed. It gives up as soon as compiled code is there, and does not begin where
the work is so much that compiling takes no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, prod
from typing import Any

import numpy as np

from core.ir.graph import Graph, Node, Value, node_reads
from core.ir.types import TensorType
from core.reference import bind_symbols, learn_symbols, run_node
from core.runtime.background import Background
from core.runtime.call import Run
from core.runtime.executable import Executable
from core.runtime.given import Given

_MOST_WORK = 2e10  # operations: about what NumPy does while a model of some fifty layers compiles
_STEP = 30  # operations that an element of anything but a product takes
_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})  # a Python loop over time


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
    ) -> list[Any] | None:
        environment.update(self._graph.constants)
        for node in self._graph.nodes:
            if enough():
                return None
            arguments = [environment[v] if v is not None else None for v in node.inputs]
            results = run_node(node, arguments, environment, known)
            environment.update(zip(node.outputs, results, strict=False))
            learn_symbols(node, results, known)
            for value in self._dying.get(node, ()):
                del environment[value]
        return [_fresh(environment[value]) for value in self._graph.outputs]


def _fresh(result: Any) -> Any:
    """A result as compiled code gives it: in rows, and no view of what others own."""
    if isinstance(result, list):
        return [_fresh(item) for item in result]
    return np.array(result, order="C") if isinstance(result, np.ndarray) else result


def work(graph: Graph, known: Mapping[str, int]) -> float:
    """About how many operations the references need; infinity where that cannot be told."""
    try:
        return sum(_work_of(node, known) for node in graph.nodes)
    except (KeyError, ValueError):  # a size that only shows in a run
        return inf


def _work_of(node: Node, known: Mapping[str, int]) -> float:
    if node.subgraphs or node.op in _RECURRENT:
        return inf
    size = sum(prod(_shape(value, known)) for value in node.outputs)
    match node.op:
        case "MatMul" | "Gemm":
            return 2 * size * prod(_shape(node.inputs[0], known)[-1:])
        case "Conv":
            return 2 * size * prod(_shape(node.inputs[1], known)[1:])
        case "ConvTranspose":
            return 2 * prod(_shape(node.inputs[0], known)) * prod(_shape(node.inputs[1], known)[1:])
    return _STEP * size


def _shape(value: Value | None, known: Mapping[str, int]) -> tuple[int, ...]:
    if value is None or not isinstance(value.type, TensorType):
        raise ValueError("not a tensor")
    return value.type.evaluate(known)
