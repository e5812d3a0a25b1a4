"""Layers with a backward pass, and Adam, in NumPy: enough to train a small convolutional network.

It rebuilds the bundled models on any machine, without a training framework.
Arrays are float32, images are NCHW.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[np.float32]


class Layer(Protocol):
    """One step of the network. `backward` takes d(loss)/d(output) and returns d(loss)/d(input).

    `backward` follows a `forward` on the same batch, and sets the `gradients`, which have the names of `parameters`.
    """

    def forward(self, x: Array) -> Array: ...

    def backward(self, dy: Array) -> Array: ...

    def parameters(self) -> dict[str, Array]: ...

    def gradients(self) -> dict[str, Array]: ...


class Stateless:
    """A layer without parameters."""

    def parameters(self) -> dict[str, Array]:
        return {}

    def gradients(self) -> dict[str, Array]:
        return {}


@dataclass
class Affine:
    """Base of Conv and Dense: a weight and a bias with their gradients."""

    weight: Array
    bias: Array
    grads: dict[str, Array] = field(default_factory=dict)

    def parameters(self) -> dict[str, Array]:
        return {"weight": self.weight, "bias": self.bias}

    def gradients(self) -> dict[str, Array]:
        return self.grads


def he_normal(rng: np.random.RandomState, shape: tuple[int, ...], fan_in: int) -> Array:
    return np.asarray(rng.standard_normal(shape) * np.sqrt(2.0 / fan_in), np.float32)


def windows(x: Array, k: int) -> Array:
    """im2col: `[N,C,H,W]`, zero-padded by k//2 -> every k x k window as a row `[N,H,W,C*k*k]`."""
    pad = k // 2
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    view = sliding_window_view(padded, (k, k), axis=(2, 3)).transpose(0, 2, 3, 1, 4, 5)
    return np.ascontiguousarray(view).reshape(*view.shape[:3], -1)


class Conv(Affine):
    """A k x k convolution with stride 1 and "same" padding."""

    def __init__(self, rng: np.random.RandomState, channels: int, filters: int, k: int = 3) -> None:
        super().__init__(he_normal(rng, (filters, channels, k, k), channels * k * k), np.zeros(filters, np.float32))
        self.k = k

    def forward(self, x: Array) -> Array:
        self.columns = windows(x, self.k)
        y = self.columns @ self.weight.reshape(len(self.weight), -1).T + self.bias
        return y.transpose(0, 3, 1, 2)

    def backward(self, dy: Array) -> Array:
        rows = dy.transpose(0, 2, 3, 1).reshape(-1, len(self.weight))
        columns = self.columns.reshape(len(rows), -1)
        self.grads = {"weight": (rows.T @ columns).reshape(self.weight.shape), "bias": rows.sum(0)}
        # the gradient by x is the convolution of dy with the kernel rotated by 180 degrees
        turned = self.weight[:, :, ::-1, ::-1].transpose(1, 0, 2, 3).reshape(self.weight.shape[1], -1)
        return (windows(dy, self.k) @ turned.T).transpose(0, 3, 1, 2)


class Dense(Affine):
    """A dense layer, `[N,I] -> [N,O]`; images are flattened first."""

    def __init__(self, rng: np.random.RandomState, inputs: int, outputs: int) -> None:
        super().__init__(he_normal(rng, (outputs, inputs), inputs), np.zeros(outputs, np.float32))

    def forward(self, x: Array) -> Array:
        self.shape = x.shape
        self.x = x.reshape(len(x), -1)
        return self.x @ self.weight.T + self.bias

    def backward(self, dy: Array) -> Array:
        self.grads = {"weight": dy.T @ self.x, "bias": dy.sum(0)}
        return (dy @ self.weight).reshape(self.shape)


class Relu(Stateless):
    def forward(self, x: Array) -> Array:
        self.mask = x > 0
        return np.asarray(x * self.mask, np.float32)

    def backward(self, dy: Array) -> Array:
        return np.asarray(dy * self.mask, np.float32)


class MaxPool(Stateless):
    """Max pooling of 2 x 2 windows with stride 2; tied maxima share the gradient."""

    def forward(self, x: Array) -> Array:
        n, c, h, w = x.shape
        self.blocks = x.reshape(n, c, h // 2, 2, w // 2, 2)
        self.y = self.blocks.max(axis=(3, 5), keepdims=True)
        return np.asarray(self.y.reshape(n, c, h // 2, w // 2), np.float32)

    def backward(self, dy: Array) -> Array:
        hit = self.blocks == self.y
        share = dy.reshape(self.y.shape) / hit.sum(axis=(3, 5), keepdims=True)
        n, c, h, _, w, _ = self.blocks.shape
        return np.asarray(hit * share, np.float32).reshape(n, c, h * 2, w * 2)


class Adam:
    """Adam (Kingma & Ba 2015) with beta1 0.9, beta2 0.999 and epsilon 1e-8."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self.moments = [{k: (np.zeros_like(v), np.zeros_like(v)) for k, v in la.parameters().items()} for la in layers]
        self.step_count = 0

    def step(self, rate: float) -> None:
        self.step_count += 1
        scale = rate * np.sqrt(1 - 0.999**self.step_count) / (1 - 0.9**self.step_count)
        for layer, moments in zip(self.layers, self.moments, strict=True):
            gradients = layer.gradients()
            for name, parameter in layer.parameters().items():
                mean, square = moments[name]
                mean += 0.1 * (gradients[name] - mean)
                square += 0.001 * (gradients[name] ** 2 - square)
                parameter -= (scale * mean / (np.sqrt(square) + 1e-8)).astype(np.float32)


def forward(layers: Sequence[Layer], x: Array) -> Array:
    for layer in layers:
        x = layer.forward(x)
    return x


def softmax(logits: Array) -> Array:
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True), np.float32)


def train_step(layers: Sequence[Layer], adam: Adam, x: Array, labels: NDArray[np.int64], rate: float) -> None:
    """One Adam step on the mean cross-entropy of a mini-batch; updates the parameters of `layers` in place."""
    dy = softmax(forward(layers, x))
    dy[np.arange(len(labels)), labels] -= 1
    dy /= len(labels)
    for layer in reversed(layers):
        dy = layer.backward(dy)
    adam.step(rate)
