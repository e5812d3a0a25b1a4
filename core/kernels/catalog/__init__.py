"""The catalog of kernels: which nodes compiled code covers, with the facts the planner needs."""

from core.kernels.catalog import (
    attention,
    conv,
    copy,
    depthwise,
    direct,
    elementwise,
    gather,
    gemm,
    norm,
    pool,
    recurrent,
    reduce,
    resize,
    softmax,
    tiles,
    winograd,
)
from core.kernels.catalog.base import (
    VIEWS,
    In,
    KernelCall,
    KernelSpec,
    Operand,
    Out,
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
    "VIEWS", "In", "KernelCall", "KernelSpec", "Operand", "Out", "Packed", "Request", "Scratch", "Selector",
    "Status", "attention", "candidates", "conv", "copy", "covers", "depthwise", "direct", "elementwise", "gather",
    "gemm", "norm", "offers", "pool", "recurrent", "reduce", "resize", "select", "softmax", "tiles", "winograd",
]  # fmt: skip
