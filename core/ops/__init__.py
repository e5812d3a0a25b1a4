"""The operators. Importing this package registers all families."""

from core.ir.build import set_inference
from core.ops import (
    activation,
    control,
    conv,
    creation,
    einsum,
    elementwise,
    fused,
    indexing,
    logic,
    matmul,
    movement,
    norm,
    order,
    pool,
    qlinear,
    quantize,
    reduce,
    resize,
    scan,
    slicing,
    softmax,
)
from core.ops.inference import infer_node

set_inference(infer_node)

__all__ = [
    "activation",
    "control",
    "conv",
    "creation",
    "einsum",
    "elementwise",
    "fused",
    "indexing",
    "logic",
    "matmul",
    "movement",
    "norm",
    "order",
    "pool",
    "qlinear",
    "quantize",
    "reduce",
    "resize",
    "scan",
    "slicing",
    "softmax",
]
