"""The classification extension for every datatype of the protocol, compared with Python's sort."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lathe.server.api.codec.classification import classify_steps
from lathe.server.datatypes import NUMPY_OF
from lathe.server.errors import BadRequest
from lathe.server.steps import run_all
from tests.random_numbers import RNG

NUMBERS = [datatype for datatype in NUMPY_OF if datatype not in ("BOOL", "BYTES")]


def highest(row: list[float], best: int, is_integral: bool) -> list[bytes]:
    order = sorted(range(len(row)), key=lambda index: (math.isnan(row[index]), -row[index]))
    return [f"{row[i] if is_integral else f'{row[i]:f}'}:{i}".encode() for i in order[:best]]


@pytest.mark.parametrize("datatype", NUMBERS)
def test_the_highest_numbers_of_each_row_are_returned(datatype: str) -> None:
    scores = RNG.integers(0, 100, (5, 40)).astype(NUMPY_OF[datatype])
    found = run_all(classify_steps(scores, datatype, 7, batched=True))
    is_integral = scores.dtype.kind in "iu"
    assert [list(row) for row in found] == [highest(row, 7, is_integral) for row in scores.tolist()]


@pytest.mark.parametrize("datatype", NUMBERS)
def test_the_extremes_of_a_datatype_are_in_order(datatype: str) -> None:
    """Neighbours of the extremes, which float64 cannot tell apart; infinities, and NaN, which is below all numbers."""
    dtype = NUMPY_OF[datatype]
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        scores = np.array([low, high - 1, low + 1, high, 0, high], dtype)
    else:
        scores = np.array([0.5, -np.inf, np.nan, np.inf, 1.5, 0.5], dtype)
    found = run_all(classify_steps(scores, datatype, 6, batched=False))
    assert list(found) == highest(scores.tolist(), 6, dtype.kind in "iu")


@pytest.mark.parametrize("datatype", ["BOOL", "BYTES"])
def test_what_is_no_number_is_refused(datatype: str) -> None:
    with pytest.raises(BadRequest, match=f"expected an output of numbers, got {datatype}"):
        run_all(classify_steps(np.zeros(3, NUMPY_OF[datatype]), datatype, 1, batched=False))
