"""Type rules of products whose operands are narrower than their sums, beyond ONNX's MatMul and Conv.

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

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType
from lathe.core.ops.opdef.registry import Infer

_WIDER = {
    (DType.BFLOAT16, DType.FLOAT32): DType.FLOAT32,
    (DType.FLOAT16, DType.FLOAT32): DType.FLOAT32,
    (DType.UINT8, DType.INT8): DType.INT32,
}


def product_dtype(c: Infer) -> DType:
    """The element type of the product of the first two inputs. ModelError for types that cannot be multiplied."""
    left, right = c.dtype(0), c.dtype(1)
    if left is not right and (left, right) not in _WIDER:
        c.fail(f"cannot multiply {left} by {right}")
    return _WIDER.get((left, right), left)


def as_product_operands(left: Array, right: Array) -> tuple[Any, Any]:
    """Both operands in the element type of their product, the right one rounded before as the table says.

    Operands of one type are returned unchanged.
    """
    wider = _WIDER.get((DType.from_numpy(left.dtype), DType.from_numpy(right.dtype)))
    if wider is None:
        return left, right
    if wider is DType.FLOAT32:
        right = right.astype(left.dtype)
    return left.astype(wider.numpy), right.astype(wider.numpy)


def check_epilogue(c: Infer, product: DType) -> None:
    """ModelError if there is an epilogue whose first input has another type than the product."""
    body = c.attr("epilogue")
    if body is not None and body.inputs[0].dtype is not product:
        c.fail(f"the epilogue takes {body.inputs[0].dtype}, the product is {product}")


def padded_total(weight: Any, fill: int) -> Any:
    """The contribution of a window filled with `fill` to each output channel: [M] for weights [M, C, K...]."""
    return np.asarray(weight).reshape(weight.shape[0], -1).sum(1) * fill
