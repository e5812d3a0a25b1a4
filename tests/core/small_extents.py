"""Runs of single operators with small dynamic extents: compiled code must do what the references do.

`python -m tests.core.small_extents PART PARTS [--first]` runs every PARTSth graph from number PART on. It prints the
name of each run before it starts, so that the output of a process that crashes ends with the run that crashed. At the
end it prints the operators that it ran, before and after the passes. `--first`: the first graphs of each operator."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import lathe
from lathe.core.compiler.options import make_options
from lathe.core.compiler.run_passes import run_passes
from lathe.core.errors import LatheError
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.kernel_table import TABLE
from lathe.core.ops.opdef import registry
from lathe.core.reference import interpret
from tests.core.kernels import family_cases
from tests.core.ops.cases import CASES, Case
from tests.core.ops.harness import graph_of
from tests.core.ops.numeric_cases import NUMERIC_CASES
from tests.core.test_dynamic_operators import WINDOWS, with_weights

SMALL = (0, 1, 2)
OPTIONS = make_options(tune="off", threads=1)


@dataclass(frozen=True)
class Sized:
    """A graph with dynamic extents, and feeds of several sizes."""

    label: str
    graph: Graph
    feeds: tuple[Mapping[str, Any], ...]


def sized_graphs(first: bool) -> Iterator[Sized]:
    """The graphs; if `first`, the first case of each operator of the table, and the first graph of each family.

    Elementwise operators share one kernel, of which the families have graphs."""
    seen = Counter[str]()
    for case in (*CASES, *NUMERIC_CASES, *WINDOWS):
        made = list(_of_case(case))
        if not first:
            yield from made
        elif case.op in TABLE and made and not seen[case.op] and not registry.get(case.op).is_elementwise:
            seen[case.op] += 1
            yield from made
    for number, graph in enumerate(family_cases.graphs()):
        key = "+".join(node.op for node in graph.nodes)
        seen[key] += 1
        if graph.inputs and (not first or seen[key] == 1):
            yield Sized(f"family {number} {key}", graph, tuple(_feeds(graph, n) for n in SMALL))


def _of_case(case: Case) -> Iterator[Sized]:
    """The case with each extent of each input as a symbol, then with all extents of an input as symbols."""
    for index, array in enumerate(case.inputs):
        if not isinstance(array, np.ndarray) or not array.size or index in case.param_indices:
            continue
        single = [(axis,) for axis in range(array.ndim)]
        for axes in [*single, tuple(range(array.ndim))] if array.ndim > 1 else single:
            shape: list[Any] = [*array.shape]
            for axis in axes:
                shape[axis] = symbol(f"m{axis}")
            try:
                graph = with_weights(graph_of(case, {index: tuple(shape)}), case)
            except LatheError:  # the operator accepts only numbers here
                continue
            if f"x{index}" in {value.name for value in graph.inputs}:
                whole = {f"x{i}": each for i, each in enumerate(case.inputs) if isinstance(each, np.ndarray)}
                given = {value.name: whole[value.name] for value in graph.inputs}
                cuts = [*(_resized(array, dict.fromkeys(axes, extent)) for extent in SMALL), array]
                yield Sized(
                    f"{case.label}, axes {axes} of input {index}",
                    graph,
                    tuple({**given, f"x{index}": cut} for cut in cuts),
                )


def _resized(array: Any, extents: Mapping[int, int]) -> Any:
    """The array repeated or cut to these extents."""
    for axis, extent in extents.items():
        array = np.take(array, np.arange(extent) % max(array.shape[axis], 1), axis)
    return array


def _feeds(graph: Graph, n: int) -> dict[str, Any]:
    """Inputs in which each symbol is `n`, the same in every run.

    Bounds of segments, which packing computes, and positions of tokens in a cache are 0, 1, 2, ...: operators over them
    say that they ascend.
    """
    shapes = {value: value.tensor.evaluate(dict.fromkeys(value.tensor.symbols, n)) for value in graph.inputs}
    ascending = [node.inputs[-1] for node in graph.nodes if node.op.startswith("Segment")]
    ascending += [node.inputs[3] for node in graph.nodes if node.op == "CachedAttention"]
    numbers = np.random.default_rng(n)
    return {
        value.name: (np.arange(*shape) if value in ascending else np.abs(numbers.standard_normal(shape))).astype(
            value.dtype.numpy
        )
        for value, shape in shapes.items()
    }


def difference(run: Any, reference: Any, room: float) -> str:
    """How a run differs from the reference, as text; "" if both return the same or raise the same class of error.

    Results without elements may stand in place of an error: no kernel runs for them that could check the data."""
    got, want = _outcome(run), _outcome(reference)
    if isinstance(got, str) or isinstance(want, str):
        is_empty = not isinstance(got, str) and all(array.size == 0 for array in got.values())
        same = is_empty or str(got).partition(":")[0] == str(want).partition(":")[0]
        return "" if same else f"got {got}\nexpected {want}"
    for (name, array), expected in zip(got.items(), want.values(), strict=True):
        if array.shape != expected.shape or array.dtype != expected.dtype:
            return f"{name} is {array.dtype}{array.shape}, expected {expected.dtype}{expected.shape}"
        texts = expected.dtype == object
        if not (array.tolist() == expected.tolist() if texts else _close(array, expected, room)):
            return f"{name} is {array.ravel()[:8]}, expected {expected.ravel()[:8]}"
    return ""


def _close(array: Any, expected: Any, room: float) -> bool:
    numbers = expected.astype(float)
    scale = max(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0), 1.0)
    return np.allclose(array.astype(float), numbers, room, room * scale, equal_nan=True)


def _room(graph: Graph) -> float:
    """The relative tolerance for the narrowest type of floats in a graph."""
    types = {value.type.dtype for value in graph.values() if isinstance(value.type, TensorType)}
    return 2e-2 if DType.BFLOAT16 in types else 2e-3 if DType.FLOAT16 in types else 2e-4


def _outcome(run: Any) -> dict[str, Any] | str:
    """The arrays that a run returns, or its error as text that begins with the class."""
    try:
        return {name: np.asarray(array) for name, array in run().items()}
    except LatheError as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    part, parts, first = int(sys.argv[1]), int(sys.argv[2]), "--first" in sys.argv
    operators: set[str] = set()
    for sized in list(sized_graphs(first))[part::parts]:
        nodes = [*sized.graph.nodes, *run_passes(sized.graph.clone(), OPTIONS)[0].nodes]
        operators |= {node.op for node in nodes}
        room = _room(sized.graph)
        with lathe.compile(sized.graph.clone(), tune="off", threads=1, new_shapes="wait") as session:
            for feeds in sized.feeds:
                shapes = {name: array.shape for name, array in feeds.items()}
                print(f"run {sized.label}: {shapes}", flush=True)
                wrong = difference(lambda: session.run(feeds), lambda: interpret(sized.graph, feeds), room)  # noqa: B023
                if wrong:
                    print(f"WRONG: {wrong}", flush=True)
    print("operators:", *sorted(operators))


if __name__ == "__main__":
    main()
