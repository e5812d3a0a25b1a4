"""The passes against every model of the ONNX backend suite that imports: optimized, it must still compute the same.

Each model runs unchanged, and with constants for all inputs but the first, where passes find most rewrites.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from lathe.core.errors import LatheError
from lathe.core.frontends.onnx import load
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import TensorType
from lathe.core.ops.opdef import registry
from lathe.core.passes.pipeline import optimize
from lathe.core.reference import interpret

pytestmark = pytest.mark.slow


def models() -> Iterator[tuple[str, Graph, dict[str, Any]]]:
    """Name, graph and inputs of every node model that Lathe imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite computes its expected values with overflows
        from onnx.backend.test.loader import load_model_tests

        cases = load_model_tests(kind="node")
    for case in cases:
        try:
            graph = load(case.model.SerializeToString())
        except LatheError:
            continue
        if any(registry.get(node.op).pure is False and node.attrs.get("seed") is None for node in graph.nodes):
            continue  # other numbers at every run
        yield case.name, graph, dict(zip((v.name for v in graph.inputs), case.data_sets[0][0], strict=False))


def with_constants(graph: Graph, feeds: Mapping[str, Any]) -> Graph:
    """A copy whose inputs, all but the first, are constants where they are tensors."""
    graph = graph.clone()
    for value in graph.inputs[1:]:
        if isinstance(value.type, TensorType) and isinstance(feeds[value.name], np.ndarray):
            value.type = TensorType(value.type.dtype, feeds[value.name].shape)
            graph.constants[value] = feeds[value.name]
    graph.inputs = [value for value in graph.inputs if value not in graph.constants]
    return graph


def assert_equal_results(name: str, expected: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    assert list(got) == list(expected), name
    for key, array in expected.items():
        if not isinstance(array, np.ndarray):
            continue
        assert (got[key].dtype, got[key].shape) == (array.dtype, array.shape), f"{name}: {key}"
        if array.dtype.kind in "fV":
            narrow = array.dtype.itemsize < 4
            pair = (got[key].astype(np.float64), array.astype(np.float64))
            np.testing.assert_allclose(*pair, rtol=1e-2 if narrow else 1e-5, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(got[key], array, err_msg=name)


def test_optimized_models_compute_the_same() -> None:
    compared = 0
    for name, graph, feeds in models():
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                expected = interpret(graph, feeds)
            except (LatheError, KeyError):
                continue  # tests of the operators cover this
            for variant in (graph, with_constants(graph, feeds)):
                left = {value.name: feeds[value.name] for value in variant.inputs}
                assert_equal_results(name, expected, interpret(optimize(variant)[0], left))
        compared += 1
    assert compared > 1000
