"""AWQ: channels with large inputs are rounded more finely, because their weights are multiplied before rounding.

Lin et al. 2023 (https://arxiv.org/abs/2306.00978), section 3.2. The input is divided by the same factors, so the
product is unchanged: x @ W = (x / s) @ (s * W).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.block_grids import choose_grid
from lathe.core.compress.moments import Moments

_POWERS = np.linspace(0, 1, 21)[:-1]  # of the mean sizes of the channels, as in the paper


def channel_factors(
    weights: Sequence[NDArray[np.float32]], moments: Moments, bits: int, block: int, symmetric: bool
) -> NDArray[np.float32]:
    """The factors s [K] of weights [K, N] that read the same input, with the least square error of their products.

    s is the mean size of each channel of the input to one of 20 powers from 0 to 0.95, scaled so that the greatest s is
    1 / the least.
    """
    size = np.maximum(moments.mean_size, 1e-8 * max(float(moments.mean_size.max()), 1e-30))
    candidates = [_balanced(size**power) for power in _POWERS]
    errors = [
        sum(_error(matrix, factors, moments, bits, block, symmetric) for matrix in weights) for factors in candidates
    ]
    return candidates[int(np.argmin(errors))]


def _balanced(factors: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.asarray(factors / np.sqrt(factors.max() * factors.min()), np.float32)


def _error(
    matrix: NDArray[np.float32], factors: NDArray[np.float32], moments: Moments, bits: int, block: int, symmetric: bool
) -> float:
    """The mean square error of a product when its weights are rounded after multiplication by `factors`."""
    scaled = matrix * factors[:, None]
    importance = np.diag(moments.gram) / factors**2
    grid = choose_grid(scaled, bits, block, symmetric, importance)
    return product_error(grid.dequantized(grid.quantized(scaled)) / factors[:, None] - matrix, moments.gram)


def product_error(difference: NDArray[np.float32], gram: NDArray[np.float32]) -> float:
    """The mean over rows x of the square of x @ difference, summed over the columns; `gram` is the mean of x x^T."""
    return float((difference * (gram @ difference)).sum(dtype=np.float64))
