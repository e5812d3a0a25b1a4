"""Datasets of NumPy arrays: the types they are read as, and files that are refused."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.core.errors import DataError
from lathe.core.ir.types import DType
from lathe.core.train.data import open_dataset, select


def saved(path: Path, compressed: bool = False, **arrays: Any) -> Path:
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return path


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


X = np.arange(24, dtype=np.float64).reshape(4, 2, 3)
Y = np.array([0, 1, 2, 1])


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("array", [X, np.asfortranarray(X), X.astype(">f4"), X.astype(np.uint8), X > 5])
def test_rows_are_those_of_the_arrays(tmp_path: Path, array: Any, compressed: bool) -> None:
    dataset = open_dataset(saved(tmp_path / "a.npz", compressed, x=array, y=Y))
    taken = dataset.take(np.array([3, 0, 3]))
    np.testing.assert_array_equal(taken["x"], array[[3, 0, 3]])
    assert taken["x"].dtype == array.dtype.newbyteorder("=")
    assert dataset.columns["x"].shape == (2, 3) and dataset.columns["y"].dtype is DType.INT64


def test_uncompressed_arrays_are_mapped_and_compressed_ones_counted(tmp_path: Path) -> None:
    big = np.zeros((1000, 1000))
    plain = open_dataset(saved(tmp_path / "plain.npz", x=big, y=big[:, 0]), memory=1 << 20)
    plain.take(np.array([0]))
    packed = open_dataset(saved(tmp_path / "packed.npz", True, x=big, y=big[:, 0]), memory=1 << 20)
    with pytest.raises(
        DataError, match=r"packed.npz: column 'x': needs 8000000 bytes of memory, more than the 1048576"
    ):
        packed.take(np.array([0]))


def test_text_is_text(tmp_path: Path) -> None:
    dataset = open_dataset(saved(tmp_path / "a.npz", x=X, y=np.array(["cat", "dog", "ä", "cat"])))
    assert dataset.take(np.array([2]), ["y"])["y"].tolist() == ["ä"]
    examples = select(dataset)
    assert examples.classes == ("cat", "dog", "ä") and examples.targets.tolist() == [0, 1, 2, 0]


def test_parts_by_name(tmp_path: Path) -> None:
    dataset = open_dataset(saved(tmp_path / "a.npz", x_train=X, y_train=Y, x_test=X[:2] + 100, y_test=Y[:2]))
    assert dataset.parts == {"train": range(4), "test": range(4, 6)}
    np.testing.assert_array_equal(dataset.take(np.array([5, 0]))["x"], [X[1] + 100, X[0]])


BAD = {
    "nothing": ({}, "the archive has no arrays"),
    "pickle": ({"x": npy(np.array([object()]))}, r"column 'x': Python objects \(pickles\) are not allowed"),
    "no array": ({"x": b"hello"}, "column 'x': invalid .npy file"),
    "cut header": ({"x": npy(X)[:20]}, "column 'x': invalid .npy file"),
    "cut data": ({"x": npy(X)[:-8]}, r"header says \[4, 2, 3\] of float64 takes 192 bytes, but 184 follow"),
    "huge shape": ({"x": npy(X).replace(b"(4, 2, 3)", b"(4, 1<<40)")}, "column 'x': invalid .npy file"),
    "lying shape": ({"x": npy(X).replace(b"(4, 2, 3)", b"(4, 2003)")}, "takes 64096 bytes, but 192 foll"),
    "no rows": ({"x": npy(X[:0]), "y": npy(Y[:0])}, "there are no rows"),
    "scalar": ({"x": npy(np.float32(1))}, "column 'x': the array has rank 0, expected an axis of rows"),
    "dates": (
        {"x": npy(np.array(["2026-01-01"], "datetime64[D]"))},
        r"expected numbers or text, got an array of datetime64\[D\]",
    ),
    "lengths": ({"x": npy(X), "y": npy(Y[:3])}, "columns differ in their number of rows: 'x' 4, 'y' 3"),
    "a part twice": (
        {"x_val": npy(X), "x_valid": npy(X)},
        "arrays 'x_val' and 'x_valid' are both column 'x' of part 'validation'",
    ),
    "half a part": ({"x_train": npy(X), "y": npy(Y)}, "arrays 'y' name no part"),
    "parts differ": (
        {"x_train": npy(X), "x_test": npy(Y)},
        r"part 'test' has 'x' int64\[\], but part 'train' has 'x' floa",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(tmp_path: Path, name: str) -> None:
    members, message = BAD[name]
    with pytest.raises(DataError, match=message):
        open_dataset(archive(tmp_path / "a.npz", **members))


def test_a_damaged_member_is_named(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz", x=npy(np.random.default_rng(0).random((100, 9))), y=npy(np.zeros(100)))
    data = bytearray(path.read_bytes())
    data[2000] ^= 255
    path.write_bytes(data)
    dataset = open_dataset(path)
    with pytest.raises(DataError, match=r"a.npz: column 'x': cannot be read"):
        dataset.take(np.array([0]))


def test_neither_file_nor_format(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x00\x01")
    with pytest.raises(DataError, match=r"a.bin: unknown format, expected NumPy arrays"):
        open_dataset(tmp_path / "a.bin")
    with pytest.raises(DataError, match="b: there is no file or folder"):
        open_dataset(tmp_path / "b")
