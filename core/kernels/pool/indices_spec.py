"""MaxPool with indices of the maxima, for channels-first images of any size."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.dynamic_windows.spec import DynamicWindow, dynamic_windows_of
from lathe.core.kernels.shared.attributes import attribute, integers
from lathe.core.kernels.shared.nest import has_plannable_types, traffic

_DTYPES = frozenset({DType.FLOAT32, DType.FLOAT64, DType.INT8, DType.UINT8})
_MOST_TAPS = 64  # of a window, since the code unrolls them
_MOST_PLACES = 2**31  # of an image, since the kernel computes indices in int32


@dataclass(frozen=True)
class PoolIndicesSpec(KernelSpec):
    """The maximum of each window of `planes` images, and its index in the whole input (int64).

    Of equal elements the first one counts. NaN is the maximum if it is the window's first element inside the image;
    otherwise it is ignored.
    """

    family: ClassVar[str] = "pool_indices"
    generator: ClassVar[str] = "pool.indices_cpu"
    dtype: DType
    planes: Dim
    windows: tuple[DynamicWindow, ...]

    @property
    def taps(self) -> int:
        """The number of places in a window."""
        return prod(window.kernel for window in self.windows)

    @property
    def summary(self) -> str:
        return f"max of {'x'.join(str(window.kernel) for window in self.windows)}, and where"


def pool_indices(request: Request) -> KernelCall | None:
    """Selector of MaxPool with indices, for channels-first images and windows of at most 64 places.

    The types are float32, float64, int8 and uint8. None for other nodes, if generated code cannot compute a dimension,
    for column-major indices (`storage_order`), for images of 2^31 or more pixels, and for dynamic extents with
    `auto_pad` SAME_UPPER or SAME_LOWER.
    """
    node, kernel = request.node, integers(request.node, "kernel_shape")
    x, y = node.inputs[0], node.outputs[0]
    if x is None or kernel is None or len(node.outputs) < 2 or not has_plannable_types(node) or x.dtype not in _DTYPES:
        return None
    if attribute(node, "layout") != "NCHW" or attribute(node, "storage_order") or prod(kernel) > _MOST_TAPS:
        return None
    sizes = [size for size in x.shape[2:] if isinstance(size, int)]
    windows = dynamic_windows_of(node, x.shape[2:], y.shape[2:], kernel)
    if windows is None or prod(sizes) >= _MOST_PLACES:
        return None
    spec = PoolIndicesSpec(x.dtype, x.shape[0] * x.shape[1], windows)
    return KernelCall(spec, (In(0), Out(0), Out(1)), flops=y.tensor.size * spec.taps, bytes=traffic(node))
