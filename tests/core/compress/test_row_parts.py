"""`RowParts`: the same histograms from parts of batches, and batches that are not divided."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import lathe
from lathe.core.compress import row_parts
from lathe.core.compress.calibration import collect_histograms, collect_moments
from lathe.core.compress.row_parts import RowParts
from lathe.core.errors import DataError
from lathe.core.ir.graph import Graph

ROW = 3 * 4 * 4  # bytes of a value for one row


def model(*nodes: Any) -> Graph:
    """A graph from `x` [n, 3, 4] to `y` of the same rank."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3, 4]) for name in "xy")
    made = helper.make_model(helper.make_graph(list(nodes), "g", [x], [y]), opset_imports=[helper.make_opsetid("", 21)])
    return lathe.load(bytes(made.SerializeToString()))


BY_ROWS = (helper.make_node("Sin", ["x"], ["s"]), helper.make_node("Neg", ["s"], ["y"]))
MIXING = (helper.make_node("ReduceMax", ["x"], ["s"], keepdims=1), helper.make_node("Sub", ["x", "s"], ["y"]))


def sizes(graph: Graph, names: list[str], batch: dict[str, Any]) -> list[int]:
    return [len(part["x"]) for part in RowParts(graph, names).of(batch)]


def test_parts_keep_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((10, 3, 4), np.float32)
    assert sizes(model(*BY_ROWS), ["s", "x"], {"x": x}) == [10]
    monkeypatch.setattr(row_parts, "MOST_BYTES", 8 * ROW)
    assert sizes(model(*BY_ROWS), ["s"], {"x": x}) == [8, 2]
    assert sizes(model(*BY_ROWS), ["s", "x"], {"x": x}) == [4, 4, 2]
    monkeypatch.setattr(row_parts, "MOST_BYTES", ROW - 1)
    assert sizes(model(*BY_ROWS), ["s"], {"x": x[:3]}) == [1, 1, 1]


def test_rows_that_depend_on_each_other_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_parts, "MOST_BYTES", ROW)
    assert sizes(model(*MIXING), ["s", "x"], {"x": np.zeros((10, 3, 4), np.float32)}) == [10]


def test_inputs_that_do_not_fit_are_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_parts, "MOST_BYTES", ROW)
    for batch in ({}, {"x": "text"}, {"x": np.float32(1)}):
        assert list(RowParts(model(*BY_ROWS), ["s"]).of(batch)) == [batch]


def test_histograms_and_moments_are_those_of_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    batches = [{"x": random.standard_normal((count, 3, 4)).astype(np.float32)} for count in (9, 1, 6)]
    graph = model(*BY_ROWS)

    def collected() -> tuple[np.ndarray, np.ndarray]:
        histogram = collect_histograms(graph, ["s"], batches, threads=1)["s"]
        (moments,) = collect_moments(graph, {"s": 4}, batches, threads=1)
        return histogram.counts, moments["s"].gram

    counts, gram = collected()
    monkeypatch.setattr(row_parts, "MOST_BYTES", 2 * ROW)
    again, again_gram = collected()
    np.testing.assert_array_equal(again, counts)
    np.testing.assert_allclose(again_gram, gram, rtol=1e-5)
    batches[1]["x"][0, 0, 0] = np.nan
    with pytest.raises(DataError, match="batch 1"):
        collected()
