"""Exports one model of the suite to ONNX and imports it again: same graph, valid file, same results in ONNX Runtime."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx

from lathe.core.frontends.export import export
from lathe.core.frontends.onnx import load
from lathe.core.ir.equality import difference
from lathe.core.ir.graph import Graph
from lathe.core.passes.pipeline import optimize
from tests.core.conformance.models import SuiteModel, suite_models
from tests.onnx_runtime import REFUSALS, plain_session


def check_round_trip(name: str) -> None:
    """A model that is imported, exported and imported again must be the same graph."""
    graph = load(suite_models()[name].read())
    data = export(graph)
    check_valid(data)
    assert difference(graph, load(data)) == "", name


def check_optimized(name: str) -> Graph:
    """The optimized graph exports to a valid model that imports."""
    graph, _ = optimize(load(suite_models()[name].read()))
    data = export(graph)
    check_valid(data)
    return load(data)


def check_valid(data: bytes) -> None:
    onnx.checker.check_model(onnx.ModelProto.FromString(data))


def check_answers(name: str, *, optimized: bool) -> bool:
    """Check ONNX Runtime's outputs for the exported model against those for the suite's model, or the expected ones.

    False if it refuses the suite's model, so that no comparison is possible.
    """
    model = suite_models()[name]
    graph = load(model.read())
    data = export(optimize(graph)[0] if optimized else graph)
    inputs, expected = model.data()
    given = feeds(model, inputs)
    try:
        theirs = answers(model.read(), given)
    except REFUSALS:
        return False
    ours = answers(data, given)
    try:
        assert_similar(ours, theirs, model.tolerances)
    except AssertionError:
        assert_similar(ours, expected, model.tolerances)
    return True


def answers(data: bytes, given: dict[str, Any]) -> list[Any]:
    """ONNX Runtime's outputs for a model, without optimizations."""
    session = plain_session(data)
    used = {port.name: given[port.name] for port in session.get_inputs()}
    return list(session.run(None, used))


def feeds(model: SuiteModel, inputs: list[Any]) -> dict[str, Any]:
    names = [info.name for info in onnx.ModelProto.FromString(model.read()).graph.input]
    given = (x if x is None or isinstance(x, list) else np.asarray(x) for x in inputs)
    return dict(zip(names, given, strict=False))


def assert_similar(result: Any, expected: Any, tolerances: tuple[float, float]) -> None:
    """Check types, shapes, and elements within the suite's tolerances or the rounding error of the largest element.

    A sum of terms that cancel is known up to the rounding of its terms: the zeros of a Fourier transform are zeros up
    to the rounding of its other elements.
    """
    if isinstance(expected, list):
        assert len(result) == len(expected)
        for pair in zip(result, expected, strict=True):
            assert_similar(*pair, tolerances)
    elif expected is None:
        assert result is None
    else:
        got, want = np.asarray(result), np.asarray(expected)
        assert got.shape == want.shape
        if got.dtype == object or want.dtype == object:
            assert got.astype(str).tolist() == want.astype(str).tolist()
        else:
            assert got.dtype == want.dtype
            relative, absolute = tolerances
            np.testing.assert_allclose(_wide(got), _wide(want), relative, max(absolute, _rounding(want)))


def _rounding(array: Any) -> float:
    """The rounding error of the largest finite element; 0 of integers."""
    if array.dtype.kind != "f" or not array.size:
        return 0.0
    finite = np.abs(array[np.isfinite(array)])
    return float(np.spacing(finite.max())) if finite.size else 0.0


def _wide(array: Any) -> Any:
    """float64, so that element types which NumPy lacks compare too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return array if array.dtype.kind in "cb" else array.astype(np.float64)
