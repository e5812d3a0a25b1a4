"""Layers as functions, for those who write `F.relu(x)`; names and arguments as PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from core.ir.graph import Attr
from core.ir.types import DType
from core.nn import init
from core.nn.tensor import Tensor, where

Size: TypeAlias = int | Sequence[int]

_NEVER = float(np.finfo(np.float32).min) / 2  # added to a score, leaves it no share


def relu(x: Tensor) -> Tensor:
    return x.relu()


def sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid()


def tanh(x: Tensor) -> Tensor:
    return x.tanh()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x * x.sigmoid()


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """`approximate` is "none" (by the error function) or "tanh"."""
    return x.op("Gelu", approximate=approximate)


def softmax(x: Tensor, dim: int) -> Tensor:
    return x.softmax(dim)


def log_softmax(x: Tensor, dim: int) -> Tensor:
    return x.op("LogSoftmax", axis=dim)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x A^T + b along the last axis, for weights [out, in]."""
    if x.ndim == 2:
        return x.op("Gemm", weight, bias, transB=1)
    product = x @ weight.T
    return product if bias is None else product + bias


def embedding(x: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of a table by their numbers; that of `padding_idx` gets no gradient."""
    rows = weight.op("Gather", x, axis=0)
    return rows if padding_idx is None else where((x == padding_idx).unsqueeze(-1), rows.detach(), rows)


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zeros with probability `p`, the rest larger by 1 / (1 - p). While a graph is traced, a node that a training step
    lets drop, by a key of its own; run at once, by the stream that first values come from."""
    if not training or p == 0:
        return x
    now: dict[str, Attr] = {}
    if x.is_computed:
        now = {"seed": int(init.generator().integers(1 << 31)), "training_mode": (True,)}
    return x.op("Dropout", ratio=(p,), **now)


def layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return x.op("LayerNormalization", weight, bias, axis=-len(normalized_shape), epsilon=eps)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """Cross-correlation of images [N, C, H, W] with weights [out, C / groups, kernel...]."""
    pads, strides, dilations = (spread(size, 2) for size in (padding, stride, dilation))
    return x.op("Conv", weight, bias, strides=strides, pads=pads * 2, dilations=dilations, group=groups)


def max_pool2d(x: Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    return x.op("MaxPool", **_window(kernel_size, stride, padding))


def avg_pool2d(x: Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    """The mean of each window, padding counted."""
    return x.op("AveragePool", **_window(kernel_size, stride, padding), count_include_pad=1)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(Q K^T * scale + mask) V along the last two axes; a boolean mask marks what takes part."""
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.extent(-1)) if scale is None else scale)
    if attn_mask is not None:
        scores = scores + (additive(~attn_mask) if attn_mask.dtype is DType.BOOL else attn_mask)
    return scores.softmax(-1) @ value


def additive(left_out: Tensor) -> Tensor:
    """What is added to scores so that those which are marked have no share, and no row of shares becomes NaN."""
    return left_out.to(DType.FLOAT32) * _NEVER


def _window(kernel_size: Size, stride: Size | None, padding: Size) -> dict[str, Attr]:
    kernel = spread(kernel_size, 2)
    strides = kernel if stride is None else spread(stride, 2)
    return {"kernel_shape": kernel, "strides": strides, "pads": spread(padding, 2) * 2}


def spread(size: Size, axes: int) -> tuple[int, ...]:
    """One number for every axis, or one for all. ValueError for another count."""
    sizes = (size,) * axes if isinstance(size, int) else tuple(size)
    if len(sizes) != axes:
        raise ValueError(f"{size} has {len(sizes)} numbers, expected 1 or {axes}")
    return sizes
