"""`DequantizedMatMul`: a matrix product with weights that stay quantized in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.nn.fused import apply_epilogue, check_extras, epilogue_dtype
from lathe.core.ops.nn.narrow_products import check_epilogue
from lathe.core.ops.opdef.registry import Call, Infer, OpDef, Required, register
from lathe.core.ops.opdef.type_rules import Kind, check_kind

_LARGEST = np.float32(127)  # of a rounded element of A
LEAST_MAGNITUDE = 2.0**-100  # magnitudes of a group count as at least this: the factor that makes integers is finite
_MOST_GROUP = 128  # elements of A with one scale, where blocks of the weight can be cut
FLOAT32 = Kind("float32", frozenset({DType.FLOAT32}))
CODE = Kind("int8 or uint8", frozenset({DType.INT8, DType.UINT8}))


@register
class DequantizedMatMul(OpDef):
    """epilogue(A @ W, *extras), where W[k, j] = number(codes[k, j]) * scales[g, j] + offsets[g, j] and g = k // block.

    A is float32[..., K], codes [K, N], scales and offsets float32[ceil(K / block), N]. A code of int8 is its own
    number. A code of uint8 is an index of `numbers`, which has 2, 4 or 16 elements. Extras broadcast to the result
    [..., N].

    With `row_bits` 8, kernels may round A to int8 as the reference does (`rounded_product`); 0 means float32.
    """

    domain = "lathe"
    inputs = "A, codes, scales, offsets?, *extras"
    outputs = "Y"
    attrs = {"block": Required("integer"), "numbers": (), "epilogue": None, "row_bits": 0}
    no_gradient = "only passes emit it, after differentiation"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, FLOAT32)
        check_kind(c, 1, CODE)
        a, codes, scales = c.tensor(0).dims, c.tensor(1).dims, c.tensor(2).dims
        block = c.attr("block")
        if len(a) < 2 or len(codes) != 2 or a[-1] != codes[0]:
            c.fail(f"cannot multiply {c.tensor(0)} by {c.tensor(1)}")
        expected = (-(-int(codes[0]) // block), codes[1]) if isinstance(codes[0], int) else scales
        if scales != expected or (c.has_input(3) and c.tensor(3).dims != expected):
            c.fail(f"scales are {c.tensor(2)}, expected [{expected[0]},{expected[1]}] for blocks of {block}")
        shape = (*a[:-1], codes[1])
        check_extras(c, 4, shape)
        check_epilogue(c, DType.FLOAT32)
        return [TensorType(epilogue_dtype(c, DType.FLOAT32), shape)]

    def reference(
        self, c: Call, a: Array, codes: Array, scales: Array, offsets: Array | None = None, *extras: Array
    ) -> Array:
        numbers, block = c.attr("numbers"), c.attr("block")
        known = np.asarray(numbers, np.float32)[codes] if numbers else codes.astype(np.float32)
        if c.attr("row_bits"):
            return apply_epilogue(c, rounded_product(a, known, scales, offsets, block), extras)
        weights = known * _spread(scales, block, len(codes))
        if offsets is not None:
            weights = weights + _spread(offsets, block, len(codes))
        return apply_epilogue(c, np.asarray(np.matmul(a, weights)), extras)


def group_of(block: int, depth: int) -> int:
    """Adjacent elements of a row of A that share a scale: those of a block of the weight, but at most 128.

    A block is not cut if 128 does not divide it, unless it is the only one.
    """
    block = min(block, depth)
    can_cut = block == depth or block % _MOST_GROUP == 0
    return _MOST_GROUP if block > _MOST_GROUP and can_cut else block


def rounded_product(a: Array, numbers: Array, scales: Array, offsets: Array | None, block: int) -> Array:
    """A @ W with A rounded to int8, float32[..., N], for W as in `DequantizedMatMul`; `numbers` are those of all codes.

    The elements of a row of A that belong to one group (`group_of`) have a scale of their own: the largest magnitude
    is 127, and 0 is 0. Products of a group add up exactly, and groups add up in float32, with fused multiply-adds. Each
    element of A changes by at most 1/254 of the largest magnitude in its group, or of 2^-100 if that is larger.
    """
    depth = len(numbers)
    group = group_of(block, depth)
    total = np.zeros((*a.shape[:-1], numbers.shape[1]), np.float32)
    for start in range(0, depth, group):
        whole, unit = _rounded(a[..., start : start + group])
        sums = np.matmul(whole.astype(np.float64), numbers[start : start + group].astype(np.float64))
        with np.errstate(invalid="ignore", over="ignore"):  # elements of A that are not finite
            total = _multiply_add(sums.astype(np.float32) * unit, scales[start // block], total)
            if offsets is not None:
                total = _multiply_add(whole.sum(axis=-1, keepdims=True) * unit, offsets[start // block], total)
    return total


def _rounded(part: Array) -> tuple[Array, Array]:
    """Rows as integers from -127 to 127, float32, and the unit of each row, float32 [..., 1]."""
    largest = np.maximum(np.abs(part).max(axis=-1, keepdims=True), np.float32(LEAST_MAGNITUDE))
    with np.errstate(invalid="ignore"):
        whole = np.rint(part * (_LARGEST / largest))
    return np.where(np.isnan(whole), np.float32(0), whole), largest * (np.float32(1) / _LARGEST)


def _multiply_add(x: Array, y: Array, z: Array) -> Array:
    """x * y + z, rounded once: products of float32 are exact in float64."""
    return np.asarray((x.astype(np.float64) * y + z).astype(np.float32))


def _spread(values: Array, block: int, rows: int) -> Array:
    """Values of blocks of rows, repeated for each of the `rows` rows."""
    return np.repeat(values, block, axis=0)[:rows]
