"""Kernels for CUDA GPUs: the same nodes and facts as on a CPU, with tiles and grids."""

from core.kernels.catalog.cuda import conv, copy, elementwise, gather, gemm, norm, pool, reduce, softmax

__all__ = ["conv", "copy", "elementwise", "gather", "gemm", "norm", "pool", "reduce", "softmax"]
