"""A decoder-only Transformer as an architecture: a language model from nothing."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from lathe import nn
from lathe.core.errors import ModelError
from lathe.core.ir.types import DType
from lathe.core.language.decoder import Decoder as DecoderModule
from lathe.core.language.settings import DecoderSettings, Rotary
from lathe.core.train.zoo.settings import Row, Settings, Width, row_error

_DEVIATION = 0.02  # of initial weights, as in GPT-2 and Llama


class Decoder(Settings):
    """A decoder-only Transformer: for each token, the logits of the next one."""

    architecture: Literal["decoder"] = Field(
        "decoder", description="Language model: a decoder-only Transformer, for data of text."
    )
    family: Literal["llama", "gpt2"] = Field(
        "llama", description="`llama`: rotary positions, RMS normalization, gated network; or `gpt2`."
    )
    layers: int = Field(4, ge=1, le=256, description="Number of layers.")
    width: Width = Field(128, description="Embedding dimension.")
    heads: int = Field(4, ge=1, le=256, description="Attention heads; a divisor of the width.")
    kv_heads: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Heads of keys and values, only for `llama`: a divisor of `heads`; by default equal to `heads`.",
    )
    feedforward: Width | None = Field(
        None, description="Hidden width of each network; by default 8/3 of the width for llama, 4 times it for gpt2."
    )
    context: Width | None = Field(None, description="Most tokens of a sequence; by default the length of a row.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads is {self.heads}, expected a divisor of width, {self.width}")
        if self.family == "llama" and (self.width // self.heads) % 2:
            raise ValueError(f"width / heads is {self.width // self.heads}, expected an even number")
        if self.kv_heads is not None and (self.family == "gpt2" or self.heads % self.kv_heads):
            raise ValueError(f"kv_heads is {self.kv_heads}, expected a divisor of heads, {self.heads}, with llama")
        return self

    def module(self, row: Row, outputs: int) -> nn.Module:
        if row.dtype is not DType.INT64 or len(row.shape) != 1:
            raise row_error("decoder", "tokens int64[L]", row)
        return self.decoder(row.shape[0], outputs)

    def decoder(self, length: int, vocabulary: int) -> DecoderModule:
        """The decoder for rows of `length` tokens with new weights: normal with deviation 0.02 (Radford et al., 2019).

        Those that end in a residual connection are divided by sqrt(2 * layers). ModelError if rows are longer than
        `context`.
        """
        context = self.context or length
        if length > context:
            raise ModelError(f"context is {context}, expected at least the {length} tokens of a row", where="decoder")
        module = DecoderModule(self._settings(context, vocabulary))
        for name, parameter in module.named_parameters():
            if parameter.data.ndim == 2:
                is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=_DEVIATION / (math.sqrt(2 * self.layers) if is_last else 1))
            elif name.endswith("bias"):
                parameter.data[...] = 0
        return module

    def _settings(self, context: int, vocabulary: int) -> DecoderSettings:
        is_llama = self.family == "llama"
        hidden = math.ceil(self.width / 3) * 8 if is_llama else 4 * self.width
        return DecoderSettings(
            family=self.family,
            vocabulary=vocabulary,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_size=self.width // self.heads,
            feedforward=self.feedforward or hidden,
            context=context,
            windows=(None,) * self.layers,
            epsilon=1e-5,
            activation="silu" if is_llama else "gelu_new",
            rotary=Rotary(10_000.0) if is_llama else None,
            normalization="rms" if is_llama else "layer",
            gated=is_llama,
            tied=True,
            query_bias=not is_llama,
            output_bias=not is_llama,
            feedforward_bias=not is_llama,
        )
