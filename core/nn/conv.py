"""Convolutions of images [N, C, H, W] and of sequences [N, C, L]."""

from __future__ import annotations

from typing import ClassVar

from core.ir.graph import Attr
from core.nn import init
from core.nn.functional import Size, spread
from core.nn.module import Module
from core.nn.tensor import Tensor


class _Conv(Module):
    """Family base: `axes` spatial axes. Weights are [out, in / groups, kernel...], as PyTorch's."""

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
        self.kernel_size, self.stride, self.dilation = (spread(s, self.axes) for s in (kernel_size, stride, dilation))
        self.padding = padding if isinstance(padding, str) else spread(padding, self.axes)
        self.weight = init.weights(out_channels, in_channels // groups, *self.kernel_size)
        fan_in = init.fans(self.weight.data.shape)[0]
        self.bias = init.spread(fan_in, out_channels) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        fits = x.ndim == self.axes + 2 and x.shape[1] == self.in_channels
        self.expect(fits, f"[N, {self.in_channels}, {', '.join('HWD'[: self.axes])}]", x)
        return x.op("Conv", self.weight, self.bias, **window(self), pads=self._pads())

    def _pads(self) -> tuple[int, ...]:
        """Before all axes, then behind them; "same" keeps sizes, and an odd rest goes behind."""
        if not isinstance(self.padding, str):
            return self.padding * 2
        if self.padding == "valid":
            return (0,) * 2 * self.axes
        if self.padding != "same" or any(stride != 1 for stride in self.stride):
            raise ValueError(f"padding is {self.padding!r}, expected numbers, 'valid', or with stride 1 'same'")
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
    """The transpose of a convolution, which makes images larger. Weights are [in, out / groups, kernel...]."""

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
        self.kernel_size, self.stride, self.dilation = (spread(s, 2) for s in (kernel_size, stride, dilation))
        self.padding, self.output_padding = spread(padding, 2), spread(output_padding, 2)
        self.weight = init.weights(in_channels, out_channels // groups, *self.kernel_size)
        fan_in = init.fans(self.weight.data.shape)[0]
        self.bias = init.spread(fan_in, out_channels) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        self.expect(x.ndim == 4 and x.shape[1] == self.in_channels, f"[N, {self.in_channels}, H, W]", x)
        padding = {"pads": self.padding * 2, "output_padding": self.output_padding}
        return x.op("ConvTranspose", self.weight, self.bias, **window(self), **padding)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"


def window(layer: _Conv | ConvTranspose2d) -> dict[str, Attr]:
    """How the kernel moves, as ONNX's attributes."""
    return {"strides": layer.stride, "dilations": layer.dilation, "group": layer.groups}
