"""Multi-head attention and Transformer encoder layers (Vaswani et al., 2017)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np

from lathe.core.ir.types import Dim, DType
from lathe.core.nn import functional as F
from lathe.core.nn import init
from lathe.core.nn.activation import ACTIVATIONS
from lathe.core.nn.linear import Dropout, Linear
from lathe.core.nn.module import Module, ModuleList
from lathe.core.nn.norm import LayerNorm
from lathe.core.nn.parameter import Parameter
from lathe.core.nn.tensor import Tensor


class MultiheadAttention(Module):
    """Multi-head attention: queries [L, N, E], keys and values [S, N, E] -> results [L, N, E].

    Each of N rows has L queries and S keys, with E = `embed_dim` numbers each. With `batch_first` the shapes are
    [N, L, E] and [N, S, E]. `key_padding_mask` is [N, S], `attn_mask` is [L, S] or [N * heads, L, S]. A boolean mask is
    true for keys to leave out; a floating-point mask is added to the scores. `forward` returns a pair: the results, and
    the attention weights [N, L, S] before dropout, averaged over the heads, or None without `need_weights`. ModelError
    for inputs of other shapes. For a query whose keys a boolean mask leaves out entirely, the result is finite, whereas
    PyTorch returns NaN.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, batch_first: bool = False
    ) -> None:
        if embed_dim % num_heads:
            raise ValueError(f"num_heads: expected a divisor of embed_dim {embed_dim}, got {num_heads}")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.dropout, self.batch_first = dropout, batch_first
        self.in_proj_weight = init.xavier_uniform_(init.unset(3 * embed_dim, embed_dim))
        self.in_proj_bias = Parameter(np.zeros(3 * embed_dim, np.float32)) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias)
        if self.out_proj.bias is not None:
            init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        for x in (query, key, value):
            self.expect(x.ndim == 3 and x.shape[2] == self.embed_dim, self._expected_type(), x)
        queries, keys, values = (self._heads(x) for x in self._project(query, key, value))
        scores = queries @ keys.transpose(2, 3) * (1 / math.sqrt(self.embed_dim // self.num_heads))
        for mask in self._masks(key_padding_mask, attn_mask, scores.shape):
            scores = scores + mask
        attention = scores.softmax(-1)
        heads = (F.dropout(attention, self.dropout, self.training) @ values).transpose(1, 2)
        result = self.out_proj(heads.reshape(*heads.shape[:2], self.embed_dim))
        result = result if self.batch_first else result.transpose(0, 1)
        return result, attention.mean(1) if need_weights else None

    def _expected_type(self) -> str:
        return f"[N, L, {self.embed_dim}]" if self.batch_first else f"[L, N, {self.embed_dim}]"

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values, batch first, after their linear projections [N, L, E].

        If all three arguments are the same object (self-attention), they share one matrix product.
        """
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if query is key and query is value:
            return F.linear(self._batches(query), weight, bias).chunk(3, -1)
        biases = [None] * 3 if bias is None else bias.chunk(3)
        parts = zip((query, key, value), weight.chunk(3), biases, strict=True)
        return [F.linear(self._batches(x), each, own) for x, each, own in parts]

    def _batches(self, x: Tensor) -> Tensor:
        """The input as [N, L, E]: transposed unless `batch_first`."""
        return x if self.batch_first else x.transpose(0, 1)

    def _heads(self, x: Tensor) -> Tensor:
        """[N, L, E] -> [N, heads, L, E / heads]."""
        return x.reshape(*x.shape[:2], self.num_heads, self.embed_dim // self.num_heads).transpose(1, 2)

    def _masks(self, padding: Tensor | None, mask: Tensor | None, scores: tuple[Dim, ...]) -> list[Tensor]:
        """The given masks as additive masks that broadcast to the scores [N, heads, L, S], the shape `scores`."""
        masks = [] if padding is None else [_additive(padding)[:, None, None]]
        if mask is None:
            return masks
        self.expect(mask.ndim in (2, 3), "a mask [L, S] or [N * heads, L, S]", mask)
        return [*masks, _additive(mask if mask.ndim == 2 else mask.reshape(*scores))]

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}"

    def __repr__(self) -> str:
        return f"MultiheadAttention({self.extra_repr()})"


class TransformerEncoderLayer(Module):
    """Self-attention and a feed-forward network with residual connections: [L, N, d_model] -> the same shape.

    L is the length of the sequences, N the number of rows. With `batch_first` the shape is [N, L, d_model]. With
    `norm_first` normalization comes before each block (pre-norm), which trains without warm-up.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
    ) -> None:
        self.self_attn = MultiheadAttention(d_model, nhead, dropout, bias, batch_first)
        self.linear1, self.dropout = Linear(d_model, dim_feedforward, bias), Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias)
        self.norm1 = LayerNorm(d_model, layer_norm_eps, bias=bias)
        self.norm2 = LayerNorm(d_model, layer_norm_eps, bias=bias)
        self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = ACTIVATIONS[activation]()
        self.norm_first = norm_first

    def forward(
        self, src: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None
    ) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            found, _ = self.self_attn(x, x, x, src_key_padding_mask, need_weights=False, attn_mask=src_mask)
            return self.dropout1(found)

        return self._with_residual(self._with_residual(src, self.norm1, attend), self.norm2, self._feed_forward)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))

    def _with_residual(self, x: Tensor, norm: LayerNorm, block: Callable[[Tensor], Tensor]) -> Tensor:
        return x + block(norm(x)) if self.norm_first else norm(x + block(x))


class TransformerEncoder(Module):
    """`num_layers` copies of an encoder layer, and an optional final normalization.

    Each copy has parameters of its own, which initially equal those of `encoder_layer`.
    """

    def __init__(self, encoder_layer: TransformerEncoderLayer, num_layers: int, norm: Module | None = None) -> None:
        self.layers = ModuleList(copy.deepcopy(encoder_layer) for _ in range(num_layers))
        self.norm = norm

    def forward(self, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask)
        return src if self.norm is None else self.norm(src)


def _additive(mask: Tensor) -> Tensor:
    """The additive mask for a boolean mask (true: leave out); a floating-point mask is returned as it is."""
    return F.additive_mask(mask) if mask.dtype is DType.BOOL else mask
