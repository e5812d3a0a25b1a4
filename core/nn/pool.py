"""Pooling of images [N, C, H, W]."""

from __future__ import annotations

from typing import Any

import numpy as np

from core.nn.functional import Size, spread
from core.nn.module import Module
from core.nn.tensor import Tensor, tensor


class _Pool(Module):
    """Family base: a window that by default moves by its own size."""

    def __init__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, ceil_mode: bool = False
    ) -> None:
        self.kernel_size = spread(kernel_size, 2)
        self.stride = self.kernel_size if stride is None else spread(stride, 2)
        self.padding, self.ceil_mode = spread(padding, 2), ceil_mode

    def pooled(self, op: str, x: Tensor, **attrs: Any) -> Tensor:
        self.expect(x.ndim == 4, "[N, C, H, W]", x)
        window = {"kernel_shape": self.kernel_size, "strides": self.stride, "pads": self.padding * 2}
        return x.op(op, **window, **attrs, ceil_mode=int(self.ceil_mode))

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class MaxPool2d(_Pool):
    """The greatest element of each window."""

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode)
        self.dilation = spread(dilation, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pooled("MaxPool", x, dilations=self.dilation)


class AvgPool2d(_Pool):
    """The mean of each window, padding counted unless told otherwise."""

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode)
        self.count_include_pad = count_include_pad

    def forward(self, x: Tensor) -> Tensor:
        return self.pooled("AveragePool", x, count_include_pad=int(self.count_include_pad))


class AdaptiveAvgPool2d(Module):
    """The mean of as many windows as `output_size` says; a single window takes images of any size.

    Along an axis of `size`, window i of `count` goes from floor(i * size / count) to ceil((i + 1) * size / count), as
    PyTorch's: windows of one size where `size` is a multiple, else of several, which are a product with their shares.
    """

    def __init__(self, output_size: Size) -> None:
        self.output_size = spread(output_size, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.expect(x.ndim == 4, "[N, C, H, W]", x)
        if self.output_size == (1, 1):
            return x.op("GlobalAveragePool")
        self.expect(all(isinstance(size, int) for size in x.shape[2:]), "an image of known size", x)
        sizes = [x.extent(2), x.extent(3)]
        pairs = list(zip(sizes, self.output_size, strict=True))
        if all(size % count == 0 for size, count in pairs):
            window = tuple(size // count for size, count in pairs)
            return x.op("AveragePool", kernel_shape=window, strides=window)
        rows, columns = (tensor(_shares(size, count)) for size, count in pairs)
        return rows @ (x @ columns.T)

    def extra_repr(self) -> str:
        return f"output_size={self.output_size}"


def _shares(size: int, count: int) -> Any:
    """How much each element has in each window: float32[count, size]."""
    shares = np.zeros((count, size), np.float32)
    for i in range(count):
        first, end = i * size // count, -(-(i + 1) * size // count)
        shares[i, first:end] = 1 / (end - first)
    return shares
