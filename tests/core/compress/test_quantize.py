"""`lathe.quantize`: data as arrays by name or as batches, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import DataError, ModelError, UnsupportedError
from tests.core.small_models import model
from tests.random_numbers import RNG

TWO = model(
    "float[n,8] a, float[n,8] b => float[n,3] y",
    "l = MatMul(a, v) r = MatMul(b, w) y = Add(l, r)",
    ", ".join(f"float[8,3] {name} = {{{', '.join(map(str, range(-5, 19)))}}}" for name in "vw"),
)
F = np.float32
ZEROS = np.zeros((5, 8), F)


def arrays(rows: int = 40) -> dict[str, Any]:
    return {name: RNG.standard_normal((rows, 8)).astype(F) for name in "ab"}


def test_arrays_are_run_in_batches_and_batches_as_they_are(tmp_path: Path) -> None:
    """The same data in any division gives the same graph, from a graph, a file or bytes."""
    (tmp_path / "two.onnx").write_bytes(TWO)
    data = arrays()
    parts = [{name: array[start : start + 10] for name, array in data.items()} for start in range(0, 40, 10)]
    labelled = data | {"label": np.arange(3)}
    made = [
        lathe.export(lathe.quantize(given, feeds, batch=size, threads=1))
        for given, feeds, size in (
            (TWO, labelled, 32),
            (lathe.load(TWO), data, 7),
            (tmp_path / "two.onnx", iter(parts), 1),
        )
    ]
    assert made[0] == made[1] == made[2]
    expected = (data["a"] + data["b"]) @ np.arange(-5, 19, dtype=F).reshape(8, 3)
    with lathe.compile(made[0], threads=1, tune="off") as session:
        assert np.abs(session.run(data)["y"] - expected).max() < 0.03 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("change", "error", "complaint"),
    [
        ({"data": {"a": np.zeros((4, 8), F)}}, DataError, r"data: expected arrays a, b, got a$"),
        ({"data": {}}, DataError, r"data: expected arrays a, b, got none$"),
        (
            {"data": {"a": np.zeros((4, 8), F), "b": np.zeros((5, 8), F)}},
            DataError,
            r"same number of rows, got a 4, b 5",
        ),
        (
            {"data": {"a": np.zeros((0, 8), F), "b": np.zeros((0, 8), F)}},
            DataError,
            r"at least one batch of data, got none",
        ),
        ({"activations": "int4"}, UnsupportedError, r"activations: expected uint8 or int8, got int4"),
        ({"batch": 0}, UnsupportedError, r"batch: expected 1 row or more, got 0"),
        ({"batch": -4, "data": []}, UnsupportedError, r"batch: expected 1 row or more, got -4"),
        ({"calibration": "max"}, UnsupportedError, r"calibration: expected one of min-max, .*, got 'max'"),
        ({"percentile": 50}, UnsupportedError, r"percentile: expected more than 50, at most 100, got 50"),
        ({"skip": ["none"]}, UnsupportedError, r"skip: expected names of nodes, got none"),
        ({"threads": 0}, ValueError, r"threads: expected an integer of 1 or more, got 0"),
        ({"model": b"\x08"}, ModelError, r"not an ONNX model"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        lathe.quantize(**({"model": TWO, "data": arrays(4)} | change))
