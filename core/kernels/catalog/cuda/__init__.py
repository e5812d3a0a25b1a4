"""Kernels for CUDA GPUs: the same nodes and facts as on a CPU, with tiles and grids."""

from core.kernels.catalog.cuda import (
    attention,
    conv,
    conv_gradient,
    copy,
    cumulative,
    depthwise,
    elementwise,
    gather,
    gemm,
    norm,
    pool,
    pool_gradient,
    recurrent,
    reduce,
    resize,
    scatter,
    softmax,
    topk,
)

__all__ = [
    "attention", "conv", "conv_gradient", "copy", "cumulative", "depthwise", "elementwise", "gather", "gemm", "norm",
    "pool", "pool_gradient", "recurrent", "reduce", "resize", "scatter", "softmax", "topk",
]  # fmt: skip
