"""Choosing inputs and target: defaults, casts, classes, and errors."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lathe.core.errors import DataError
from lathe.core.ir.types import DType
from lathe.core.train.data import Column, Dataset, from_arrays, open_dataset, select, split

N = 12
Y = np.arange(N) % 3
ROWS = np.array([5, 0])


def table(**columns: Any) -> Dataset:
    return from_arrays({name: np.asarray(column) for name, column in columns.items()})


def test_an_only_column_is_x_and_the_target_has_usual_names() -> None:
    for name in ("y", "target", "label", "labels"):
        examples = select(table(**{name: Y, "pixels": np.ones((N, 2, 2))}))
        assert list(examples.inputs) == ["x"] and examples.targets.tolist() == Y.tolist()
    assert select(table(a=Y, b=np.ones(N))).target.dtype is DType.FLOAT32  # otherwise it is the last one


def test_scalar_columns_are_joined_and_others_stay_separate() -> None:
    examples = select(table(a=np.arange(N), b=np.arange(N) / 2, c=np.ones(N, bool), y=Y))
    np.testing.assert_array_equal(examples.take(ROWS)["x"], [[5, 2.5, 1], [0, 0, 1]])
    assert str(examples.inputs["x"]) == "float32[3]"
    apart = select(table(image=np.zeros((N, 4, 4), np.uint8), tokens=np.zeros((N, 7), np.int64), y=Y))
    assert {name: str(column) for name, column in apart.inputs.items()} == {"image": "uint8[4,4]", "tokens": "int64[7]"}


def test_chosen_inputs_by_name() -> None:
    dataset = table(a=np.arange(N), b=np.arange(N) * 2.0, c=np.zeros((N, 4)), y=Y)
    examples = select(dataset, {"u": ["b", "a"], "v": "c", "w": "a"})
    taken = examples.take(ROWS)
    assert taken["u"].tolist() == [[10, 5], [0, 0]] and taken["v"].dtype == np.float32 and taken["w"].shape == (2, 1)


@pytest.mark.parametrize(
    ("column", "task", "dtype", "shape"),
    [
        (Y, "auto", DType.INT64, ()), (Y == 1, "auto", DType.INT64, ()), (Y.astype("<U3"), "auto", DType.INT64, ()),
        (Y / 2, "auto", DType.FLOAT32, (1,)), (Y.astype(float), "classes", DType.INT64, ()),
        (Y, "numbers", DType.FLOAT32, (1,)), (np.zeros((N, 2)), "auto", DType.FLOAT32, (2,)),
        (np.zeros((N, 4, 4), np.uint8), "auto", DType.INT64, (4, 4)),
    ],
)  # fmt: skip
def test_targets(column: Any, task: Any, dtype: DType, shape: tuple[int, ...]) -> None:
    examples = select(table(x=np.zeros((N, 2)), y=column), task=task)
    assert examples.target.dtype is dtype and examples.target.shape == shape
    assert examples.targets.dtype == dtype.numpy and examples.targets.shape == (N, *shape)
    assert (examples.classes is not None) == (dtype is DType.INT64)


def test_classes_of_a_model_that_is_finetuned() -> None:
    words = np.array(["cat", "dog"] * 6)
    assert select(table(x=Y, y=words), classes=["emu", "dog", "cat"]).targets.tolist() == [2, 1] * 6
    assert select(table(x=Y, y=Y), classes=list("0123456789")).classes == tuple("0123456789")
    with pytest.raises(DataError, match="row 2: column 'y': the class is 2, expected 0 to 1"):
        select(table(x=Y, y=Y), classes=["no", "yes"])


REFUSED = {
    "no column": ({"inputs": {"x": "z"}}, "column 'z': there is no such column, only 'x', 't', 'y'"),
    "no target": ({"target": "z"}, "column 'z': there is no such column"),
    "text": ({"inputs": {"x": "t"}}, "column 't': is text, which input 'x' cannot take"),
    "joined": (
        {"inputs": {"x": ["y", "x"]}},
        r"column 'x': is float64\[2,2\], but input 'x' joins columns of one number",
    ),
    "nothing": ({"inputs": {}}, r"inputs: expected at least one"),
    "no origin": ({"inputs": {"x": []}}, "input 'x' names no column"),
    "reserved": ({"inputs": {"target": "x"}}, "none called 'target'"),
    "shape": (
        {"inputs": {"x": "x"}, "shapes": {"x": [3]}},
        r"rows of input 'x' are float32\[2,2\], but .* float32\[3\]",
    ),
    "shape of": ({"inputs": {"x": "x"}, "shapes": {"u": [3]}}, "shapes or layouts name 'u', which is not an input"),
    "layout": (
        {"inputs": {"x": "x"}, "layouts": {"x": "CHW"}},
        r"input 'x' is float32\[2,2\], which is not an image CHW",
    ),
    "numbers": (
        {"target": "t", "inputs": {"x": "x"}, "task": "numbers"},
        r"column 't': expected a target of numbers, got string",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_columns_that_do_not_fit_are_refused(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        select(table(x=np.zeros((N, 2, 2)), t=np.array(["a"] * N), y=Y), **options)


@pytest.mark.parametrize("column", [[-1] * N, [0.5] * N, [1e12] * N, [np.nan] * N])
def test_numbers_that_are_no_classes(column: Any) -> None:
    with pytest.raises(DataError, match="row 0: column 'y': the class is"):
        select(table(x=Y, y=np.array(column)), task="classes")


def test_quantities_are_distinguished_from_classes() -> None:
    prices = table(x=Y, y=np.arange(N) * 10_000)
    with pytest.raises(
        DataError, match=r'row 7: .*class is 70000, expected 0 to 65535; `task = "numbers"` selects regression'
    ):
        select(prices)
    assert select(prices, task="numbers").targets[7] == 70_000


def test_another_shape_makes_an_image() -> None:
    examples = select(table(x=np.arange(N * 12).reshape(N, 12), y=Y), shapes={"x": [3, 2, 2]})
    assert examples.inputs["x"].layout == "CHW" and examples.take(ROWS)["x"].shape == (2, 3, 2, 2)
    plain = select(table(x=np.zeros((N, 5, 3)), y=Y), layouts={"x": ""})
    assert plain.inputs["x"].layout == ""


def test_examples_get_the_types_of_a_given_model() -> None:
    examples = select(table(x=np.arange(N * 4, dtype=np.uint8).reshape(N, 4), y=Y))
    floats = examples.like({"x": Column("x", DType.FLOAT32, (1, 2, 2))})
    assert floats.take(ROWS)["x"].dtype == np.float32 and floats.inputs["x"].layout == "CHW"
    with pytest.raises(DataError, match=r"inputs are \['x'\], but the model takes \['a'\]"):
        examples.like({"a": Column("a", DType.FLOAT32, (4,))})
    last = select(table(x=np.zeros((N, 5, 6, 3), np.uint8), y=Y))
    with pytest.raises(DataError, match=r"rows of input 'x' are uint8\[5,6,3\], but the model takes float32\[3,5,6\]"):
        last.like({"x": Column("x", DType.FLOAT32, (3, 5, 6))})
    with pytest.raises(DataError, match=r"rows of input 'x' are float32\[1,2,2\], but the model takes uint8\[4\]"):
        floats.like({"x": Column("x", DType.UINT8, (4,))})


def test_too_large_for_float32() -> None:
    with pytest.raises(DataError, match="row 3: column 'b': the number is inf, expected a finite one"):
        select(table(a=np.zeros(N), b=np.where(np.arange(N) == 3, 1e300, 0), y=Y)).take(np.arange(N))


def test_sequences_are_filled_up_or_cut(tmp_path: Path) -> None:
    lists = [[7, 8, 9][: 1 + i % 3] for i in range(N)]
    pq.write_table(pa.table({"words": lists, "y": Y}), tmp_path / "data")
    dataset = open_dataset(tmp_path / "data")
    examples = select(dataset)
    assert str(examples.inputs["x"]) == "int64[3]"
    assert examples.take(np.array([0, 1, 2]))["x"].tolist() == [[7, 0, 0], [7, 8, 0], [7, 8, 9]]
    assert select(dataset, shapes={"x": [2]}).take(np.array([2]))["x"].tolist() == [[7, 8]]
    assert examples.like({"x": Column("x", DType.INT64, (5,))}).take(np.array([1]))["x"].tolist() == [[7, 8, 0, 0, 0]]
    pq.write_table(pa.table({"words": [*lists[1:], []], "y": Y}), tmp_path / "data")
    with pytest.raises(DataError, match="row 11: column 'words': the sequence is empty"):
        select(open_dataset(tmp_path / "data"))


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=60), st.floats(0, 0.6), st.floats(0, 0.3), st.integers(0, 2**32)
)
def test_every_row_is_in_one_part(labels: list[int], held_out: float, validation: float, seed: int) -> None:
    examples = select(table(x=np.zeros((len(labels), 1)), y=np.array(labels)))
    parts = split(examples, held_out, validation, seed=seed)
    assert sorted([*parts.train, *parts.validation, *parts.test]) == list(range(len(labels)))
    assert len(parts.test) == round(held_out * len(labels)) and len(parts.validation) == round(validation * len(labels))


@given(st.lists(st.one_of(st.integers(-(2**40), 2**40), st.none(), st.floats(-1e30, 1e30)), min_size=1, max_size=20))
def test_numbers_survive_csv(tmp_path_factory: pytest.TempPathFactory, values: list[Any]) -> None:
    path = tmp_path_factory.mktemp("csv") / "data"
    path.write_text("".join(["v,y\n", *(f"{'' if value is None else value},0\n" for value in values)]))
    found = open_dataset(path, "csv").take(np.arange(len(values)), ["v"])["v"]
    if all(value is None for value in values):
        assert found.tolist() == values
    else:
        np.testing.assert_array_equal(found.astype(float), [np.nan if value is None else value for value in values])


def one_column_each(path: Path, format: str) -> Path:
    """A file with the columns a, b and y of 1000 small whole numbers, whose arrays in memory have one byte per row."""
    columns = {name: (np.arange(1000) % 7).astype(np.uint8) for name in "aby"}
    if format == "npz":
        np.savez(path / "data.npz", **columns)  # mapped: it uses no memory
    elif format == "parquet":
        pq.write_table(pa.table(columns), path / "data.parquet")
    else:
        np.savetxt(path / "data.csv", np.stack(list(columns.values()), 1), "%d", ",", header="a,b,y", comments="")
    return path / f"data.{format}"


@pytest.mark.parametrize("format", ["npz", "csv", "parquet"])
def test_joined_columns_and_targets_count_towards_the_memory(tmp_path: Path, format: str) -> None:
    file, columns = one_column_each(tmp_path, format), 0 if format == "npz" else 3000
    joined = 8000  # bytes of float32 [1000, 2]
    for task, target in (("classes", 8000), ("numbers", 4000)):  # bytes of int64 [1000] and float32 [1000, 1]
        needed = columns + joined + target
        select(open_dataset(file, memory=needed), task=task).take(ROWS)
        with pytest.raises(DataError, match=r"data.*: needs \d+ bytes of memory, more than the \d+ bytes left"):
            select(open_dataset(file, memory=needed - 1), task=task).take(ROWS)


def test_memory_of_examples_is_free_when_they_are(tmp_path: Path) -> None:
    dataset = open_dataset(one_column_each(tmp_path, "npz"), memory=16_000)
    for _ in range(3):
        select(dataset).take(ROWS)
        gc.collect()
    select(dataset).take(ROWS)
