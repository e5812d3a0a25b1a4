"""Grids of a weight [K, N] in blocks along K: a scale and a zero point for each block of rows in each column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.rounding import Rounding, rounded
from lathe.core.ir.types import DType

# By bits, and whether the grid is symmetric.
TYPES = {
    (4, False): DType.UINT4, (4, True): DType.INT4, (8, False): DType.UINT8, (8, True): DType.INT8,
    (2, False): DType.UINT2, (2, True): DType.INT2,
}  # fmt: skip
_SHRUNK = np.linspace(1.0, 0.6, 17)  # parts of a block's range among which the least error is chosen
_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class BlockGrid:
    """Codes q of `dtype` stand for (q - zero) * scale; scale float32 [G, N] and zero int32 [G, N] for G blocks."""

    dtype: DType
    block: int
    scale: NDArray[np.float32]
    zero: NDArray[np.int32]

    @property
    def limits(self) -> tuple[int, int]:
        return limits_of(self.dtype)

    def for_rows(self, rows: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Scale and zero point of each weight, [rows, N]."""
        return np.repeat(self.scale, self.block, axis=0)[:rows], np.repeat(self.zero, self.block, axis=0)[:rows]

    def quantized(self, weights: NDArray[Any], rounding: Rounding = "nearest", seed: int = 0) -> NDArray[np.int32]:
        """The codes of weights [K, N], int32. `rounding` chooses between the neighbours of a number (`rounding.py`)."""
        scale, zero = self.for_rows(len(weights))
        return rounded(weights / scale, rounding, seed, zero, self.limits)

    def dequantized(self, codes: NDArray[Any]) -> NDArray[np.float32]:
        """The weights [K, N] that codes stand for."""
        scale, zero = self.for_rows(len(codes))
        return np.asarray((codes - zero) * scale, np.float32)


def limits_of(dtype: DType) -> tuple[int, int]:
    """The least and the greatest integer of a type of 2, 4 or 8 bits."""
    half = 1 << (dtype.bits - 1)
    return (-half, half - 1) if str(dtype).startswith("int") else (0, 2 * half - 1)


def choose_grid(
    weights: NDArray[np.float32], bits: int, block: int, symmetric: bool, importance: NDArray[Any] | None = None
) -> BlockGrid:
    """The grid of weights [K, N] with `block` rows per scale (0: all rows) and the least square error of nearest codes.

    For each block and column the range is a part (0.6 to 1) of that of its weights and 0: a smaller one clips a few
    weights, and rounds all others more finely. A symmetric scale is negative where the weight of greatest magnitude is
    positive, because there is one more code below 0 than above. `importance` [K] weighs the errors of the rows: the
    mean squares of the inputs.
    """
    dtype, block = TYPES[bits, symmetric], block or len(weights)
    low, high = limits_of(dtype)
    split, weight = _in_blocks(weights, block), _in_blocks(np.ones((len(weights), 1)), block)
    if importance is not None:
        weight = _in_blocks(np.asarray(importance, np.float64).reshape(-1, 1), block)
    least, most = np.minimum(split.min(axis=1), 0), np.maximum(split.max(axis=1), 0)
    toward_least = np.where(most > -least, -1.0, 1.0)
    best = np.full(least.shape, np.inf)
    scale, zero = np.empty(least.shape, np.float32), np.zeros(least.shape, np.int32)
    for part in _SHRUNK:
        if symmetric:
            step = np.maximum(np.maximum(-least, most) * (part / -low), _SMALLEST) * toward_least
            point = np.zeros(least.shape)
        else:
            step = np.maximum((most - least) * (part / (high - low)), _SMALLEST)
            point = np.rint(low - least * part / step).clip(low, high)
        step = step.astype(np.float32)
        codes = (np.rint(split / step[:, None]) + point[:, None]).clip(low, high)
        error = (((codes - point[:, None]) * step[:, None] - split) ** 2 * weight).sum(axis=1)
        better = error < best
        best, scale = np.where(better, error, best), np.where(better, step, scale)
        zero = np.where(better, point, zero).astype(np.int32)
    return BlockGrid(dtype, block, scale, zero)


def _in_blocks(rows: NDArray[Any], block: int) -> NDArray[np.float64]:
    """Rows [K, N] as [G, block, N], padded with zeros."""
    count = -(-len(rows) // block)
    padded = np.zeros((count * block, rows.shape[1]))
    padded[: len(rows)] = rows
    return padded.reshape(count, block, rows.shape[1])
