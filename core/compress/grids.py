"""`Grid`: the numbers that integers of one type stand for, and how a range of real numbers determines them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.rounding import Rounding, rounded
from lathe.core.ir.types import DType

_LIMITS = {DType.INT8: (-128, 127), DType.UINT8: (0, 255), DType.INT4: (-8, 7), DType.UINT4: (0, 15)}
TYPES = tuple(_LIMITS)
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)  # a range that is only 0 needs some scale


@dataclass(frozen=True)
class Grid:
    """Integers q of `dtype` that stand for (q - zero) * scale, as in ONNX's QuantizeLinear and DequantizeLinear.

    `scale` (float32) and `zero` (of `dtype`) have equal shapes: [] for a whole tensor, or [channels].
    """

    dtype: DType
    scale: NDArray[np.float32]
    zero: NDArray[Any]

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the greatest integer; `dtype` must be one of `TYPES`."""
        return _LIMITS[self.dtype]

    def quantized(
        self, numbers: NDArray[Any], axis: int = 0, rounding: Rounding = "nearest", seed: int = 0
    ) -> NDArray[Any]:
        """The integers for `numbers`, of the same shape: rounded, by default to the nearest, ties to even; saturated.

        `axis` is the axis of the channels. `dtype` must be one of `TYPES`. `rounding` and `seed`: see `rounded`.
        """
        scale, zero = (_along(each, axis, numbers.ndim) for each in (self.scale, self.zero))
        return rounded(numbers.astype(np.float32) / scale, rounding, seed, zero, self.limits).astype(self.zero.dtype)

    def dequantized(self, whole: NDArray[Any], axis: int = 0) -> NDArray[np.float32]:
        """The numbers that the integers `whole` stand for, of the same shape; `axis` is the axis of the channels."""
        scale, zero = (_along(each, axis, whole.ndim) for each in (self.scale, self.zero))
        return (whole.astype(np.float32) - zero.astype(np.float32)) * scale


def make_grid(low: Any, high: Any, dtype: DType, symmetric: bool) -> Grid:
    """The grid of `dtype` that covers the numbers from `low` to `high`, and 0; `dtype` must be one of `TYPES`.

    `low` and `high` are numbers, or arrays [channels]. 0 is a point of each grid, since paddings are 0. A symmetric
    grid covers the numbers from -m to m, for the greater magnitude m of the two. Its zero point is 0, or 128 for uint8
    and 8 for uint4; no covered number becomes the least integer of the type.
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
    """`each`, of shape [channels], in a shape that broadcasts along `axis` of a tensor; a single number as it is."""
    return each.reshape([-1 if place == axis % rank else 1 for place in range(rank)]) if each.size > 1 else each
