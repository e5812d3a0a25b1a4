"""Transformer encoders for tokens, for sequences of vectors, and for rows of features."""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lathe import nn
from lathe.core.errors import ModelError
from lathe.core.ir.types import DType
from lathe.core.train.zoo.settings import Probability, Row, Settings, Width, row_error

_NAME = "transformer-encoder"


class TransformerEncoder(Settings):
    """Transformer encoder layers over a sequence, mean pooling, and a linear layer.

    Rows int64[L] or int32[L] are tokens. Rows float32[L,F] are sequences of vectors. Of rows float32[F] each feature is
    embedded as a vector of its own (Gorishniy et al., 2021: FT-Transformer).
    """

    architecture: Literal["transformer-encoder"] = Field(
        "transformer-encoder", description="Transformer encoder, for tokens, vectors or features."
    )
    width: Width = Field(64, description="Embedding dimension.")
    heads: int = Field(4, ge=1, le=256, description="Attention heads; a divisor of the width.")
    layers: int = Field(2, ge=1, le=64, description="Number of encoder layers.")
    feedforward: Width = Field(128, description="Hidden width of the feed-forward network in each encoder layer.")
    dropout: Probability = Field(0.1, description="Dropout probability in each encoder layer.")
    activation: Literal["relu", "gelu", "silu", "tanh"] = Field(
        "gelu", description="Activation of the feed-forward networks: `relu`, `gelu`, `silu` or `tanh`."
    )
    vocabulary: Width | None = Field(None, description="Number of different tokens; required for tokens.")
    padding: int | None = Field(
        None,
        ge=0,
        description="Number of the token that is masked as padding. By default no token is masked. Short sequences of "
        "a dataset are padded with 0.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads is {self.heads}, expected a divisor of width, {self.width}")
        if self.padding is not None and (self.vocabulary is None or self.padding >= self.vocabulary):
            raise ValueError(f"padding is {self.padding}, expected a token below vocabulary, {self.vocabulary}")
        return self

    def module(self, row: Row, outputs: int) -> nn.Module:
        return Encoder(self, self._embedding(row), outputs)

    def _embedding(self, row: Row) -> nn.Module:
        match row.dtype, len(row.shape):
            case DType.INT64 | DType.INT32, 1:
                if self.vocabulary is None:
                    raise ModelError("needs the setting `vocabulary` for tokens", where=f"architecture '{_NAME}'")
                table = nn.Embedding(self.vocabulary, self.width, self.padding)
                return PositionEmbedding(table, row.shape[0], self.width)
            case DType.FLOAT32, 2:
                return PositionEmbedding(nn.Linear(row.shape[1], self.width), row.shape[0], self.width)
            case DType.FLOAT32, 1:
                return FeatureEmbedding(row.shape[0], self.width)
        raise row_error(_NAME, "tokens int64[L], sequences float32[L,F] or features float32[F]", row)


class Encoder(nn.Module):
    """An embedding to [N, L, width], encoder layers, masked mean pooling and a linear layer to [N, outputs]."""

    def __init__(self, settings: TransformerEncoder, embedding: nn.Module, outputs: int) -> None:
        width, self.padding = settings.width, settings.padding
        self.embedding = embedding
        layer: dict[str, Any] = {"activation": settings.activation, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, settings.heads, settings.feedforward, settings.dropout, **layer)
            for _ in range(settings.layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        padding = None if self.padding is None else x == self.padding
        y = self.embedding(x)
        for layer in self.layers:
            y = layer(y, src_key_padding_mask=padding)
        return self.head(_mean_pooling(self.norm(y), padding))


class PositionEmbedding(nn.Module):
    """An embedding of each element plus a learned position embedding."""

    def __init__(self, embed: nn.Module, length: int, width: int) -> None:
        self.embed = embed
        self.place = nn.init.normal_(nn.Parameter(np.empty((length, width), np.float32)), std=0.02)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y: nn.Tensor = self.embed(x)
        return y + self.place


class FeatureEmbedding(nn.Module):
    """[N, F] -> [N, F, width]: each feature times a learned vector of its own, plus a learned bias vector."""

    def __init__(self, features: int, width: int) -> None:
        self.weight = nn.init.new_uniform(width, features, width)
        self.bias = nn.init.new_uniform(width, features, width)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return x.unsqueeze(2) * self.weight + self.bias


def _mean_pooling(x: nn.Tensor, padding: nn.Tensor | None) -> nn.Tensor:
    """The mean over the vectors that are not padding: [N, L, width] -> [N, width]; zeros if all are padding."""
    if padding is None:
        return x.mean(1)
    mask = (~padding).to("float32").unsqueeze(2)
    return (x * mask).sum(1) / mask.sum(1).clamp(min=1.0)
