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

FLOAT32 = Kind("float32", frozenset({DType.FLOAT32}))
CODE = Kind("int8 or uint8", frozenset({DType.INT8, DType.UINT8}))


@register
class DequantizedMatMul(OpDef):
    """epilogue(A @ W, *extras), where W[k, j] = number(codes[k, j]) * scales[g, j] + offsets[g, j] and g = k // block.

    A is float32[..., K], codes [K, N], scales and offsets float32[ceil(K / block), N]. A code of int8 is its own
    number. A code of uint8 is an index of `numbers`, which has 2, 4 or 16 elements. Extras broadcast to the result
    [..., N].
    """

    domain = "lathe"
    inputs = "A, codes, scales, offsets?, *extras"
    outputs = "Y"
    attrs = {"block": Required("integer"), "numbers": (), "epilogue": None}
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
        weights = known * _spread(scales, block, len(codes))
        if offsets is not None:
            weights = weights + _spread(offsets, block, len(codes))
        return apply_epilogue(c, np.asarray(np.matmul(a, weights)), extras)


def _spread(values: Array, block: int, rows: int) -> Array:
    """Values of blocks of rows, repeated for each of the `rows` rows."""
    return np.repeat(values, block, axis=0)[:rows]
