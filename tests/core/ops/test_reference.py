"""For every case the reference operator agrees with the oracle, and type inference with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.ir.dim import SymDim, symbol
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_graph
from tests.core.one_node import lathe_run
from tests.core.ops.cases import CASES, Case
from tests.core.ops.harness import assert_close, graph_of, oracle, run, run_lathe
from tests.core.ops.numeric_cases import NUMERIC_CASES

DATA_DEPENDENT = ("NonZero", "Compress", "Unique", "Range", "NonMaxSuppression")
ALL_CASES = [*CASES, *NUMERIC_CASES]
every_case = pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.label)


@every_case
def test_reference_agrees_with_the_oracle(case: Case) -> None:
    for ours, theirs in zip(run_lathe(case), oracle(case), strict=True):
        assert DType.from_numpy(ours.dtype) == DType.from_numpy(np.asarray(theirs).dtype)
        assert_close(ours, theirs, case.tolerance)


@every_case
def test_inference_agrees_with_the_results(case: Case) -> None:
    """Inferred types, with known and with hidden shapes, are those of the results. Bound parameters change nothing."""
    results, bound = run_lathe(case), run_lathe(case, bind=True)
    for constant, attribute in zip(results, bound, strict=True):
        assert_close(constant, attribute, 0)
    check_types(case, graph_of(case), results)
    check_types(case, graph_of(case, bind=True), bound)
    check_unknown_ranks(case, results)
    check_symbolic_batch(case)


def check_types(case: Case, graph: Graph, results: list[Any]) -> None:
    """The inferred types are those of the results."""
    for value, array in zip(graph.outputs, results, strict=True):
        assert value.dtype == DType.from_numpy(array.dtype)
        assert value.tensor.rank == array.ndim
        known = [(dim, size) for dim, size in zip(value.shape, array.shape, strict=True) if isinstance(dim, int)]
        assert all(dim == size for dim, size in known)
        assert len(known) == array.ndim or case.op in DATA_DEPENDENT


def check_unknown_ranks(case: Case, expected: list[Any]) -> None:
    """With the shapes of one input or of all hidden, inferred types stay correct and results equal."""
    count = len(graph_of(case).inputs)
    for hidden in {*((index,) for index in range(count)), tuple(range(count))}:
        graph = graph_of(case)
        for value in (*(graph.inputs[index] for index in hidden), *graph.outputs):
            value.type = TensorType(value.dtype, None)
        infer_graph(graph)
        for value, array, result in zip(graph.outputs, expected, run(graph, case.inputs), strict=True):
            assert value.dtype == DType.from_numpy(array.dtype)
            assert_close(result, array, 0)
            if value.tensor.shape is not None:
                assert all(n == d for n, d in zip(array.shape, value.shape, strict=True) if isinstance(d, int))


def check_symbolic_batch(case: Case) -> None:
    """With a symbol as leading extent, inference gives the types that it gives with the number."""
    first = next((i for i in range(len(case.inputs)) if _has_batch(case, i)), None)
    if first is None:
        return
    extent = case.inputs[first].shape[0]
    shapes = {
        i: (symbol("n"), *array.shape[1:])
        for i, array in enumerate(case.inputs)
        if _has_batch(case, i) and array.shape[0] == extent and array.ndim == case.inputs[first].ndim
    }
    symbolic, concrete = graph_of(case, shapes), graph_of(case)
    for value, number in zip(symbolic.outputs, concrete.outputs, strict=True):
        if value.tensor.shape is not None and value.tensor.symbols <= {"n"} and number.tensor.is_static:
            assert value.tensor.substitute({"n": extent}) == number.type


def _has_batch(case: Case, index: int) -> bool:
    array = case.inputs[index]
    return index not in case.param_indices and array is not None and array.ndim > 0 and array.shape[0] > 1


def test_every_operator_of_these_families_has_a_case() -> None:
    modules = (
        "activation",
        "creation",
        "detection",
        "einsum",
        "elementwise",
        "indexing",
        "logic",
        "matmul",
        "movement",
        "order",
        "patches",
        "qlinear",
        "quantize",
        "recurrent",
        "reduce",
        "sampling",
        "signal",
        "slicing",
        "softmax",
    )
    operators = [registry.get(name) for name in registry.names()]
    standard = [op for op in operators if op.domain != "lathe"]  # other tests cover Lathe's own operators
    ours = {op.name for op in standard if type(op).__module__.split(".")[-1] in modules}
    assert ours - {case.op for case in ALL_CASES} == {"Scatter"}


def test_data_dependent_extents_are_symbols() -> None:
    case = next(case for case in CASES if case.op == "NonZero")
    (value,) = graph_of(case).outputs
    assert value.shape[0] == 2
    assert isinstance(value.shape[1], SymDim)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("ReduceMean", [(2, 0)], {"axes": (1,)}),
        ("LayerNormalization", [(2, 0), (0,)], {}),
        ("RMSNormalization", [(2, 0), (0,)], {}),
        ("MeanVarianceNormalization", [(0, 3, 2, 2)], {}),
        ("GlobalAveragePool", [(1, 2, 0, 4)], {}),
        ("InstanceNormalization", [(1, 2, 0), (2,), (2,)], {}),
        ("BatchNormalization", [(0, 2), (2,), (2,), (2,), (2,)], {"training_mode": 1}),
    ],
)
def test_means_of_nothing(op: str, inputs: list[tuple[int, ...]], attrs: dict[str, Any]) -> None:
    """NaN as IEEE 754 has it, without a warning (which would fail this test)."""
    arrays = [np.ones(shape, np.float32) for shape in inputs]
    outputs = 3 if op == "BatchNormalization" else 1
    results = lathe_run(op, arrays, attrs, outputs)
    assert all(np.isnan(array).all() for array in results)
