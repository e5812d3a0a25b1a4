"""Training from a file of every format to a model that takes rows in the file's form."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.datasets import load_digits, load_iris

import lathe
from lathe.core.errors import DataError
from lathe.core.ir.types import DType
from lathe.core.train.run.result import FOLDER, MODEL, read_metrics
from tests.core.train.small_trainings import asked, fit

LENET = {"architecture": "lenet5", "channels": [8, 16], "hidden": [32]}
DIGITS = load_digits()
PIXELS, LABELS = DIGITS.images.astype(np.uint8), DIGITS.target.astype(np.uint8)


def trained(folder: Path, data: Path, **changes: Any) -> tuple[dict[str, Any], lathe.Graph]:
    """Metrics of the held-out rows, and the model."""
    changes = {"data": {}, "schedule": {"kind": "one_cycle"}, "checkpoint": {}, **changes}
    fit(folder, asked(**changes), data).run()
    return read_metrics(folder), lathe.load(folder / FOLDER / MODEL)


def idx(array: Any) -> bytes:
    """The format of MNIST: two zeros, a type (8: unsigned bytes), the number of axes and their sizes, the numbers."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.slow
def test_mnist_format(tmp_path: Path) -> None:
    data = tmp_path / "mnist"
    data.mkdir()
    for part, rows in (("train", slice(360, None)), ("t10k", slice(360))):
        (data / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(PIXELS[rows])))
        (data / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(LABELS[rows])))
    augment = [{"kind": "affine", "degrees": 10.0, "shift": 0.1}]
    steps = [{"kind": "standardize"}]
    record, model = trained(tmp_path / "job", data, model=LENET, preprocess=steps, augment=augment, epochs=10, batch=64)
    assert record["metrics"]["accuracy"] > 0.93 and np.sum(record["confusion"]) == 360
    assert str(model.inputs[0]) == "%x: uint8[batch,8,8]"
    answers = lathe.interpret(model, {"x": PIXELS[:360]})["logits"].argmax(axis=1)
    assert (answers == LABELS[:360]).mean() == record["metrics"]["accuracy"]


@pytest.mark.slow
def test_folders_of_images(tmp_path: Path) -> None:
    chosen = np.flatnonzero(LABELS < 3)
    with zipfile.ZipFile(tmp_path / "data", "w") as archive:
        for row in chosen.tolist():
            file = io.BytesIO()
            Image.fromarray(np.repeat(PIXELS[row, :, :, None] * 15, 3, axis=2)).save(file, "png")
            archive.writestr(f"{('zero', 'one', 'two')[LABELS[row]]}/{row}.png", file.getvalue())
    steps = [{"kind": "resize", "height": 12, "width": 12}, {"kind": "scale", "factor": 1 / 255}]
    record, model = trained(tmp_path / "job", tmp_path / "data", model=LENET, preprocess=steps, epochs=5, batch=32)
    assert record["metrics"]["accuracy"] > 0.95
    assert str(model.inputs[0]) == "%x: uint8[batch,8,8,3]"


def test_a_table_with_words_as_classes(tmp_path: Path) -> None:
    iris = load_iris()
    names = iris.target_names[iris.target]
    lines = [f"{a},{b},{c},{d},{name}" for (a, b, c, d), name in zip(iris.data, names, strict=True)]
    (tmp_path / "data").write_text("\n".join(["a,b,c,d,species", *lines]))
    record, model = trained(tmp_path / "job", tmp_path / "data", preprocess=[{"kind": "standardize"}], epochs=30)
    assert record["metrics"]["accuracy"] > 0.9 and model.inputs[0].dtype is DType.FLOAT32


def test_a_regression_table(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(600, 3))
    columns = {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "sum": x @ [1.0, -2.0, 0.5]}
    pq.write_table(pa.table(columns), tmp_path / "data")
    model = {"architecture": "mlp", "hidden": [32]}
    record, _ = trained(tmp_path / "job", tmp_path / "data", model=model, epochs=25)
    assert record["metrics"]["r2"] > 0.97


@pytest.mark.parametrize("token", [6, -1])
def test_invalid_tokens_are_refused_with_their_row(tmp_path: Path, token: int) -> None:
    words = np.ones((20, 3), np.int64)
    words[7, 1] = token
    np.savez(tmp_path / "data.npz", words=words, y=np.arange(20) % 2)
    model = {"architecture": "transformer-encoder", "vocabulary": 6, "width": 4, "heads": 2}
    with pytest.raises(DataError, match=f"row 7: column 'words': the token is {token}, expected 0 to 5"):
        fit(tmp_path / "job", asked(model=model), tmp_path / "data.npz")


def test_sequences_of_any_length(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    words = [rng.integers(1, 6, rng.integers(1, 8)) for _ in range(400)]
    pq.write_table(pa.table({"words": words, "y": [int((word == 5).any()) for word in words]}), tmp_path / "data")
    model = {
        "architecture": "transformer-encoder", "vocabulary": 6, "padding": 0, "width": 16, "heads": 2, "layers": 1,
        "feedforward": 16, "dropout": 0.0,
    }  # fmt: skip
    record, graph = trained(tmp_path / "job", tmp_path / "data", model=model, epochs=12)
    assert record["metrics"]["accuracy"] > 0.9 and str(graph.inputs[0]) == "%x: int64[batch,7]"
