"""CSV and Parquet: the types of columns, and errors that name the place."""

from __future__ import annotations

import gzip
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_iris

from lathe.core.errors import DataError
from lathe.core.ir.types import DType
from lathe.core.train.data import Dataset, csv_file, open_dataset, select

IRIS = load_iris()
NAMES = [IRIS.target_names[label] for label in IRIS.target]


def csv(path: Path, text: str) -> Dataset:
    (path / "data").write_bytes(text.encode())
    return open_dataset(path / "data", name="flowers")


def parquet(path: Path, **columns: Any) -> Dataset:
    pq.write_table(pa.table(columns), path / "data", row_group_size=7)
    return open_dataset(path / "data", name="flowers")


def lines(header: bool = True, delimiter: str = ",") -> str:
    rows = [delimiter.join([*map(str, row), name]) for row, name in zip(IRIS.data.tolist(), NAMES, strict=True)]
    return "\n".join([delimiter.join("abcd") + delimiter + "species"] * header + rows) + "\n"


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_iris_as_csv(tmp_path: Path, header: bool, delimiter: str) -> None:
    dataset = csv(tmp_path, lines(header, delimiter))
    assert dataset.format == "csv" and len(dataset) == 150
    examples = select(dataset)
    assert examples.classes == ("setosa", "versicolor", "virginica")
    taken = examples.take(np.array([149, 0]))
    np.testing.assert_array_equal(taken["x"], IRIS.data[[149, 0]].astype(np.float32))
    assert taken["target"].tolist() == [2, 0]
    assert list(dataset.columns) == ([*"abcd", "species"] if header else [f"column{i}" for i in range(5)])


def test_iris_as_parquet(tmp_path: Path) -> None:
    columns = {name: IRIS.data[:, i] for i, name in enumerate("abcd")}
    dataset = parquet(tmp_path, **columns, species=pa.array(NAMES).dictionary_encode())
    examples = select(dataset, {"x": ["d", "a"]}, "species")
    np.testing.assert_array_equal(examples.take(np.array([3]))["x"], IRIS.data[[3]][:, [3, 0]].astype(np.float32))
    assert examples.targets.tolist() == IRIS.target.tolist()


def test_types_of_csv_columns(tmp_path: Path) -> None:
    dataset = csv(tmp_path, 'whole,number,word,gaps,"a, b",all\n1, 1.5 ,x,1,-3,\n-2,1e3,7,,4,\n\n3,nan,"y, z",2,5,\n')
    dtypes = [column.dtype for column in dataset.columns.values()]
    assert dtypes == [DType.INT64, DType.FLOAT64, DType.STRING, DType.FLOAT64, DType.INT64, DType.STRING]
    taken = dataset.take(np.arange(3))
    assert taken["word"].tolist() == ["x", "7", "y, z"] and taken["a, b"].tolist() == [-3, 4, 5]
    np.testing.assert_array_equal(taken["gaps"], [1, np.nan, 2])
    assert [column.note for column in dataset.columns.values()][2:4] == [
        "line 2: 'x' is not a number",
        "line 3 is empty",
    ]


WRONG = {
    "few fields": ("a,b\n1,2\n\n3\n", r"flowers: line 4: 1 fields, expected 2: '3'"),
    "many fields": ("a,b\n" + "1,2\n" * 70 + "1,2,3\n", r"flowers: line 72: 3 fields, expected 2: '1,2,3'"),
    "text": (
        "a,b\n1,2\n\nfive,3\n",
        r"column 'a': is text, which input 'x' cannot take \(line 4: 'five' is not a number\)",
    ),
    "missing": ("a,b\n1,2\n\n,3\n", r"flowers: line 4: column 'a': the number is missing or NaN"),
    "no class": ("a,b\n1,u\n2,\n", r"flowers: line 3: column 'b': the class is missing"),
    "infinite": ("a,b\n1,2\ninf,3\n", r"flowers: line 3: column 'a': the number is inf"),
    "twice": ("a,a\n1,2\n", r"flowers: line 1: 2 columns are named 'a'"),
    "long name": ("a" * 1001 + ",b\n1,2\n", "flowers: a column's name has 1001 characters, expected at most 1000"),
    "header only": ("a,b\n", r"flowers: there are no rows"),
    "no such": ("b,c\n1,2\n", r"flowers: column 'a': there is no such column, only 'b', 'c'"),
}


BLANK_LINES = {"": 0, "\n": 1, "\r\n\n": 2, "\ufeff": 0, "\ufeff\n\n": 2}  # starts of files: number of blank lines


@pytest.mark.parametrize("start", BLANK_LINES)
@pytest.mark.parametrize("name", WRONG)
def test_errors_name_line_and_column(tmp_path: Path, name: str, start: str) -> None:
    text, message = WRONG[name]
    shifted = re.sub(r"(?<=line )\d+", lambda line: str(int(line[0]) + BLANK_LINES[start]), message)
    with pytest.raises(DataError, match=shifted):
        select(csv(tmp_path, start + text), {"x": "a"}, None if "a" in text else "c").take(np.arange(2))


@pytest.mark.parametrize("start", BLANK_LINES)
@pytest.mark.parametrize("header", ["a,b\n", "0,1\n", ""])
def test_blank_lines_before_the_first_line_are_ignored(tmp_path: Path, start: str, header: str) -> None:
    dataset = csv(tmp_path, f"{start}{header}1,2.5\n\n3,\n")
    names = header.strip().split(",") if header else ["column0", "column1"]
    assert [(column.name, column.dtype.name) for column in dataset.columns.values()] == [
        (names[0], "INT64"),
        (names[1], "FLOAT64"),
    ]
    assert dataset.columns[names[1]].note == f"line {BLANK_LINES[start] + bool(header) + 3} is empty"
    assert dataset.sources[names[0]].take(np.arange(2)).tolist() == [1, 3]
    with pytest.raises(DataError, match=f"line {BLANK_LINES[start] + bool(header) + 2}: 3 fields, expected 2: '3,4,5'"):
        csv(tmp_path, f"{start}{header}1,2\n3,4,5\n")


