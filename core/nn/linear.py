"""Linear layers, embeddings, dropout, and layers that change shapes only."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lathe.core.ir.types import DType
from lathe.core.nn import functional as F
from lathe.core.nn import init
from lathe.core.nn.module import Module
from lathe.core.nn.tensor import Tensor


class Identity(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Linear(Module):
    """x A^T + b along the last axis: [..., in_features] -> [..., out_features]; A is `weight` [out, in], b `bias`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.weight = init.new_weight(out_features, in_features)
        self.bias = init.new_uniform(in_features, out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        self.expect(x.ndim >= 1 and x.shape[-1] == self.in_features, f"[..., {self.in_features}]", x)
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Embedding(Module):
    """A lookup table: integers [...] -> [..., embedding_dim].

    The row `padding_idx` is initially zero and is not trained.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx: expected one of {num_embeddings} rows, got {padding_idx}")
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.weight = init.normal_(init.unset(num_embeddings, embedding_dim))
        if self.padding_idx is not None:
            self.weight.data[self.padding_idx] = 0

    def forward(self, x: Tensor) -> Tensor:
        self.expect(x.dtype in (DType.INT64, DType.INT32), "indices of type int64 or int32", x)
        return F.embedding(x, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


class Flatten(Module):
    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(self.start_dim, self.end_dim)

    def extra_repr(self) -> str:
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"


class Unflatten(Module):
    """Replaces the axis `dim` by axes of the sizes `unflattened_size`, one of which may be -1."""

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def forward(self, x: Tensor) -> Tensor:
        axis = self.dim % x.ndim
        left = x.shape[axis] // math.prod(size for size in self.unflattened_size if size != -1)
        sizes = [left if size == -1 else size for size in self.unflattened_size]
        return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])

    def extra_repr(self) -> str:
        return f"dim={self.dim}, unflattened_size={self.unflattened_size}"


class Dropout(Module):
    """In training, sets elements to zero with probability `p`, and multiplies the others by 1 / (1 - p).

    A traced graph gets a Dropout node, which is active in a training step and does nothing in a compiled model. There
    is no node if the module was switched to `eval` before tracing. `inplace` has no effect.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        if not 0 <= p < 1:
            raise ValueError(f"p: expected at least 0 and below 1, got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"
