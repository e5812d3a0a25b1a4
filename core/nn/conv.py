"""Convolutions of images [N, C, H, W] and of sequences [N, C, L]."""

from __future__ import annotations

from typing import ClassVar

from lathe.core.ir.graph import Attr
from lathe.core.nn import init
from lathe.core.nn.functional import Size, per_axis
from lathe.core.nn.module import Module
from lathe.core.nn.tensor import Tensor


class _Conv(Module):
    """The base class of convolutions over `axes` spatial axes. Weights are [out, in / groups, kernel...].

    `padding` is a number of zeros on both sides, one number per axis, "valid" (none) or "same" (see `_pads`).
    """

    axes: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"groups is {groups}, expected a divisor of {in_channels} and of {out_channels} channels")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = (per_axis(s, self.axes) for s in (kernel_size, stride, dilation))
        self.padding = padding if isinstance(padding, str) else per_axis(padding, self.axes)
        self.weight = init.new_weight(out_channels, in_channels // groups, *self.kernel_size)
        fan_in = init.fans(self.weight.data.shape)[0]
        self.bias = init.new_uniform(fan_in, out_channels) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        fits = x.ndim == self.axes + 2 and x.shape[1] == self.in_channels
        self.expect(fits, f"[N, {self.in_channels}, {', '.join('HWD'[: self.axes])}]", x)
        return x.op("Conv", self.weight, self.bias, **window(self), pads=self._pads())

    def _pads(self) -> tuple[int, ...]:
        """The padding as ONNX's `pads`: at the start of each axis, then at the end of each axis.

        "same" keeps the sizes; an odd total puts the extra element at the end. ValueError for another text, or for
        "same" with a stride other than 1.
        """
        if not isinstance(self.padding, str):
            return self.padding * 2
        if self.padding == "valid":
            return (0,) * 2 * self.axes
        if self.padding != "same" or any(stride != 1 for stride in self.stride):
            raise ValueError(f"padding: expected numbers, 'valid', or with stride 1 'same', got {self.padding!r}")
        totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        return (*(total // 2 for total in totals), *(total - total // 2 for total in totals))

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        text += f", padding={self.padding}" if self.padding != (0,) * self.axes else ""
        text += f", dilation={self.dilation}" if self.dilation != (1,) * self.axes else ""
        text += f", groups={self.groups}" if self.groups != 1 else ""
        return text + ("" if self.bias is not None else ", bias=False")


class Conv1d(_Conv):
    axes = 1


class Conv2d(_Conv):
    axes = 2


class ConvTranspose2d(Module):
    """The transposed convolution of images. Weights are [in, out / groups, kernel...]."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
    ) -> None:
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"groups is {groups}, expected a divisor of {in_channels} and of {out_channels} channels")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = (per_axis(s, 2) for s in (kernel_size, stride, dilation))
        self.padding, self.output_padding = per_axis(padding, 2), per_axis(output_padding, 2)
        self.weight = init.new_weight(in_channels, out_channels // groups, *self.kernel_size)
        fan_in = init.fans(self.weight.data.shape)[0]
        self.bias = init.new_uniform(fan_in, out_channels) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        self.expect(x.ndim == 4 and x.shape[1] == self.in_channels, f"[N, {self.in_channels}, H, W]", x)
        padding = {"pads": self.padding * 2, "output_padding": self.output_padding}
        return x.op("ConvTranspose", self.weight, self.bias, **window(self), **padding)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"


def window(layer: _Conv | ConvTranspose2d) -> dict[str, Attr]:
    """The ONNX attributes `strides`, `dilations` and `group` of a layer."""
    return {"strides": layer.stride, "dilations": layer.dilation, "group": layer.groups}
