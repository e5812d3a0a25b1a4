"""Products of numbers narrower than their sums: what fused products know beyond MatMul and Conv of ONNX.

| left operand | right operand | product and epilogue | |
|---|---|---|---|
| bfloat16 | float32 | float32 | the right operand is rounded to bfloat16 |
| float16 | float32 | float32 | the right operand is rounded to float16 |
| uint8 | int8 | int32 | exact |
| T | T | T | as in ONNX |
"""

from __future__ import annotations

from typing import Any

import numpy as np

from core.ir.graph import Array
from core.ir.types import DType
from core.ops.registry import Infer

_WIDER = {
    (DType.BFLOAT16, DType.FLOAT32): DType.FLOAT32,
    (DType.FLOAT16, DType.FLOAT32): DType.FLOAT32,
    (DType.UINT8, DType.INT8): DType.INT32,
}


def product_dtype(c: Infer) -> DType:
    """The element type of the product of the first two inputs; ModelError for types that do not go together."""
    left, right = c.dtype(0), c.dtype(1)
    if left is not right and (left, right) not in _WIDER:
        c.fail(f"cannot multiply {left} by {right}")
    return _WIDER.get((left, right), left)


def widened(left: Array, right: Array) -> tuple[Any, Any]:
    """Operands of different types as they are multiplied, in the type of their product; equal ones as they are."""
    wider = _WIDER.get((DType.from_numpy(left.dtype), DType.from_numpy(right.dtype)))
    if wider is None:
        return left, right
    if wider is DType.FLOAT32:
        right = right.astype(left.dtype)
    return left.astype(wider.numpy), right.astype(wider.numpy)


def check_epilogue(c: Infer, product: DType) -> None:
    """ModelError unless the epilogue, if there is one, takes elements of the product's type."""
    body = c.attr("epilogue")
    if body is not None and body.inputs[0].dtype is not product:
        c.fail(f"the epilogue takes {body.inputs[0].dtype}, the product is {product}")


def padded_total(weight: Any, fill: int) -> Any:
    """What `fill` in every place of a window adds to the channels of a convolution: [M] for weights [M, C, K...]."""
    return np.asarray(weight).reshape(weight.shape[0], -1).sum(1) * fill
