"""`Grid`: the numbers that integers of one type stand for, and how a range of real numbers determines them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.ir.types import DType

_LIMITS = {DType.INT8: (-128, 127), DType.UINT8: (0, 255), DType.INT4: (-8, 7), DType.UINT4: (0, 15)}
TYPES = tuple(_LIMITS)
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)  # a range that is only 0 needs some scale


@dataclass(frozen=True)
class Grid:
    """Integers q of a type that stand for (q - zero) * scale, as in ONNX's QuantizeLinear and DequantizeLinear.

    `scale` (float32) and `zero` (of the integers' type) have one element for the tensor or for each channel.
    """

    dtype: DType
    scale: NDArray[np.float32]
    zero: NDArray[Any]

    def quantized(self, numbers: NDArray[Any], axis: int = 0) -> NDArray[Any]:
        """The integers nearest to `numbers`, ties to even; `axis` is that of the channels."""
        scale, zero = (_along(each, axis, numbers.ndim) for each in (self.scale, self.zero))
        low, high = _LIMITS[self.dtype]
        whole = np.rint(numbers.astype(np.float32) / scale).astype(np.float64) + zero.astype(np.float64)
        return whole.clip(low, high).astype(self.zero.dtype)

    def dequantized(self, whole: NDArray[Any], axis: int = 0) -> NDArray[np.float32]:
        """The numbers that integers stand for; `axis` is that of the channels."""
        scale, zero = (_along(each, axis, whole.ndim) for each in (self.scale, self.zero))
        return (whole.astype(np.float32) - zero.astype(np.float32)) * scale


def make_grid(low: Any, high: Any, dtype: DType, symmetric: bool) -> Grid:
    """The grid of a type that covers the numbers from `low` to `high` (numbers, or one for each channel), and 0.

    0 is a point of each grid, since paddings are 0. A symmetric grid has the zero point 0 (the middle, for an unsigned
    type), and its ends are as far from 0; a signed one does not use its least integer.
    """
    least, most = _LIMITS[dtype]
    low, high = np.minimum(np.asarray(low, np.float64), 0), np.maximum(np.asarray(high, np.float64), 0)
    if symmetric:
        zero = np.full(low.shape, (least + most + 1) // 2)
        scale = np.maximum(-low, high) / (most - zero)
    else:
        scale = (high - low) / (most - least)
        zero = np.rint(least - low / np.maximum(scale, _SMALLEST_SCALE)).clip(least, most)
    return Grid(dtype, np.maximum(scale, _SMALLEST_SCALE).astype(np.float32), zero.astype(dtype.numpy))


def _along(each: NDArray[Any], axis: int, rank: int) -> NDArray[Any]:
    """One number for each channel, in a shape that broadcasts along `axis`; a single number as it is."""
    return each.reshape([-1 if place == axis % rank else 1 for place in range(rank)]) if each.size > 1 else each
