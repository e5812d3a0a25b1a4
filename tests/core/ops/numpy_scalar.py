"""`ScalarOps` over whole NumPy arrays: the smallest device that scalar expressions can run on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lathe.core.ir.types import DType
from lathe.core.ops.opdef.numeric import convert, erf, truncated_div

Operand = Any


class NumpyScalar:
    """Every primitive as its NumPy function; Python numbers take the other operand's type."""

    def dtype(self, x: Operand) -> DType:
        return DType.from_numpy(np.asarray(x).dtype)

    def const(self, value: float, dtype: DType) -> Operand:
        return np.array(value, dtype.numpy)

    def cast(self, x: Operand, dtype: DType) -> Operand:
        return convert(np.asarray(x), dtype)

    def div(self, x: Operand, y: Operand) -> Operand:
        integers = np.result_type(x, y).kind in "iu"
        return truncated_div(x, y) if integers else np.divide(x, y)

    def fma(self, x: Operand, y: Operand, z: Operand) -> Operand:
        return x * y + z

    def quantized(self, x: Operand, zero: int, dtype: DType) -> Operand:
        return self.cast(np.rint(x) + zero, dtype)

    def select(self, condition: Operand, x: Operand, y: Operand) -> Operand:
        assert np.asarray(condition).dtype == np.bool_
        return np.where(condition, x, y)

    def erf(self, x: Operand) -> Operand:
        return np.vectorize(math.erf, otypes=[np.asarray(x).dtype])(x) if np.size(x) else erf(x)

    def sigmoid(self, x: Operand) -> Operand:
        return 1 / (1 + np.exp(-x))

    def bit_not(self, x: Operand) -> Operand:
        return np.bitwise_not(x)

    add, sub, mul, rem = (staticmethod(f) for f in (np.add, np.subtract, np.multiply, np.fmod))
    neg, abs, max, min = (staticmethod(f) for f in (np.negative, np.abs, np.maximum, np.minimum))
    sqrt, exp, log, tanh = (staticmethod(f) for f in (np.sqrt, np.exp, np.log, np.tanh))
    sin, cos, pow, rint = (staticmethod(f) for f in (np.sin, np.cos, np.power, np.rint))
    floor, ceil = staticmethod(np.floor), staticmethod(np.ceil)
    lt, le, eq = staticmethod(np.less), staticmethod(np.less_equal), staticmethod(np.equal)
    bit_and, bit_or, bit_xor = (staticmethod(f) for f in (np.bitwise_and, np.bitwise_or, np.bitwise_xor))
    shift_left, shift_right = staticmethod(np.left_shift), staticmethod(np.right_shift)
