"""Numeric functions for references that NumPy lacks: erf, integer division and power of ONNX, type conversion."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType

# Rational approximations of erf and erfc: W. J. Cody, "Rational Chebyshev approximations for the error function",
# Mathematics of Computation 23 (1969). Relative error below 1e-15. Highest power first.
_NEAR_P = (
    1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3,
)  # fmt: skip
_NEAR_Q = (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3)
_MIDDLE_P = (
    2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1, 2.98635138197400131e2,
    8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3,
)  # fmt: skip
_MIDDLE_Q = (
    1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
    3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3,
)  # fmt: skip


def erf(x: Array) -> Array:
    """The error function, computed in float64 and returned in the element type of `x`."""
    wide = np.asarray(x, np.float64)
    size = np.minimum(np.abs(wide), 6.0)  # erf(6) is 1 to the last bit
    near = wide * _ratio(_NEAR_P, _NEAR_Q, np.square(np.minimum(size, 0.5)))
    far = 1.0 - np.exp(-np.square(size)) * _ratio(_MIDDLE_P, _MIDDLE_Q, size)
    return np.where(size < 0.46875, near, np.copysign(far, wide)).astype(x.dtype)


def _ratio(above: tuple[float, ...], below: tuple[float, ...], x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.polyval(above, x) / np.polyval(below, x)


def truncated_div(a: Array, b: Array) -> Array:
    """Integer division that rounds towards zero, as in C; division by zero gives 0."""
    quotient: Any = np.floor_divide(a, b)
    inexact = np.not_equal(np.multiply(quotient, b), a)
    opposite = np.not_equal(np.less(a, 0), np.less(b, 0)) & np.not_equal(b, 0)
    return np.add(quotient, np.logical_and(inexact, opposite), dtype=np.result_type(a, b))


def int_pow(x: Array, y: Array) -> Array:
    """x ** y for integers x, in the type of x.

    If y is float or an exponent is negative, the power is computed in float64 and converted (`convert`). Otherwise
    results that overflow wrap around.
    """
    if y.dtype.kind in "iu" and not np.any(np.less(y, 0)):
        return np.power(x, y.astype(x.dtype)).astype(x.dtype)
    return convert(np.power(x.astype(np.float64), y.astype(np.float64)), DType.from_numpy(x.dtype))


def convert(x: Array, dtype: DType, saturate: bool = True, round_mode: str = "up") -> Array:
    """`x` converted to another element type, as by ONNX Cast.

    Strings are parsed; ValueError for text that is no number. Floats are truncated towards zero to integers and
    saturate at the ends of the range (types of less than a byte wrap around, as ONNX defines); NaN becomes 0. Integers
    wrap around. `saturate` clamps numbers that overflow a float of at most 8 bits, including infinities, to its
    greatest or lowest finite value. `round_mode` ("up", "down", "nearest"; ValueError for others) applies to float8e8m0
    only. The result is a new array.
    """
    if x.dtype == object or x.dtype.kind in "US":
        return _from_strings(x, dtype)
    if dtype is DType.STRING:
        return np.array([_text(item) for item in x.ravel().tolist()], dtype=object).reshape(x.shape)
    if dtype.is_integer and DType.from_numpy(x.dtype).is_float:
        return _float_to_int(x, dtype if dtype.bits >= 8 else DType.INT32).astype(dtype.numpy)
    if dtype is DType.FLOAT8E8M0:
        return _power_of_two(x.astype(np.float32), saturate, round_mode)
    if dtype.is_float and dtype.itemsize == 1 and saturate:
        limit = float(_limits(dtype).max)
        return np.clip(x.astype(np.float32), -limit, limit).astype(dtype.numpy)
    return x.astype(dtype.numpy)


def _power_of_two(x: Any, saturate: bool, round_mode: str) -> Array:
    """float32 as float8e8m0, which holds the exponent alone: the sign is dropped, infinities and NaN become NaN.

    `round_mode` is that of `convert`; ValueError for an unknown one. With `saturate`, the greatest exponent is not
    rounded up to NaN.
    """
    if round_mode not in ("up", "down", "nearest"):
        raise ValueError(f"round_mode is {round_mode!r}, expected up, down or nearest")
    pattern = x.view(np.uint32)
    exponent, fraction = (pattern >> 23) & 0xFF, pattern & 0x7FFFFF
    half = 0x400000
    up = fraction > 0 if round_mode == "up" else (fraction > half) | ((fraction == half) & (exponent > 0))
    up &= (round_mode != "down") & (exponent < 0xFF) & ~(saturate & (exponent == 0xFE))
    code: Any = (exponent + up).astype(np.uint8)
    return code.view(DType.FLOAT8E8M0.numpy)


def _float_to_int(x: Array, dtype: DType) -> Array:
    info = _limits(dtype)
    low, high = int(info.min), int(info.max)
    wide: Any = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0)
    inside = (wide > float(low)) & (wide < float(high))  # float64 cannot represent the greatest int64 exactly
    safe = np.where(inside, wide, 0.0).astype(np.int64 if low else np.uint64)
    ends = np.where(wide > 0, np.array(high, safe.dtype), np.array(low, safe.dtype))
    return np.where(inside, safe, ends).astype(dtype.numpy)


def _limits(dtype: DType) -> Any:
    """The `finfo` or `iinfo` of an element type, also of those that NumPy lacks."""
    return (ml_dtypes.finfo if dtype.is_float else ml_dtypes.iinfo)(dtype.numpy)


def _from_strings(x: Array, dtype: DType) -> Array:
    if dtype is DType.STRING:
        return x.astype(object)
    items = [item.decode() if isinstance(item, bytes) else str(item) for item in x.ravel().tolist()]
    parse = float if dtype.is_float else int
    return np.array([parse(item) for item in items]).astype(dtype.numpy).reshape(x.shape)


def _text(item: Any) -> str:
    """A number as text. ONNX defines "NaN", "INF" and "-INF".

    Eight significant digits, and "0" and "1" for booleans, follow ONNX Runtime.
    """
    if isinstance(item, float):
        return f"{item:.8g}" if math.isfinite(item) else {"nan": "NaN"}.get(text := str(item), text.upper())
    return str(int(item))
