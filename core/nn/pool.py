"""Pooling and resizing of images [N, C, H, W] and of sequences [N, C, L]."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from lathe.core.ir.graph import Attr
from lathe.core.nn.functional import Size, per_axis
from lathe.core.nn.module import Module
from lathe.core.nn.tensor import Tensor, tensor


class _Pool(Module):
    """The base class of pooling layers: a window over `axes` spatial axes, whose default stride is its size.

    ValueError if the padding exceeds half of the window.
    """

    axes: ClassVar[int]

    def __init__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, ceil_mode: bool = False
    ) -> None:
        self.kernel_size = per_axis(kernel_size, self.axes)
        self.stride = self.kernel_size if stride is None else per_axis(stride, self.axes)
        self.padding, self.ceil_mode = per_axis(padding, self.axes), ceil_mode
        if any(2 * pad > kernel for pad, kernel in zip(self.padding, self.kernel_size, strict=True)):
            raise ValueError(f"padding: expected at most half of the kernel {self.kernel_size}, got {self.padding}")

    def pool(self, op: str, x: Tensor, **attrs: Any) -> Tensor:
        self.expect(x.ndim == self.axes + 2, f"[N, C, {', '.join('HWD'[: self.axes])}]", x)
        window = {"kernel_shape": self.kernel_size, "strides": self.stride, "pads": self.padding * 2}
        return x.op(op, **window, **attrs, ceil_mode=int(self.ceil_mode))

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class _MaxPool(_Pool):
    """The base class of max pooling."""

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode)
        self.dilation = per_axis(dilation, self.axes)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool("MaxPool", x, dilations=self.dilation)


class MaxPool1d(_MaxPool):
    axes = 1


class MaxPool2d(_MaxPool):
    axes = 2


class _AvgPool(_Pool):
    """The base class of average pooling. Padding counts as zeros unless `count_include_pad` is False."""

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
        return self.pool("AveragePool", x, count_include_pad=int(self.count_include_pad))


class AvgPool1d(_AvgPool):
    axes = 1


class AvgPool2d(_AvgPool):
    axes = 2


class AdaptiveAvgPool2d(Module):
    """The means of `output_size` windows per axis. With a single window, images may have symbolic sizes.

    Along an axis of `size`, window i of `count` goes from floor(i * size / count) to ceil((i + 1) * size / count), as
    in PyTorch. If `size` is a multiple of `count`, this is average pooling. Otherwise the windows differ in size, and
    the means are computed as matrix products with the weights of the elements.
    """

    def __init__(self, output_size: Size) -> None:
        self.output_size = per_axis(output_size, 2)

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
        rows, columns = (tensor(_window_weights(size, count)) for size, count in pairs)
        return rows @ (x @ columns.T)

    def extra_repr(self) -> str:
        return f"output_size={self.output_size}"


class ZeroPad2d(Module):
    """Pads images with zeros: the same number on each side, or (left, right, top, bottom)."""

    def __init__(self, padding: Size) -> None:
        self.padding = per_axis(padding, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.expect(x.ndim == 4, "[N, C, H, W]", x)
        left, right, top, bottom = self.padding
        return Tensor(x.term.pad(((0, 0), (0, 0), (top, bottom), (left, right))).value)

    def extra_repr(self) -> str:
        return f"{self.padding}"


class Upsample(Module):
    """Resizes images to `size`, or by `scale_factor`, with nearest or bilinear interpolation.

    With `align_corners`, bilinear interpolation aligns the centers of the corner pixels, otherwise the edges of the
    images.
    """

    def __init__(
        self,
        size: Size | None = None,
        scale_factor: float | tuple[float, float] | None = None,
        mode: str = "nearest",
        align_corners: bool = False,
    ) -> None:
        if mode not in ("nearest", "bilinear"):
            raise ValueError(f"mode: expected nearest or bilinear, got {mode!r}")
        if (size is None) == (scale_factor is None):
            raise ValueError("Upsample: expected either `size` or `scale_factor`")
        self.size = None if size is None else per_axis(size, 2)
        factors = (scale_factor,) * 2 if isinstance(scale_factor, int | float) else scale_factor
        self.scale_factor = None if factors is None else tuple(map(float, factors))
        self.mode, self.align_corners = mode, align_corners

    def forward(self, x: Tensor) -> Tensor:
        self.expect(x.ndim == 4, "[N, C, H, W]", x)
        sizes: dict[str, Attr] = {"sizes": self.size} if self.size else {"scales": self.scale_factor}
        return x.op("Resize", None, None, None, axes=(2, 3), **sizes, **self._sampling())

    def _sampling(self) -> dict[str, Attr]:
        """The attributes of ONNX's Resize for the interpolation: mode, coordinates and rounding, as in PyTorch."""
        if self.mode == "nearest":
            return {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
        corners = "align_corners" if self.align_corners else "half_pixel"
        return {"mode": "linear", "coordinate_transformation_mode": corners}

    def extra_repr(self) -> str:
        how = f"size={self.size}" if self.size else f"scale_factor={self.scale_factor}"
        return f"{how}, mode={self.mode}"


def _window_weights(size: int, count: int) -> Any:
    """The weight of each of `size` elements in the mean of each of `count` adaptive windows: float32[count, size]."""
    weights = np.zeros((count, size), np.float32)
    for i in range(count):
        first, end = i * size // count, -(-(i + 1) * size // count)
        weights[i, first:end] = 1 / (end - first)
    return weights
