"""Decoder-only Transformers (Radford et al., 2019: GPT-2; Touvron et al., 2023: Llama) as one `nn.Module`.

Parameters have the names of Llama in the library Transformers, such as `model.layers.0.self_attn.q_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lathe.core.language.attention import CachePlaces, LayerCache, Places, SelfAttention, places_of
from lathe.core.language.experts import MixtureOfExperts
from lathe.core.language.settings import DecoderSettings
from lathe.core.nn import functional as F
from lathe.core.nn.linear import Embedding, Linear
from lathe.core.nn.module import Module, ModuleList
from lathe.core.nn.norm import LayerNorm, RMSNorm
from lathe.core.nn.tensor import Tensor


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, "tanh")


# By the names in Hugging Face's configurations.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "swish": F.silu, "gelu": F.gelu, "gelu_new": _gelu_tanh, "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}  # fmt: skip


class Decoder(Module):
    """Token ids, int64 [batch, length] -> logits of the next token, float32 [batch, length, vocabulary].

    The logits at a position depend on the tokens up to this position. With learned positions, FeedError for a length
    above `settings.context`.
    """

    def __init__(self, settings: DecoderSettings) -> None:
        self.settings = settings
        self.model = Layers(settings)
        self.lm_head = None if settings.tied else Linear(settings.width, settings.vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.logits(self.model(input_ids))

    def logits(self, x: Tensor) -> Tensor:
        """The logits [..., vocabulary] of rows [..., width] that the layers computed."""
        return F.linear(x, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)


class Layers(Module):
    """Embedding, layers and the final normalization: int64 [batch, length] -> float32 [batch, length, width]."""

    def __init__(self, settings: DecoderSettings) -> None:
        self.settings = settings
        self.embed_tokens = Embedding(settings.vocabulary, settings.width)
        learned = settings.rotary is None
        self.embed_positions = Embedding(settings.context, settings.width) if learned else None
        mixed = (False,) * settings.layers if settings.experts is None else settings.experts.layers
        self.layers = ModuleList(Layer(settings, number, mix) for number, mix in enumerate(mixed))
        self.norm = _normalization(settings)

    def forward(self, input_ids: Tensor) -> Tensor:
        self.expect(input_ids.ndim == 2, "token ids [batch, length]", input_ids)
        places = places_of(input_ids.op("Shape", start=1, end=2).squeeze(0), self.settings)
        x = self.embed_tokens(input_ids)
        if self.embed_positions is not None:
            x = x + self.embed_positions(places.positions)
        for layer in self.layers:
            x = layer(x, places)
        return self.norm(x)

    def cached(self, x: Tensor, places: CachePlaces, caches: Sequence[LayerCache]) -> tuple[Tensor, list[LayerCache]]:
        """The same for tokens of many sequences over a cache per layer: [n, width] -> same, and the next caches.

        `x` are rows of `embed_tokens`: a table is cheaper to read where it is stored than from code.
        """
        if self.embed_positions is not None:
            x = x + self.embed_positions(places.positions)
        following: list[LayerCache] = []
        for layer, cache in zip(self.layers, caches, strict=True):
            assert isinstance(layer, Layer)
            x, after = layer.cached(x, places, cache)
            following.append(after)
        return self.norm(x), following


class Layer(Module):
    """Attention and a feed-forward network, each after a normalization and with a residual connection.

    With `mixed`, a mixture of experts takes the place of the feed-forward network.
    """

    def __init__(self, settings: DecoderSettings, number: int, mixed: bool) -> None:
        self.input_layernorm = _normalization(settings)
        self.self_attn = SelfAttention(settings, number)
        self.post_attention_layernorm = _normalization(settings)
        self.mlp: Module = _mixture(settings) if mixed else FeedForward(settings)

    def forward(self, x: Tensor, places: Places) -> Tensor:
        return self._fed_forward(x + self.self_attn(self.input_layernorm(x), places))

    def cached(self, x: Tensor, places: CachePlaces, cache: LayerCache) -> tuple[Tensor, LayerCache]:
        """The same for tokens of many sequences over a cache: [n, width] -> same, and the next cache."""
        found, cache = self.self_attn.cached(self.input_layernorm(x), places, cache)
        return self._fed_forward(x + found), cache

    def _fed_forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + added


class FeedForward(Module):
    """activation(x A) B, or with `gated` settings (activation(x G) * x A) B (Shazeer, 2020): [..., width] -> same."""

    def __init__(self, settings: DecoderSettings) -> None:
        width, hidden, bias = settings.width, settings.feedforward, settings.feedforward_bias
        self.gate_proj = Linear(width, hidden, bias) if settings.gated else None
        self.up_proj, self.down_proj = Linear(width, hidden, bias), Linear(hidden, width, bias)
        self.activation = ACTIVATIONS[settings.activation]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def _mixture(settings: DecoderSettings) -> MixtureOfExperts:
    experts = settings.experts
    assert experts is not None
    shared = None if experts.shared is None else FeedForward(replace(settings, feedforward=experts.shared))
    return MixtureOfExperts(settings.width, experts, ACTIVATIONS[settings.activation], shared)


def _normalization(settings: DecoderSettings) -> Module:
    kind = RMSNorm if settings.normalization == "rms" else LayerNorm
    return kind(settings.width, settings.epsilon)
