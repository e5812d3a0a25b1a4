"""Kernels for CUDA GPUs: the same nodes and facts as on a CPU, with tiles and grids."""

from core.kernels.catalog.cuda import conv, copy, elementwise, gemm, norm, reduce, softmax

__all__ = ["conv", "copy", "elementwise", "gemm", "norm", "reduce", "softmax"]
