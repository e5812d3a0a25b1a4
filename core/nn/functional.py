"""Layers as functions, such as `F.relu(x)`, with PyTorch's names and arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from lathe.core.ir.graph import Attr
from lathe.core.ir.types import DType
from lathe.core.nn import init
from lathe.core.nn.segments import segment_max as segment_max
from lathe.core.nn.segments import segment_mean as segment_mean
from lathe.core.nn.segments import segment_softmax as segment_softmax
from lathe.core.nn.segments import segment_sum as segment_sum
from lathe.core.nn.sparse import sparse_addmm as sparse_addmm
from lathe.core.nn.sparse import sparse_mm as sparse_mm
from lathe.core.nn.sparse import sparse_sampled_addmm as sparse_sampled_addmm
from lathe.core.nn.tensor import Tensor, where

Size: TypeAlias = int | Sequence[int]

_MASKED = float(np.finfo(np.float32).min) / 2  # added to a masked score; two such masks together stay finite


def relu(x: Tensor) -> Tensor:
    return x.relu()


def sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid()


def tanh(x: Tensor) -> Tensor:
    return x.tanh()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), element by element."""
    return x * x.sigmoid()


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU. `approximate` is "none" (exact, by the error function) or "tanh"."""
    return x.op("Gelu", approximate=approximate)


def softmax(x: Tensor, dim: int) -> Tensor:
    return x.softmax(dim)


def log_softmax(x: Tensor, dim: int) -> Tensor:
    return x.op("LogSoftmax", axis=dim)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x A^T + b along the last axis: [..., in] -> [..., out], for a weight A [out, in]."""
    if x.ndim == 2:
        return x.op("Gemm", weight, bias, transB=1)
    product = x @ weight.T
    return product if bias is None else product + bias


def embedding(x: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """The rows of `weight` at the indices `x`. The row `padding_idx` gets no gradient."""
    rows = weight.op("Gather", x, axis=0)
    return rows if padding_idx is None else where((x == padding_idx).unsqueeze(-1), rows.detach(), rows)


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Set elements to zero with probability `p`, and multiply the others by 1 / (1 - p).

    The result is `x` itself if `p` is 0 or not `training`. A traced graph gets a Dropout node, which is active only in
    a training step, with the step's random key. An eager run draws from the generator of initial weights
    (`init.generator`).
    """
    if not training or p == 0:
        return x
    attrs: dict[str, Attr] = {}
    if x.is_computed:
        attrs = {"seed": int(init.generator().integers(1 << 31)), "training_mode": (True,)}
    return x.op("Dropout", ratio=(p,), **attrs)


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
    """Cross-correlation of images [N, C, H, W] with weights [out, C / groups, kH, kW], plus bias [out]."""
    pads, strides, dilations = (per_axis(size, 2) for size in (padding, stride, dilation))
    return x.op("Conv", weight, bias, strides=strides, pads=pads * 2, dilations=dilations, group=groups)


def max_pool2d(x: Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    """The greatest element of each window of images [N, C, H, W]. The stride is by default the window's size.

    Padding never counts.
    """
    return x.op("MaxPool", **_window(kernel_size, stride, padding))


def avg_pool2d(x: Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    """The mean of each window of images [N, C, H, W]. The stride is by default the window's size.

    Padding counts as zeros, also in the number of elements that divides the sum (`count_include_pad`).
    """
    return x.op("AveragePool", **_window(kernel_size, stride, padding), count_include_pad=1)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(Q K^T * scale + mask) V along the last two axes; `scale` is by default 1 / sqrt(the last extent of Q).

    A boolean mask is true for keys that take part; a mask of numbers is added to the scores.
    """
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.extent(-1)) if scale is None else scale)
    if attn_mask is not None:
        scores = scores + (additive_mask(~attn_mask) if attn_mask.dtype is DType.BOOL else attn_mask)
    return scores.softmax(-1) @ value


def additive_mask(left_out: Tensor) -> Tensor:
    """A float32 mask to add to scores, for a boolean mask that is true for keys to leave out: 0 for other keys.

    The number for keys to leave out is finite (half of the most negative float32), so a row in which all keys are left
    out does not become NaN.
    """
    return left_out.to(DType.FLOAT32) * _MASKED


def _window(kernel_size: Size, stride: Size | None, padding: Size) -> dict[str, Attr]:
    kernel = per_axis(kernel_size, 2)
    strides = kernel if stride is None else per_axis(stride, 2)
    return {"kernel_shape": kernel, "strides": strides, "pads": per_axis(padding, 2) * 2}


def per_axis(size: Size, axes: int) -> tuple[int, ...]:
    """The sizes of `axes` axes: one number repeated, or one per axis as given. ValueError for another count."""
    sizes = (size,) * axes if isinstance(size, int) else tuple(size)
    if len(sizes) != axes:
        raise ValueError(f"{size} has {len(sizes)} numbers, expected 1 or {axes}")
    return sizes
