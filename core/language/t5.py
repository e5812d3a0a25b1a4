"""T5 (Raffel et al., 2020) as an `nn.Module`: an encoder and a decoder with relative position biases.

Parameters have the names of T5 in the library Transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.errors import ModelError
from lathe.core.language.decoder import ACTIVATIONS
from lathe.core.language.head_attention import (
    CausalPlaces,
    KeysValues,
    attend_heads,
    joined_heads,
    places_after,
    positions_of,
    split_heads,
)
from lathe.core.language.relative_bias import bucket_table, relative_bias
from lathe.core.nn import functional as F
from lathe.core.nn.linear import Embedding, Linear
from lathe.core.nn.module import Module, ModuleList
from lathe.core.nn.norm import RMSNorm
from lathe.core.nn.tensor import Tensor


@dataclass(frozen=True)
class T5Settings:
    """The settings of a T5. `start` is the token with which the decoder begins.

    Distances of positions fall into `buckets`, those of `distance` and more into the last. `gated`: the feed-forward
    network multiplies its activation by a second projection (T5 1.1). `scaled`: the decoder's results are divided by
    the root of `width` before the last product. `tied`: that product has the weights of the embedding. ModelError for
    buckets that cannot be divided.
    """

    family: str
    vocabulary: int
    width: int
    heads: int
    head_size: int
    feedforward: int
    encoder_layers: int
    decoder_layers: int
    buckets: int
    distance: int
    epsilon: float
    activation: str
    gated: bool
    scaled: bool
    tied: bool
    start: int

    def __post_init__(self) -> None:
        if self.buckets % 4 or self.distance <= self.buckets // 2:
            message = f"expected a multiple of 4 buckets, and a distance above half of them, got {self.buckets}"
            raise ModelError(f"{message} and {self.distance}", where=self.family)

    @property
    def layers(self) -> int:
        return self.encoder_layers + self.decoder_layers

    @property
    def largest_weight(self) -> int:
        """The number of elements of the largest weight."""
        return self.width * max(self.vocabulary, self.heads * self.head_size, self.feedforward)


class T5(Module):
    """Tokens of the source and of the beginning of the target, int64 [batch, length] -> logits of the next token.

    Logits are float32 [batch, target length, vocabulary]. All source tokens count: there is no mask for padding.
    """

    def __init__(self, settings: T5Settings) -> None:
        self.settings = settings
        self.shared = Embedding(settings.vocabulary, settings.width)
        self.encoder, self.decoder = Stack(settings, False), Stack(settings, True)
        self.lm_head = None if settings.tied else Linear(settings.width, settings.vocabulary, bias=False)

    def encode(self, input_ids: Tensor) -> Tensor:
        """Source tokens -> float32 [batch, length, width]."""
        self.expect(input_ids.ndim == 2, "token ids [batch, length]", input_ids)
        found: Tensor = self.encoder(self.shared(input_ids), None)
        return found

    def decode(self, decoder_input_ids: Tensor, encoded: Tensor) -> Tensor:
        """Target tokens and the result of `encode` -> logits."""
        self.expect(decoder_input_ids.ndim == 2, "token ids [batch, length]", decoder_input_ids)
        return self._logits(self.decoder(self.shared(decoder_input_ids), encoded))

    def sources(self, encoded: Tensor) -> list[KeysValues]:
        """The keys and values of each decoder layer for the result of `encode`."""
        return self.decoder.sources(encoded)

    def decode_after(
        self, decoder_input_ids: Tensor, past: list[KeysValues], sources: list[KeysValues]
    ) -> tuple[Tensor, list[KeysValues]]:
        """`decode` for tokens that follow those of `past`: logits, and each layer's keys and values of the new tokens.

        `past` and the result are those of self-attention; `sources`, from the method of that name, of the input.
        """
        x, new = self.decoder.after(self.shared(decoder_input_ids), past, sources)
        return self._logits(x), new

    def _logits(self, x: Tensor) -> Tensor:
        if self.settings.scaled:
            x = x * self.settings.width**-0.5
        return F.linear(x, self.shared.weight) if self.lm_head is None else self.lm_head(x)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return self.decode(decoder_input_ids, self.encode(input_ids))


class Stack(Module):
    """The layers of an encoder or a decoder: [batch, length, width] -> same. A decoder reads the encoder's results."""

    def __init__(self, settings: T5Settings, is_decoder: bool) -> None:
        count = settings.decoder_layers if is_decoder else settings.encoder_layers
        self.is_decoder = is_decoder
        self.block = ModuleList(Block(settings, is_decoder, number == 0) for number in range(count))
        self.final_layer_norm = RMSNorm(settings.width, settings.epsilon)

    def forward(self, x: Tensor, encoded: Tensor | None) -> Tensor:
        positions = positions_of(x)
        places = CausalPlaces(positions, positions)
        bias = self._bias(places)
        for block in self.block:
            x = block(x, bias, places if self.is_decoder else None, encoded)
        return self.final_layer_norm(x)

    def sources(self, encoded: Tensor) -> list[KeysValues]:
        """The keys and values of each layer of a decoder for the encoder's results."""
        blocks = [block for block in self.block if isinstance(block, Block)]
        return [block.crossing.source(encoded) for block in blocks]

    def after(self, x: Tensor, past: list[KeysValues], sources: list[KeysValues]) -> tuple[Tensor, list[KeysValues]]:
        """The same for tokens of a decoder that follow those of `past`, and their keys and values."""
        places, new = places_after(x, past[0]), []
        bias = self._bias(places)
        for block, before, source in zip(self.block, past, sources, strict=True):
            assert isinstance(block, Block)
            x, own = block.after(x, bias, places, before, source)
            new.append(own)
        return self.final_layer_norm(x), new

    def _bias(self, places: CausalPlaces) -> Tensor:
        """The biases of scores in all layers: the first layer has their weights."""
        block = self.block[0]
        assert isinstance(block, Block)
        return block.attention.bias(places)


