"""Kernels for CUDA GPUs: the same nodes and facts as on a CPU, with tiles and grids."""

from core.kernels.catalog.cuda import elementwise, gemm

__all__ = ["elementwise", "gemm"]
