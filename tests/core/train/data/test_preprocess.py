"""Preprocessing in front of a model: the same for requests to the served model as for training rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from sklearn.preprocessing import StandardScaler

from lathe.core.errors import DataError
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.ir.verify import verify
from lathe.core.ops.opdef.terms import Writer
from lathe.core.reference import interpret
from lathe.core.train.data import Column, Examples, from_arrays, select
from lathe.core.train.data.preprocess import Preprocess, Resize, Scale, Standardize, Step, plan, taking

N = 50


def examples(**arrays: Any) -> Examples:
    return select(from_arrays({**arrays, "y": np.arange(N) % 2}))


def integers(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).integers(0, 255, (N, *shape), np.uint8)


def doubling(rows: dict[str, Column]) -> Graph:
    """A model that doubles its inputs, so that its outputs show the results of preprocessing."""
    graph = Graph("doubling")
    writer = Writer(graph)
    inputs = [writer.input(name, TensorType(row.dtype, (symbol("batch"), *row.shape))) for name, row in rows.items()]
    graph.outputs = [(each * writer.array(np.float32(2), name="two")).value for each in inputs]
    return graph


def seen(given: Examples, *steps: Step, rows: Any = None) -> Any:
    """All rows after the steps, as the model gets them."""
    ready = plan(steps, given, np.arange(N) if rows is None else rows)
    graph = ready.write(doubling(ready.rows))
    verify(graph, "preprocess")
    feeds = given.take(np.arange(N))
    del feeds["target"]
    (doubled,) = interpret(graph, feeds).values()
    return doubled / 2


def test_images_come_channels_first_and_graphs_take_them_raw() -> None:
    x = integers(5, 6, 3)
    given = examples(x=x)
    ready = plan([Scale(factor=1 / 255)], given, np.arange(N))
    assert ready.rows["x"].shape == (3, 5, 6) and ready.rows["x"].dtype is DType.FLOAT32
    graph = ready.write(doubling(ready.rows))
    assert (
        str(graph.inputs[0]) == "%x: uint8[batch,5,6,3]"
        and graph.outputs[0].type == doubling(ready.rows).outputs[0].type
    )
    np.testing.assert_allclose(seen(given, Scale(factor=1 / 255)), x.transpose(0, 3, 1, 2) / 255, rtol=1e-6)


def test_constants_have_names_of_their_own() -> None:
    given = examples(x=integers(4, 4))
    ready = plan([Standardize(), Scale(offset=1.0)], given, np.arange(N))
    graph = ready.write(doubling(ready.rows))
    names = [value.name for value in graph.constants]
    assert "two" in names and all(name.startswith("preprocess.") for name in names if name != "two")


def test_standardize_as_scikit_learn_by_the_training_rows_alone() -> None:
    x = np.random.default_rng(0).normal(3, 5, (N, 4)).astype(np.float32)
    x[:, 2] = 7
    rows = np.arange(0, N, 2)
    found = seen(examples(x=x), Standardize(), rows=rows)
    np.testing.assert_allclose(found, StandardScaler().fit(x[rows]).transform(x), atol=1e-5)


def test_standardize_by_channel_after_other_steps() -> None:
    x = integers(3, 8, 6)
    found = seen(examples(x=x), Scale(factor=0.5), Resize(height=4, width=3), Standardize())
    assert found.shape == (N, 3, 4, 3)
    np.testing.assert_allclose(found.mean(axis=(0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(found.std(axis=(0, 2, 3)), 1, atol=1e-5)


def test_statistics_over_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = examples(x=integers(3, 8, 6))
    whole = plan([Standardize()], given, np.arange(N)).steps["x"][0]
    monkeypatch.setattr("lathe.core.train.data.preprocess._CHUNK_BYTES", 1000)
    pieces = plan([Standardize()], given, np.arange(N)).steps["x"][0]
    assert isinstance(whole, Standardize) and isinstance(pieces, Standardize) and whole.mean and pieces.deviation
    np.testing.assert_allclose(pieces.mean or (), whole.mean)
    np.testing.assert_allclose(pieces.deviation, whole.deviation or ())


def test_statistics_may_be_given() -> None:
    x = integers(3, 4, 4)
    found = seen(examples(x=x), Standardize(mean=(1.0, 2.0, 3.0), deviation=(4.0,)))
    np.testing.assert_allclose(found, (x - np.array([1, 2, 3]).reshape(3, 1, 1)) / 4, rtol=1e-6)
    with pytest.raises(DataError, match=r"standardize: mean: expected 1 number or 1 per channel of \[3, 4"):
        seen(examples(x=x), Standardize(mean=(1.0, 2.0), deviation=(4.0,)))


def test_tokens_stay_integers_without_steps() -> None:
    given = examples(x=np.arange(N * 3).reshape(N, 3))
    assert plan([], given, np.arange(N)).rows["x"].dtype is DType.INT64
    assert plan([Scale()], given, np.arange(N)).rows["x"].dtype is DType.FLOAT32


def test_steps_of_one_input_among_several() -> None:
    given = examples(a=integers(4), b=integers(5))
    ready = plan([Scale(input="a", factor=0.5), Scale(offset=1.0)], given, np.arange(N))
    feeds = given.take(np.arange(N))
    a, b = interpret(ready.write(doubling(ready.rows)), {"a": feeds["a"], "b": feeds["b"]}).values()
    np.testing.assert_allclose(a / 2, feeds["a"] * 0.5 + 1)
    np.testing.assert_allclose(b / 2, feeds["b"] + 1.0)
    with pytest.raises(DataError, match="expected an input of a, b, got 'c'"):
        plan([Scale(input="c")], given, np.arange(N))


def test_resize_is_for_images() -> None:
    with pytest.raises(DataError, match=r"resize: expected an input of images, got 'x' uint8\[4\]"):
        plan([Resize(height=2, width=2)], examples(x=integers(4)), np.arange(N))


def test_the_same_model_takes_augmented_floats_while_training() -> None:
    given = examples(x=integers(5, 6))
    ready = plan([Standardize()], given, np.arange(N))
    served = ready.write(doubling(ready.rows))
    training = taking(served, {"x": Column("x", DType.FLOAT32, (5, 6))})
    assert served.inputs[0].dtype is DType.UINT8 and training.inputs[0].dtype is DType.FLOAT32
    verify(training, "taking floats")
    x = given.take(np.arange(N))["x"]
    (one,), (two,) = interpret(served, {"x": x}).values(), interpret(training, {"x": x.astype(np.float32)}).values()
    np.testing.assert_array_equal(one, two)
    assert taking(training, given.inputs).inputs[0].dtype is DType.UINT8
    with pytest.raises(DataError, match="input 'x': the model takes float32 only, got uint8"):
        taking(doubling(ready.rows), given.inputs)


def test_reading_the_shape_of_an_input_leaves_its_type_open() -> None:
    """As files have it that reshape to the number of rows."""
    given = examples(x=integers(5, 6))
    served = plan([Standardize()], given, np.arange(N)).write(doubling(plan([Standardize()], given, np.arange(N)).rows))
    (value,) = served.inputs
    shape = Node("Shape", [value], [], {}, "shape")
    shape.outputs = [Value("shape", TensorType(DType.INT64, (3,)), shape)]
    served.nodes.append(shape)
    served.outputs.append(shape.output)
    assert taking(served, {"x": Column("x", DType.FLOAT32, (5, 6))}).inputs[0].dtype is DType.FLOAT32


def test_steps_are_tables_of_recipes() -> None:
    adapter = TypeAdapter[Step](Preprocess)
    step = adapter.validate_json('{"kind": "standardize", "mean": [0.5], "deviation": [2]}')
    assert step == Standardize(mean=(0.5,), deviation=(2.0,))
