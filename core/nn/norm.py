"""Normalization layers. Their trainable scale and shift are named `weight` and `bias`, as in PyTorch."""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import numpy as np

from lathe.core.ir.types import DType
from lathe.core.nn.module import Module
from lathe.core.nn.parameter import Buffer, Parameter
from lathe.core.nn.tensor import Tensor, tensor

Shape: TypeAlias = int | tuple[int, ...]


class _BatchNorm(Module):
    """The base class of batch normalization: every channel is normalized over the batch.

    Inference uses `running_mean` and `running_var`. A training step on a traced graph, and eager runs in training mode,
    use the statistics of the batch. New running statistics are `(1 - momentum) * old + momentum * batch` with the
    population variance, whereas PyTorch uses the sample variance (n / (n - 1) times as large for n values per channel).
    """

    ranks: ClassVar[tuple[int, ...]]

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        self.num_features, self.eps, self.momentum, self.affine = num_features, eps, momentum, affine
        ones, zeros = np.ones(num_features, np.float32), np.zeros(num_features, np.float32)
        self.weight = Parameter(ones) if affine else None
        self.bias = Parameter(zeros) if affine else None
        self.running_mean = Buffer(zeros, statistics=True)
        self.running_var = Buffer(ones, statistics=True)
        self.num_batches_tracked = Buffer(np.int64(0))

    def forward(self, x: Tensor) -> Tensor:
        fits = x.ndim in self.ranks and x.shape[1] == self.num_features
        self.expect(fits, " or ".join(f"[N, {self.num_features}{', ...' * (rank > 2)}]" for rank in self.ranks), x)
        attrs = {"epsilon": self.eps, "momentum": 1 - self.momentum}
        affine = (_scale(self.weight, self.num_features), _shift(self.bias, self.num_features))
        inputs = (*affine, self.running_mean, self.running_var)
        if not (self.training and x.is_computed):
            return x.op("BatchNormalization", *inputs, **attrs)
        y, mean, variance = x.ops("BatchNormalization", *inputs, outputs=3, **attrs, training_mode=1)
        self.running_mean.data, self.running_var.data = mean.numpy(), variance.numpy()
        self.num_batches_tracked.data = self.num_batches_tracked.data + 1
        return y

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}"


class BatchNorm1d(_BatchNorm):
    """Batch normalization of each channel of [N, C] or [N, C, L]; inference uses the running statistics."""

    ranks = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Batch normalization of each channel of [N, C, H, W]; inference uses the running statistics."""

    ranks = (4,)


class LayerNorm(Module):
    """Layer normalization of float32 over the last axes, which have the shape `normalized_shape`."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True
    ) -> None:
        self.normalized_shape = _shape(normalized_shape)
        self.eps, self.elementwise_affine = eps, elementwise_affine
        ones, zeros = np.ones(self.normalized_shape, np.float32), np.zeros(self.normalized_shape, np.float32)
        self.weight = Parameter(ones) if elementwise_affine else None
        self.bias = Parameter(zeros) if elementwise_affine and bias else None

    def forward(self, x: Tensor) -> Tensor:
        _expect_trailing(self, self.normalized_shape, x)
        weight, axis = _scale(self.weight, *self.normalized_shape), -len(self.normalized_shape)
        return x.op("LayerNormalization", weight, self.bias, axis=axis, epsilon=self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class RMSNorm(Module):
    """x / sqrt(mean(x^2) + eps) * weight for float32, with the mean over the last axes (Zhang and Sennrich, 2019).

    The default `eps` is the machine epsilon of float32.
    """

    def __init__(self, normalized_shape: Shape, eps: float | None = None, elementwise_affine: bool = True) -> None:
        self.normalized_shape = _shape(normalized_shape)
        self.eps = float(np.finfo(np.float32).eps) if eps is None else eps
        self.weight = Parameter(np.ones(self.normalized_shape, np.float32)) if elementwise_affine else None

    def forward(self, x: Tensor) -> Tensor:
        _expect_trailing(self, self.normalized_shape, x)
        weight, axis = _scale(self.weight, *self.normalized_shape), -len(self.normalized_shape)
        return x.op("RMSNormalization", weight, axis=axis, epsilon=self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class GroupNorm(Module):
    """Group normalization of [N, C, ...]: over groups of channels of each row (Wu and He, 2018)."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        if num_channels % num_groups:
            raise ValueError(f"num_groups: expected a divisor of {num_channels} channels, got {num_groups}")
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        ones, zeros = np.ones(num_channels, np.float32), np.zeros(num_channels, np.float32)
        self.weight = Parameter(ones) if affine else None
        self.bias = Parameter(zeros) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        self.expect(x.ndim >= 2 and x.shape[1] == self.num_channels, f"[N, {self.num_channels}, ...]", x)
        affine = (_scale(self.weight, self.num_channels), _shift(self.bias, self.num_channels))
        return x.op("GroupNormalization", *affine, num_groups=self.num_groups, epsilon=self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}"


class InstanceNorm2d(Module):
    """Instance normalization: every channel of every image [N, C, H, W] is normalized by itself.

    There are no running statistics, so `momentum` has no effect.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = False) -> None:
        self.num_features, self.eps, self.affine = num_features, eps, affine
        self.weight = Parameter(np.ones(num_features, np.float32)) if affine else None
        self.bias = Parameter(np.zeros(num_features, np.float32)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        self.expect(x.ndim == 4 and x.shape[1] == self.num_features, f"[N, {self.num_features}, H, W]", x)
        affine = (_scale(self.weight, self.num_features), _shift(self.bias, self.num_features))
        return x.op("InstanceNormalization", *affine, epsilon=self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}"


def _scale(weight: Parameter | None, *shape: int) -> Tensor:
    """The scale: `weight`, or ones if the layer has none."""
    return tensor(np.ones(shape, np.float32)) if weight is None else weight


def _shift(bias: Parameter | None, *shape: int) -> Tensor:
    """The shift: `bias`, or zeros if the layer has none."""
    return tensor(np.zeros(shape, np.float32)) if bias is None else bias


def _shape(shape: Shape) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _expect_trailing(layer: Module, shape: tuple[int, ...], x: Tensor) -> None:
    fits = x.dtype is DType.FLOAT32 and x.shape[-len(shape) :] == shape
    layer.expect(fits, f"float32[..., {', '.join(map(str, shape))}]", x)