@pytest.mark.parametrize("data", [b"a,b\n1,\xff\xfe\n", b"\xff\xfea,b\n"])
def test_other_encodings_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "data").write_bytes(data)
    with pytest.raises(DataError, match=r"data: cannot be read: .*(UTF|utf)"):
        open_dataset(tmp_path / "data")


def test_endless_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_file, "_BLOCK", 1000)
    with pytest.raises(DataError, match="a line is longer than 1000 bytes"):
        csv(tmp_path, "a,b\n1," + "2" * 5000 + "\n")
    with pytest.raises(DataError, match="a line is longer than 1000 bytes"):
        csv(tmp_path, "a" * 5000)


def test_line_feeds_in_quotes_and_lone_carriage_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_file, "_BLOCK", 50)
    quoted = csv(tmp_path, "a,b\n" + '1,"one\ntwo"\n' * 20 + '2,"x""y"\n')
    assert quoted.take(np.array([19, 20]))["b"].tolist() == ["one\ntwo", 'x"y']
    with pytest.raises(DataError, match="a quotation mark is not closed"):
        csv(tmp_path, 'a,b\n1,"one\n' + "2,two\n" * 20)
    monkeypatch.undo()
    with pytest.raises(DataError, match="flowers: cannot be read: new-line character"):
        csv(tmp_path, "a,b\r1,2\r3,4\r")


def test_gzip_and_parts(tmp_path: Path) -> None:
    (tmp_path / "train.csv.gz").write_bytes(gzip.compress(b"a,y\n1,0\n2,1\n"))
    (tmp_path / "test.csv").write_bytes(b"a,y\n3,1\n")
    dataset = open_dataset(tmp_path)
    assert dataset.parts == {"train": range(2), "test": range(2, 3)}
    assert dataset.take(np.array([2, 0]))["a"].tolist() == [3, 1]
    (tmp_path / "test.csv").write_bytes(b"a,y\n3.5,1\n")
    wider = open_dataset(tmp_path)
    assert wider.columns["a"].dtype is DType.FLOAT64
    for rows, values in (([2, 0], [3.5, 1]), ([1, 0], [2, 1])):
        taken = wider.take(np.array(rows))["a"]
        assert taken.tolist() == values and taken.dtype == np.float64
    (tmp_path / "test.csv").write_bytes(b"b,y\n3,1\n")
    with pytest.raises(DataError, match=r"part 'test' has 'b' int64\[\], 'y' int64\[\], but part 'train' has 'a'"):
        open_dataset(tmp_path)


def test_shards_of_parquet_in_a_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data", "w") as archive:
        for i in range(3):
            pq.write_table(pa.table({"x": [i, i + 10], "y": [0.5, i]}), tmp_path / "shard")
            archive.write(tmp_path / "shard", f"train-{i:05}-of-00003.parquet")
    dataset = open_dataset(tmp_path / "data")
    assert dataset.format == "parquet" and dataset.take(np.array([5, 2, 0]))["x"].tolist() == [12, 1, 0]
    assert select(dataset).targets.dtype == np.float32 and select(dataset).targets.shape == (6, 1)


def test_lists_are_rows_or_sequences(tmp_path: Path) -> None:
    lists = [[1.0, 2.0, 3.0]] * 10
    ragged = [list(range(i % 4)) for i in range(10)]
    dataset = parquet(
        tmp_path, same=lists, ragged=ragged, y=np.arange(10.0), when=pa.array([0] * 10, pa.timestamp("s"))
    )
    assert dataset.columns["same"].shape == (3,) and dataset.columns["ragged"].shape == (-1,)
    taken = dataset.take(np.array([7, 1]))
    assert taken["same"].shape == (2, 3) and [row.tolist() for row in taken["ragged"]] == [[0, 1, 2], [0]]
    with pytest.raises(
        DataError, match=r"column 'when': has type timestamp\[ms\], expected numbers, text or lists of numbers"
    ):
        select(dataset, {"x": "when"})


def test_parquet_that_lacks_values(tmp_path: Path) -> None:
    dataset = parquet(tmp_path, a=pa.array([1, None, 3]), b=pa.array([1.5, None, 3]), y=[0, 1, 0])
    with pytest.raises(DataError, match="flowers: row 1: column 'a': the value is missing"):
        dataset.take(np.array([0]), ["a"])
    with pytest.raises(DataError, match="flowers: row 1: column 'b': the number is missing or NaN"):
        select(dataset, {"x": "b"}).take(np.arange(3))


def test_damaged_parquet(tmp_path: Path) -> None:
    parquet(tmp_path, x=np.arange(1000.0))
    data = (tmp_path / "data").read_bytes()
    for bad in (data[:-100], data[:100] + bytes(500) + data[600:], b"PAR1" + bytes(100) + b"PAR1"):
        (tmp_path / "data").write_bytes(bad)
        with pytest.raises(DataError, match="data: "):
            open_dataset(tmp_path / "data").take(np.arange(3))


def test_text_counts_against_the_memory_budget(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a,y\n" + "some text,1\n" * 1000)
    with pytest.raises(DataError, match="bytes of memory, more than the 1000 bytes left"):
        open_dataset(tmp_path / "data", memory=1000).take(np.array([0]), ["a"])
