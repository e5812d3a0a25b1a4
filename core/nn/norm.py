"""Normalizations. Those that train scale and shift name them `weight` and `bias`."""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import numpy as np

from core.ir.types import DType
from core.nn.module import Module
from core.nn.parameter import Buffer, Parameter
from core.nn.tensor import Tensor, tensor

Shape: TypeAlias = int | tuple[int, ...]


class _BatchNorm(Module):
    """Family base: every channel normalized over the batch; `running_mean` and `running_var` are what inference uses.

    A traced graph has a BatchNormalization node, which a training step runs on the batch's own statistics; so do eager
    runs in training mode. New running statistics are `(1 - momentum) * old + momentum * batch`, of the batch's variance
    as it is, where PyTorch's running variance is that of a sample (n / (n - 1) times as much).
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
    """Of [N, C] or [N, C, L]."""

    ranks = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Of [N, C, H, W]."""

    ranks = (4,)


class LayerNorm(Module):
    """The last axes, `normalized_shape`, of every row normalized together."""

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
    """The last axes divided by the root of their mean square (Zhang and Sennrich, 2019). `eps` is by default that of
    the element type."""

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
    """Groups of channels of every row normalized together (Wu and He, 2018): [N, C, ...]."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        if num_channels % num_groups:
            raise ValueError(f"num_groups is {num_groups}, expected a divisor of {num_channels} channels")
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
    """Every channel of every image [N, C, H, W] normalized by itself."""

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
    """What operators multiply by: ones where a layer has no weight."""
    return tensor(np.ones(shape, np.float32)) if weight is None else weight


def _shift(bias: Parameter | None, *shape: int) -> Tensor:
    return tensor(np.zeros(shape, np.float32)) if bias is None else bias


def _shape(given: Shape) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


def _expect_trailing(layer: Module, shape: tuple[int, ...], x: Tensor) -> None:
    fits = x.dtype is DType.FLOAT32 and x.shape[-len(shape) :] == shape
    layer.expect(fits, f"float32[..., {', '.join(map(str, shape))}]", x)
