"""Randomly damaged files of every format: each is read, or refused with DataError."""

from __future__ import annotations

import gzip
import io
import random
import struct
import zipfile
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lathe.core.errors import DataError
from lathe.core.train.data import open_dataset
from lathe.core.train.data.describe import describe
from lathe.core.train.data.formats import Format

ROUNDS = 60


def _zip(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.arange(60.0).reshape(20, 3), y=np.arange(20) % 3)
    return file.getvalue()


def npz_compressed() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, x=np.arange(60.0).reshape(20, 3), y=np.array(["a", "b"] * 10))
    return file.getvalue()


def parquet() -> bytes:
    file = io.BytesIO()
    columns = {"a": np.arange(30.0), "s": ["x"] * 30, "l": [[1, 2]] * 30, "y": np.arange(30) % 3}
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def csv() -> bytes:
    return b"a,b,y\n" + b"".join(b"%d,%d.5,w%d\n" % (i, i, i % 3) for i in range(30))


def csv_compressed() -> bytes:
    return gzip.compress(csv())


def images() -> bytes:
    pixels = np.random.default_rng(1).integers(0, 255, (9, 9, 3), np.uint8)
    members = {}
    for number, kind in enumerate(("png", "jpeg", "bmp", "gif", "tiff", "webp", "ppm")):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, kind)
        members[f"class{number % 2}/{number}.{kind}"] = file.getvalue()
    return _zip(members)


def idx() -> bytes:
    pixels = struct.pack(">BBBBIII", 0, 0, 8, 3, 10, 4, 4) + bytes(range(160))
    labels = struct.pack(">BBBBI", 0, 0, 8, 1, 10) + bytes(10)
    return _zip({"train-images-idx3-ubyte.gz": gzip.compress(pixels), "train-labels-idx1-ubyte": labels})


MAKERS = {maker.__name__: maker for maker in (npz, npz_compressed, parquet, csv, csv_compressed, images, idx)}


def damaged(good: bytes, rng: random.Random) -> bytes:
    data = bytearray(good)
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data if rng.random() < 0.8 else data[: rng.randrange(len(data))])


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # of metadata that it reads past
@pytest.mark.parametrize("kind", MAKERS)
def test_damaged_files_read_or_are_refused(tmp_path: Path, kind: str) -> None:
    rng, good, refused = random.Random(kind), MAKERS[kind](), list[str]()
    path = tmp_path / "data"
    path.write_bytes(good)
    assert describe(path)["rows"] in (7, 10, 20, 30)
    for _ in range(ROUNDS):
        path.write_bytes(damaged(good, rng))
        try:
            describe(path, name="damaged", memory=1 << 26)
        except DataError as error:
            refused.append(str(error))
    assert len(refused) > ROUNDS // 4 and all(text.startswith("damaged: ") for text in refused)


def test_encrypted_archives(tmp_path: Path) -> None:
    data = bytearray(_zip({"cat/1.png": b"anything"}))
    data[6] |= 1  # general purpose flags, in the local header and in the central directory
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "data").write_bytes(data)
    with pytest.raises(DataError, match=r"'cat/1.png' cannot be read: .*encrypted, password required"):
        describe(tmp_path / "data")


@pytest.mark.parametrize("format", get_args(Format))
@pytest.mark.parametrize("empty", ["folder", "zip", "file"])
def test_empty_files_of_any_format(tmp_path: Path, empty: str, format: Format) -> None:
    path = tmp_path / "data"
    if empty == "folder":
        path.mkdir()
    else:
        path.write_bytes(_zip({}) if empty == "zip" else b"")
    with pytest.raises(DataError, match=r"^data: "):
        open_dataset(path, format)
