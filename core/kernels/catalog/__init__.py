"""The catalog of kernels: which nodes compiled code covers, with the facts the planner needs."""

from core.kernels.catalog import (
    attention,
    conv,
    conv_batch,
    copy,
    depthwise,
    direct,
    elementwise,
    gather,
    gemm,
    norm,
    pool,
    pool_gradient,
    recurrent,
    reduce,
    resize,
    softmax,
    tiles,
    trees,
    winograd,
)
from core.kernels.catalog.base import (
    VIEWS,
    Block,
    In,
    KernelCall,
    KernelSpec,
    Operand,
    Out,
    Outer,
    Packed,
    Request,
    Scratch,
    Selector,
    Status,
    candidates,
    covers,
    offers,
    select,
)

__all__ = [
    "VIEWS", "Block", "In", "KernelCall", "KernelSpec", "Operand", "Out", "Outer", "Packed", "Request", "Scratch",
    "Selector", "Status", "attention", "candidates", "conv", "conv_batch", "copy", "covers", "depthwise", "direct",
    "elementwise", "gather", "gemm", "norm", "offers", "pool", "pool_gradient", "recurrent", "reduce", "resize",
    "select", "softmax", "tiles", "trees", "winograd",
]  # fmt: skip
