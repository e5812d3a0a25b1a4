"""MaxPool that tells where the greatest elements lie: images with their channels first, of any sizes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from core.ir.types import Dim, DType
from core.kernels.catalog.attributes import attribute, integers
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Request, covers
from core.kernels.catalog.nest import has_plannable_types, traffic
from core.kernels.catalog.open_windows import OpenWindow, open_windows_of

_DTYPES = frozenset({DType.FLOAT32, DType.FLOAT64, DType.INT8, DType.UINT8})
_MOST_TAPS = 64  # which the code has one after the other
_MOST_PLACES = 2**31  # of an image: their numbers are int32


@dataclass(frozen=True)
class PoolIndicesSpec(KernelSpec):
    """The greatest element of each window of `planes` images, the first of equal ones, and its number in the whole
    input, int64. NaN is greatest where a window begins with it, and else is left out."""

    family: ClassVar[str] = "pool_indices"
    dtype: DType
    planes: Dim
    windows: tuple[OpenWindow, ...]

    @property
    def taps(self) -> int:
        """Places in a window."""
        return prod(window.kernel for window in self.windows)

    @property
    def summary(self) -> str:
        return f"max of {'x'.join(str(window.kernel) for window in self.windows)}, and where"


@covers("MaxPool")
def pool_indices(request: Request) -> KernelCall | None:
    """None where nobody asks for the indices, for other element types, large windows and numbers by columns."""
    node, kernel = request.node, integers(request.node, "kernel_shape")
    x, y = node.inputs[0], node.outputs[0]
    if x is None or kernel is None or len(node.outputs) < 2 or not has_plannable_types(node) or x.dtype not in _DTYPES:
        return None
    if attribute(node, "layout") != "NCHW" or attribute(node, "storage_order") or prod(kernel) > _MOST_TAPS:
        return None
    sizes = [size for size in x.shape[2:] if isinstance(size, int)]
    windows = open_windows_of(node, x.shape[2:], y.shape[2:], kernel)
    if windows is None or prod(sizes) >= _MOST_PLACES:
        return None
    spec = PoolIndicesSpec(x.dtype, x.shape[0] * x.shape[1], windows)
    return KernelCall(spec, (In(0), Out(0), Out(1)), flops=y.tensor.size * spec.taps, bytes=traffic(node))
