"""IDX files, written here by the definition of the format from real digits."""

from __future__ import annotations

import gzip
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from lathe.core.errors import DataError
from lathe.core.ir.types import DType
from lathe.core.train.data import open_dataset, select, split

CODES = {"u1": 8, "i1": 9, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}
DIGITS = load_digits()
IMAGES, LABELS = DIGITS.images.astype(np.uint8), DIGITS.target.astype(np.uint8)


def idx(array: Any) -> bytes:
    """The file format as MNIST's page defines it."""
    code = CODES[array.dtype.str[1:]]
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
        + array.astype(array.dtype.newbyteorder(">")).tobytes()
    )


def files(test: int = 300) -> dict[str, bytes]:
    return {
        "train-images-idx3-ubyte": idx(IMAGES[test:]), "train-labels-idx1-ubyte": idx(LABELS[test:]),
        "t10k-images-idx3-ubyte": idx(IMAGES[:test]), "t10k-labels-idx1-ubyte": idx(LABELS[:test]),
    }  # fmt: skip


def written(folder: Path, kind: str, members: dict[str, bytes]) -> Path:
    """Write a folder or zip of plain or gzip files."""
    if kind.endswith("gzip"):
        members = {f"{name}.gz": gzip.compress(data) for name, data in members.items()}
    if kind.startswith("zip"):
        with zipfile.ZipFile(folder / "data", "w") as archive:
            for name, data in members.items():
                archive.writestr(f"mnist/{name}", data)
        return folder / "data"
    for name, data in members.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("kind", ["folder", "folder of gzip", "zip", "zip of gzip"])
def test_mnist_from_real_digits(tmp_path: Path, kind: str) -> None:
    dataset = open_dataset(written(tmp_path, kind, files()))
    assert dataset.format == "idx" and dataset.parts == {"test": range(300), "train": range(300, 1797)}
    examples = select(dataset)
    assert examples.inputs["x"].shape == (8, 8) and examples.inputs["x"].dtype is DType.UINT8
    assert examples.classes == tuple("0123456789")
    rows = np.array([299, 300, 5])
    taken = examples.take(rows)
    np.testing.assert_array_equal(taken["x"], IMAGES[rows])
    np.testing.assert_array_equal(taken["target"], LABELS[rows])
    assert split(examples, held_out=0.5).test.tolist() == list(range(300))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("kind", ["folder", "zip of gzip"])
def test_every_type(tmp_path: Path, code: str, kind: str) -> None:
    array = (np.arange(24) * 5).reshape(2, 3, 4).astype(code)
    dataset = open_dataset(written(tmp_path, kind, {"train-images.idx3-ubyte": idx(array)}))
    taken = dataset.take(np.array([1, 0]))["images"]
    np.testing.assert_array_equal(taken, array[::-1])
    assert taken.dtype == array.dtype


GOOD = idx(IMAGES[:5])
BAD = {
    "magic": ({"train-images-idx3-ubyte": b"\1" + GOOD[1:]}, "expected the bytes 00 00, a type .* got 01 00 08 03"),
    "type": ({"train-images-idx3-ubyte": b"\0\0\x0a" + GOOD[3:]}, "got 00 00 0a 03"),
    "empty": ({"train-images-idx3-ubyte": b""}, "is not an IDX file"),
    "header": ({"train-images-idx3-ubyte": GOOD[:10]}, "the file ends within its header of 3 axes"),
    "short": ({"train-images-idx3-ubyte": GOOD[:-1]}, r"says \[5, 8, 8\] of uint8, 320 bytes.*319"),
    "long": ({"train-images-idx3-ubyte": GOOD + b"x"}, "320 bytes, but"),
    "part": ({"extra-images-idx3-ubyte": GOOD}, "part: expected train, test, t10k or validation, got 'extra'"),
    "twice": ({"train-images-idx3-ubyte": GOOD, "train-images.idx3-ubyte": GOOD}, "another file of column 'images'"),
    "rows": (
        {"train-images-idx3-ubyte": GOOD, "train-labels-idx1-ubyte": idx(LABELS[:4])},
        "columns differ in their number of rows: 'images' 5, 'labels' 4",
    ),
}


@pytest.mark.parametrize("kind", ["folder", "zip of gzip"])
@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    members, message = BAD[name]
    with pytest.raises(DataError, match=message):
        open_dataset(written(tmp_path, kind, members)).take(np.array([0]))


def test_truncated_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(idx(np.random.default_rng(0).integers(0, 255, (50, 8, 8), np.uint8)))
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"'train-images-idx3-ubyte.gz': the header says .* 3200 bytes: "):
        open_dataset(tmp_path).take(np.array([0]))


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    header = struct.pack(">BBBBI", 0, 0, 8, 1, 2**31)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + bytes(1 << 20)))
    with pytest.raises(DataError, match="needs 2147483648 bytes of memory, more than the 1048576 bytes left"):
        open_dataset(tmp_path, memory=1 << 20).take(np.array([0]))
