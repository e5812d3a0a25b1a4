"""Ranges of quantized tensors, against NumPy's percentiles, ONNX Runtime's calibrator and exhaustive search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnxruntime.quantization.calibrate import HistogramCollector

from lathe.core.compress.grids import TYPES, make_grid
from lathe.core.compress.histogram import BINS, Histogram
from lathe.core.compress.ranges import METHODS, choose_range
from lathe.core.errors import UnsupportedError
from lathe.core.ir.types import DType
from tests.random_numbers import RNG

INT8, UINT8 = DType.INT8, DType.UINT8


def of(elements: np.ndarray) -> Histogram:
    histogram = Histogram()
    histogram.add(elements.astype(np.float32))
    return histogram


def outliers() -> np.ndarray:
    """A normal distribution with a few elements far outside."""
    return np.concatenate([RNG.standard_normal(100_000), [40.0, -35.0, 38.0]])


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9, 99.99])
def test_percentiles_are_numpys(percentile: float) -> None:
    elements = outliers()
    histogram = of(elements)
    tail = (100 - percentile) / 2
    width = 2 * histogram.limit / BINS
    expected = np.percentile(elements, [tail, 100 - tail])
    low, high = choose_range(histogram, "percentile", INT8, True, percentile)
    if percentile <= 99.9:  # between two far elements a percentile may be anything
        np.testing.assert_allclose((low, high), expected, 0, 2 * width)
    outside = ((elements < low - width) | (elements > high + width)).mean()
    assert outside <= (100 - percentile) / 100 + 2e-5


def test_all_elements_are_within_a_percentile_of_100() -> None:
    elements = outliers()
    assert choose_range(of(elements), "percentile", INT8, True, 100.0) == pytest.approx(
        (elements.min(), elements.max()), rel=1e-3
    )


def test_entropy_is_close_to_onnx_runtime() -> None:
    """Its calibrator has a histogram of its own, and searches symmetric ranges with the same criterion."""
    elements = outliers()
    collector = HistogramCollector("entropy", False, 4096, 128, 99.99, {})
    collector.collect({"x": [elements.astype(np.float32)]})
    low, high = collector.compute_collection_result()["x"][:2]
    mine = choose_range(of(elements), "entropy", INT8, True)
    assert 3 < high < 12, "the outliers are clipped"
    np.testing.assert_allclose(mine, (low, high), rtol=0.25)


@pytest.mark.parametrize("dtype", [INT8, DType.INT4, DType.UINT4])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_least_square_error_is_that_of_the_elements(dtype: DType, symmetric: bool) -> None:
    elements = outliers()[:20_003]
    elements[-3:] = 9, -8, 9.5
    low, high = choose_range(of(elements), "mse", dtype, symmetric)

    def error(part: float) -> float:
        grid = make_grid(elements.min() * part, elements.max() * part, dtype, symmetric)
        return float(((grid.dequantized(grid.quantized(elements)) - elements) ** 2).mean())

    best = min(map(error, np.linspace(1, 0.2, 81)))
    assert error(high / elements.max()) <= best * 1.02
    assert low / elements.min() == pytest.approx(high / elements.max())


@pytest.mark.parametrize("method", METHODS)
def test_without_elements_or_with_zeros_alone_the_range_is_empty(method: Any) -> None:
    assert choose_range(Histogram(), method, INT8, True) == (0.0, 0.0)
    low, high = choose_range(of(np.zeros(9)), method, UINT8, False)
    assert low == 0.0 == high
    grid = make_grid(low, high, UINT8, False)
    np.testing.assert_array_equal(grid.dequantized(grid.quantized(np.zeros(3))), 0)


@pytest.mark.parametrize("histogram", [Histogram(), of(np.arange(3))], ids=["empty", "filled"])
def test_an_unknown_method_is_refused(histogram: Histogram) -> None:
    method: Any = "max"
    with pytest.raises(UnsupportedError, match=r"calibration: expected one of min-max, .*, got 'max'"):
        choose_range(histogram, method, INT8, True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("ends", [(-1.0, 3.0), (0.5, 2.0), (-5.0, -1.0), (-1e-30, 1e30), (0.0, 0.0)])
def test_a_grid_covers_its_range_and_has_zero(dtype: DType, symmetric: bool, ends: tuple[float, float]) -> None:
    grid = make_grid(*ends, dtype, symmetric)
    assert grid.scale.dtype == np.float32
    assert grid.zero.dtype == dtype.numpy
    assert grid.dequantized(grid.quantized(np.zeros(1))) == 0
    for end in ends:
        assert abs(float(grid.dequantized(grid.quantized(np.array([end])))[0]) - end) <= float(grid.scale) * 0.51
    assert not symmetric or int(grid.zero) in (0, 8, 128)


def test_a_grid_for_each_channel() -> None:
    weights = RNG.standard_normal((4, 3, 2)) * np.array([1, 10, 100])[None, :, None]
    bound = np.abs(weights).max(axis=(0, 2))
    grid = make_grid(-bound, bound, INT8, True)
    back = grid.dequantized(grid.quantized(weights, 1), 1)
    assert (np.abs(back - weights).max(axis=(0, 2)) <= grid.scale * 0.5001).all()
    assert np.abs(grid.quantized(weights, 1)).max(axis=(0, 2)).tolist() == [127, 127, 127]