class Block(Module):
    """Self-attention, in a decoder attention to the encoder, and a feed-forward network."""

    def __init__(self, settings: T5Settings, is_decoder: bool, is_first: bool) -> None:
        crossing = [CrossAttention(settings)] if is_decoder else []
        self.layer = ModuleList([SelfAttention(settings, is_decoder, is_first), *crossing, FeedForward(settings)])

    @property
    def attention(self) -> BiasedAttention:
        """The self-attention of the first block."""
        own = self.layer[0]
        assert isinstance(own, SelfAttention) and isinstance(own.SelfAttention, BiasedAttention)
        return own.SelfAttention

    @property
    def crossing(self) -> Attention:
        """The attention of a decoder to the encoder's results."""
        layer = self.layer[1]
        assert isinstance(layer, CrossAttention)
        return layer.EncDecAttention

    def after(
        self, x: Tensor, bias: Tensor, places: CausalPlaces, past: KeysValues, source: KeysValues
    ) -> tuple[Tensor, KeysValues]:
        """The same for tokens of a decoder that follow those of `past`, and their keys and values."""
        own, crossing, feed = self.layer
        assert isinstance(own, SelfAttention) and isinstance(crossing, CrossAttention)
        x, new = own.after(x, bias, places, past)
        return feed(crossing.attended(x, source)), new

    def forward(self, x: Tensor, bias: Tensor, causal: CausalPlaces | None, encoded: Tensor | None) -> Tensor:
        own, *crossing, feed = self.layer
        x = own(x, bias, causal)
        for layer in crossing:
            x = layer(x, encoded)
        return feed(x)


class SelfAttention(Module):
    def __init__(self, settings: T5Settings, is_decoder: bool, is_first: bool) -> None:
        self.SelfAttention = BiasedAttention(settings, not is_decoder) if is_first else Attention(settings)
        self.layer_norm = RMSNorm(settings.width, settings.epsilon)

    def forward(self, x: Tensor, bias: Tensor, causal: CausalPlaces | None) -> Tensor:
        own = self.layer_norm(x)
        return x + self.SelfAttention(own, own, bias, causal)

    def after(self, x: Tensor, bias: Tensor, places: CausalPlaces, past: KeysValues) -> tuple[Tensor, KeysValues]:
        own = self.layer_norm(x)
        new = self.SelfAttention.source(own)
        return x + self.SelfAttention.attended(own, past.followed_by(new), bias, places), new


class CrossAttention(Module):
    def __init__(self, settings: T5Settings) -> None:
        self.EncDecAttention = Attention(settings)
        self.layer_norm = RMSNorm(settings.width, settings.epsilon)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        return x + self.EncDecAttention(self.layer_norm(x), encoded, None, None)

    def attended(self, x: Tensor, source: KeysValues) -> Tensor:
        return x + self.EncDecAttention.attended(self.layer_norm(x), source, None, None)


class FeedForward(Module):
    def __init__(self, settings: T5Settings) -> None:
        self.DenseReluDense = Dense(settings)
        self.layer_norm = RMSNorm(settings.width, settings.epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.DenseReluDense(self.layer_norm(x))


class Attention(Module):
    """Attention of `x` to `source`, without scaling of the scores."""

    def __init__(self, settings: T5Settings) -> None:
        self.heads, inner = settings.heads, settings.heads * settings.head_size
        self.q, self.k, self.v = (Linear(settings.width, inner, bias=False) for _ in range(3))
        self.o = Linear(inner, settings.width, bias=False)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None, causal: CausalPlaces | None) -> Tensor:
        return self.attended(x, self.source(source), bias, causal)

    def source(self, x: Tensor) -> KeysValues:
        """The keys and values of a source [batch, length, width]."""
        return KeysValues(split_heads(self.k(x), self.heads), split_heads(self.v(x), self.heads))

    def attended(self, x: Tensor, source: KeysValues, bias: Tensor | None, causal: CausalPlaces | None) -> Tensor:
        query = split_heads(self.q(x), self.heads)
        return self.o(joined_heads(attend_heads(query, source, 1, bias, causal)))


class BiasedAttention(Attention):
    """The first self-attention of a stack, which has the biases of all layers."""

    def __init__(self, settings: T5Settings, both_ways: bool) -> None:
        super().__init__(settings)
        self.table = bucket_table(settings.buckets, settings.distance, both_ways)
        self.relative_attention_bias = Embedding(settings.buckets, settings.heads)

    def bias(self, places: CausalPlaces) -> Tensor:
        """The biases of scores of queries and keys at these places: [1, heads, length, keys]."""
        return relative_bias(self.relative_attention_bias, self.table, places.queries, places.keys)


class Dense(Module):
    """activation(x A) B, or with `gated` settings (activation(x G) * x A) B: [..., width] -> same."""

    def __init__(self, settings: T5Settings) -> None:
        width, hidden = settings.width, settings.feedforward
        self.activation = ACTIVATIONS[settings.activation]
        if settings.gated:
            self.wi_0, self.wi_1 = (Linear(width, hidden, bias=False) for _ in range(2))
        else:
            self.wi = Linear(width, hidden, bias=False)
        self.wo = Linear(hidden, width, bias=False)
        self.gated = settings.gated

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.wi_0(x)) * self.wi_1(x) if self.gated else self.activation(self.wi(x))
        return self.wo(hidden)
