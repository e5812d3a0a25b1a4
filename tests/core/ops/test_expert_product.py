"""ExpertProduct: shapes, errors and rows, against products with one matrix at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import lathe
from lathe.core.errors import FeedError, ModelError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import TensorType, parse_type
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import Infer, MixesRows
from tests.onnx_runtime import plain_session

WEIGHTS = np.sin(np.arange(5 * 7 * 6, dtype=np.float32) ** 2).reshape(5, 7, 6)


def graph_of(*types: str) -> Graph:
    graph = Graph("experts")
    b = Builder(graph)
    parsed = [parse_type(text) for text in types]
    assert all(isinstance(type_, TensorType) for type_ in parsed)
    inputs = [b.input(name, type_) for name, type_ in zip(("x", "expert", "weights"), parsed, strict=True)]  # type: ignore[arg-type]
    graph.outputs = [b("ExpertProduct", *inputs)]
    return graph


def by_rows(x: Any, expert: Any) -> Any:
    """The products, one row after the other."""
    leading = np.broadcast_shapes(x.shape[:-1], expert.shape)
    rows, chosen = np.broadcast_to(x, (*leading, 6)).reshape(-1, 6), np.broadcast_to(expert, leading).ravel()
    found = np.array([WEIGHTS[e] @ row for row, e in zip(rows, chosen, strict=True)], np.float32)
    return found.reshape(*leading, 7)


@pytest.mark.parametrize(
    ("x", "expert"), [((9, 6), (9,)), ((2, 4, 1, 6), (2, 4, 3)), ((6,), (4,)), ((3, 6), ()), ((2, 0, 6), (2, 0))]
)
@pytest.mark.parametrize("run", ["reference", "ONNX Runtime"])
def test_each_row_meets_the_matrix_of_its_expert(x: tuple[int, ...], expert: tuple[int, ...], run: str) -> None:
    rng = np.random.default_rng(3)
    rows, chosen = rng.standard_normal(x).astype(np.float32), rng.integers(-5, 5, expert)
    x_type, expert_type = (",".join(map(str, shape)) for shape in (x, expert))
    graph = graph_of(f"float32[{x_type}]", f"int64[{expert_type}]", "float32[5,7,6]")
    feeds = {"x": rows, "expert": np.asarray(chosen), "weights": WEIGHTS}
    if run == "reference":
        (found,) = lathe.interpret(graph, feeds).values()
    else:
        onnx.checker.check_model(model := onnx.load_from_string(lathe.export(graph)))
        (found,) = plain_session(model.SerializeToString()).run(None, feeds)
    assert found.dtype == np.float32
    expected = by_rows(rows, np.asarray(chosen)) if rows.size else np.zeros((*expert, 7), np.float32)
    np.testing.assert_allclose(found, expected, 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (("float32[n,5]", "int64[n]", "float32[5,7,6]"), "expected \\[..., in\\] and \\[experts, out, in\\]"),
        (("float32[n,6]", "int64[n]", "float32[5,6]"), "expected \\[..., in\\]"),
        (("float32[n,6]", "float32[n]", "float32[5,7,6]"), "expected int32 or int64"),
        (("float32[n,6]", "int64[n]", "float64[5,7,6]"), "inputs must have one element type"),
        (("float32[3,6]", "int64[2]", "float32[5,7,6]"), "broadcast"),
    ],
)
def test_inputs_that_do_not_fit(types: tuple[str, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        graph_of(*types)


@pytest.mark.parametrize("expert", [5, -6])
def test_an_expert_out_of_range_is_refused(expert: int) -> None:
    feeds = {"x": np.ones((2, 6), np.float32), "expert": np.array([0, expert]), "weights": WEIGHTS}
    with pytest.raises(FeedError, match="out of range"):
        lathe.interpret(graph_of("float32[n,6]", "int64[n]", "float32[5,7,6]"), feeds)


@pytest.mark.parametrize(
    ("types", "axes", "expected"),
    [
        (("float32[n,6]", "int64[n]", "float32[5,7,6]"), (0, 0, None), 0),
        (("float32[3,n,1,6]", "int64[n,2]", "float32[5,7,6]"), (1, 0, None), 1),
        (("float32[6]", "int64[n]", "float32[5,7,6]"), (None, 0, None), 0),
        (("float32[n,6]", "int64[]", "float32[5,7,6]"), (0, None, None), 0),
        (("float32[3,6]", "int64[3]", "float32[5,n,6]"), (None, None, 1), 1),
        (("float32[3,6]", "int64[3]", "float32[n,7,6]"), (None, None, 0), None),
        (("float32[n,6]", "int64[4]", "float32[5,7,6]"), (0, None, None), None),
        (("float32[n,3,6]", "int64[n]", "float32[5,7,6]"), (0, 0, None), None),
    ],
)
def test_rows(types: tuple[str, ...], axes: Any, expected: int | None) -> None:
    """Rows that the rule declares independent are; None stands for rows that mix."""
    graph = graph_of(*types)
    op = registry.get("ExpertProduct")
    found = op.rows(Infer(op, graph.nodes[0], {}), axes)
    if expected is None:
        assert isinstance(found, MixesRows)
        return
    assert found == [expected]
    inputs = [_sample(value.tensor) for value in graph.inputs]
    (whole,) = _run(graph, inputs)
    for row in range(3):
        own = [x if axis is None else x.take([row], axis) for x, axis in zip(inputs, axes, strict=True)]
        np.testing.assert_allclose(_run(graph, own)[0], whole.take([row], expected), 1e-5, 1e-6)


def _sample(type_: TensorType) -> Any:
    shape = type_.evaluate({"n": 3})
    rng = np.random.default_rng(4)
    return rng.integers(0, 5, shape) if type_.dtype.is_integer else rng.standard_normal(shape).astype(np.float32)


def _run(graph: Graph, inputs: list[Any]) -> list[Any]:
    feeds = {value.name: array for value, array in zip(graph.inputs, inputs, strict=True)}
    return list(lathe.interpret(graph, feeds).values())
