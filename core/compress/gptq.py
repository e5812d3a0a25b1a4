"""GPTQ: rounds a weight row by row, and corrects the rows that are left for the error made so far.

Frantar et al. 2022 (https://arxiv.org/abs/2210.17323), algorithm 1. The corrections minimise the square error of the
product over the calibration data, which enters by the second moments of its inputs alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.block_grids import BlockGrid, choose_grid

_ROWS = 128  # rows whose corrections of all later rows are made at once
_DAMPING = 0.01  # of the mean of the diagonal, as in the paper: moments of few data are singular


def round_with_corrections(
    weights: NDArray[np.float32], gram: NDArray[np.float32], bits: int, block: int, symmetric: bool
) -> tuple[BlockGrid, NDArray[np.int32]]:
    """A grid for weights [K, N], as `choose_grid` makes it, and their codes. `gram` [K, K] is the mean of x x^T.

    `block` rows share a scale (0: all). The grid of a block is chosen from its weights after the corrections for all
    blocks before. Weights of inputs that are always 0 count as 0.
    """
    depth = len(weights)
    block = block or depth
    inverse = _inverse_factor(gram)
    left = weights.astype(np.float64)
    left[np.diag(gram) == 0] = 0  # inputs that are always 0
    codes = np.zeros(weights.shape, np.int32)
    grids: list[BlockGrid] = []
    importance = np.diag(gram).astype(np.float64)
    for begin in range(0, depth, _ROWS):
        end = min(begin + _ROWS, depth)
        errors = np.zeros((end - begin, weights.shape[1]))
        for row in range(begin, end):
            if row % block == 0:
                # Corrections by rows of this group are still due for the rows after it.
                rows = left[row : row + block].copy()
                if row + block > end:
                    rows[end - row :] -= inverse[begin:end, end : row + block].T @ errors
                grids.append(
                    choose_grid(rows.astype(np.float32), bits, block, symmetric, importance[row : row + block])
                )
            grid = grids[-1]
            scale, zero = grid.scale[0], grid.zero[0]
            codes[row] = (np.rint(left[row] / scale) + zero).clip(*grid.limits)
            error = (left[row] - (codes[row] - zero) * scale) / inverse[row, row]
            left[row + 1 : end] -= np.outer(inverse[row, row + 1 : end], error)
            errors[row - begin] = error
        left[end:] -= inverse[begin:end, end:].T @ errors
    scale, zero = (np.concatenate([getattr(grid, name) for grid in grids]) for name in ("scale", "zero"))
    return BlockGrid(grids[0].dtype, block, scale, zero), codes


def _inverse_factor(gram: NDArray[np.float32]) -> NDArray[np.float64]:
    """The upper Cholesky factor of the inverse of the damped moments."""
    moments = gram.astype(np.float64)
    diagonal = np.einsum("ii->i", moments)  # a view
    diagonal[diagonal == 0] = 1
    damping = _DAMPING
    while True:
        try:
            inverse = np.linalg.inv(moments + np.eye(len(moments)) * (damping * diagonal.mean()))
            return np.linalg.cholesky(inverse).T
        except np.linalg.LinAlgError:  # rounding made them indefinite
            damping *= 10
