"""Transformer encoders for tokens, for sequences of vectors, and for rows of features."""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from core import nn
from core.errors import ModelError
from core.ir.types import DType
from core.train.zoo.settings import Row, Settings, Share, Width, refuse

_NAME = "transformer-encoder"


class TransformerEncoder(Settings):
    """Self-attention over a sequence, its mean, and a linear layer.

    Rows int64[L] are tokens; float32[L,F] are sequences of vectors; of float32[F] every feature becomes a vector of its
    own (Gorishniy et al., 2021: FT-Transformer).
    """

    architecture: Literal["transformer-encoder"] = Field(
        "transformer-encoder", description="Self-attention over tokens, vectors or features."
    )
    width: Width = Field(64, description="The length of the vectors that stand for tokens.")
    heads: int = Field(4, ge=1, le=256, description="Attention heads; a divisor of the width.")
    layers: int = Field(2, ge=1, le=64, description="Encoder layers, one after the other.")
    feedforward: Width = Field(128, description="The width between the two linear layers of an encoder layer.")
    dropout: Share = Field(0.1, description="The share of each layer's results that training leaves out.")
    activation: Literal["relu", "gelu", "silu", "tanh"] = Field("gelu", description="Between the two linear layers.")
    vocabulary: Width | None = Field(None, description="How many different tokens there are; tokens need it.")
    padding: int | None = Field(None, ge=0, description="The token that fills up short rows, and is not looked at.")

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
                    raise ModelError("needs the setting vocabulary for tokens", where=f"architecture '{_NAME}'")
                table = nn.Embedding(self.vocabulary, self.width, self.padding)
                return Placed(table, row.shape[0], self.width)
            case DType.FLOAT32, 2:
                return Placed(nn.Linear(row.shape[1], self.width), row.shape[0], self.width)
            case DType.FLOAT32, 1:
                return Features(row.shape[0], self.width)
        raise refuse(_NAME, "tokens int64[L], sequences float32[L,F] or features float32[F]", row)


class Encoder(nn.Module):
    """Vectors [N, L, width] from an embedding, through encoder layers, to [N, outputs]."""

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
        return self.head(_mean(self.norm(y), padding))


class Placed(nn.Module):
    """What embeds each element of a row, plus a vector for its place."""

    def __init__(self, embed: nn.Module, length: int, width: int) -> None:
        self.embed = embed
        self.place = nn.init.normal_(nn.Parameter(np.empty((length, width), np.float32)), std=0.02)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y: nn.Tensor = self.embed(x)
        return y + self.place


class Features(nn.Module):
    """[N, F] -> [N, F, width]: every feature times a vector of its own, plus another."""

    def __init__(self, features: int, width: int) -> None:
        self.weight = nn.init.spread(width, features, width)
        self.bias = nn.init.spread(width, features, width)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return x.unsqueeze(2) * self.weight + self.bias


def _mean(x: nn.Tensor, padding: nn.Tensor | None) -> nn.Tensor:
    """The mean of the vectors that are no padding; zeros where all are."""
    if padding is None:
        return x.mean(1)
    kept = (~padding).to("float32").unsqueeze(2)
    return (x * kept).sum(1) / kept.sum(1).clamp(min=1.0)
