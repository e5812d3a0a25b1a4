"""Kernels for CUDA GPUs: the same nodes and facts as on a CPU, with tiles and grids."""

from core.kernels.catalog.cuda import elementwise, gemm, norm, reduce, softmax

__all__ = ["elementwise", "gemm", "norm", "reduce", "softmax"]
