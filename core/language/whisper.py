"""Whisper (Radford et al., 2022) as an `nn.Module`: speech in log-mel spectrograms to tokens of text.

Parameters have the names of Whisper in the library Transformers.
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
from lathe.core.language.log_mel import STEP
from lathe.core.nn import functional as F
from lathe.core.nn.conv import Conv1d
from lathe.core.nn.linear import Embedding, Linear
from lathe.core.nn.module import Module, ModuleList
from lathe.core.nn.norm import LayerNorm
from lathe.core.nn.tensor import Tensor


@dataclass(frozen=True)
class StackSettings:
    """The layers of an encoder or decoder. `positions` is the number of its positions, each a learned vector."""

    layers: int
    heads: int
    feedforward: int
    positions: int


@dataclass(frozen=True)
class WhisperSettings:
    """The settings of a Whisper. The encoder has a position for two frames of `mels` numbers.

    `start` is the token with which the decoder begins. `tied`: the last product has the weights of the embedding.
    """

    family: str
    vocabulary: int
    width: int
    mels: int
    encoder: StackSettings
    decoder: StackSettings
    activation: str
    tied: bool
    start: int

    def __post_init__(self) -> None:
        for stack in (self.encoder, self.decoder):
            if self.width % stack.heads:
                raise ModelError(f"{stack.heads} heads do not share {self.width} elements evenly", where=self.family)

    @property
    def frames(self) -> int:
        """Frames of a spectrogram."""
        return 2 * self.encoder.positions

    @property
    def samples(self) -> int:
        """Samples of sound for a spectrogram."""
        return self.frames * STEP

    @property
    def layers(self) -> int:
        return self.encoder.layers + self.decoder.layers

    @property
    def largest_weight(self) -> int:
        """The number of elements of the largest weight."""
        rows = (self.vocabulary, 3 * self.mels, self.encoder.feedforward, self.decoder.feedforward)
        return self.width * max(*rows, 3 * self.width, self.encoder.positions, self.decoder.positions)


class Whisper(Module):
    """A spectrogram, float32 [batch, mels, frames], and the beginning of a text -> logits of the next token.

    Tokens are int64 [batch, length], logits float32 [batch, length, vocabulary]. FeedError for a text longer than the
    decoder's positions.
    """

    def __init__(self, settings: WhisperSettings) -> None:
        self.settings = settings
        self.model = Stacks(settings)
        self.proj_out = None if settings.tied else Linear(settings.width, settings.vocabulary, bias=False)

    def encode(self, input_features: Tensor) -> Tensor:
        """A spectrogram -> float32 [batch, frames / 2, width]."""
        found: Tensor = self.model.encoder(input_features)
        return found

    def decode(self, decoder_input_ids: Tensor, encoded: Tensor) -> Tensor:
        """Tokens and the result of `encode` -> logits."""
        return self._logits(self.model.decoder(decoder_input_ids, encoded))

    def sources(self, encoded: Tensor) -> list[KeysValues]:
        """The keys and values of each decoder layer for the result of `encode`."""
        return self.model.decoder.sources(encoded)

    def decode_after(
        self, decoder_input_ids: Tensor, past: list[KeysValues], sources: list[KeysValues]
    ) -> tuple[Tensor, list[KeysValues]]:
        """`decode` for tokens that follow those of `past`: logits, and the keys and values of these tokens."""
        x, new = self.model.decoder.after(decoder_input_ids, past, sources)
        return self._logits(x), new

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.model.decoder.embed_tokens.weight) if self.proj_out is None else self.proj_out(x)

    def forward(self, input_features: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return self.decode(decoder_input_ids, self.encode(input_features))


class Stacks(Module):
    def __init__(self, settings: WhisperSettings) -> None:
        self.encoder, self.decoder = Encoder(settings), Decoder(settings)


class Encoder(Module):
    """Two convolutions, of which the second halves the frames, positions, and layers of self-attention."""

    def __init__(self, settings: WhisperSettings) -> None:
        self.settings, width = settings, settings.width
        self.conv1 = Conv1d(settings.mels, width, 3, padding=1)
        self.conv2 = Conv1d(width, width, 3, stride=2, padding=1)
        self.embed_positions = Embedding(settings.encoder.positions, width)
        self.embed_positions.requires_grad_(False)  # sines and cosines in published models
        self.layers = ModuleList(EncoderLayer(settings, settings.encoder) for _ in range(settings.encoder.layers))
        self.layer_norm = LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        shape = [self.settings.mels, self.settings.frames]
        self.expect(x.ndim == 3 and list(x.shape[1:]) == shape, f"a spectrogram [batch, {shape[0]}, {shape[1]}]", x)
        x = F.gelu(self.conv2(F.gelu(self.conv1(x)))).transpose(1, 2) + self.embed_positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)


class _Layer(Module):
    """The parts of a layer: each follows a normalization and has a residual connection."""

    def __init__(self, settings: WhisperSettings, stack: StackSettings) -> None:
        width = settings.width
        self.self_attn, self.self_attn_layer_norm = Attention(width, stack.heads), LayerNorm(width)
        self.fc1, self.fc2 = Linear(width, stack.feedforward), Linear(stack.feedforward, width)
        self.final_layer_norm = LayerNorm(width)
        self.activation = ACTIVATIONS[settings.activation]

    def attended(self, x: Tensor, causal: CausalPlaces | None) -> Tensor:
        own = self.self_attn_layer_norm(x)
        return x + self.self_attn(own, own, causal)

    def fed_forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.activation(self.fc1(self.final_layer_norm(x))))


class EncoderLayer(_Layer):
    """Self-attention and a feed-forward network."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fed_forward(self.attended(x, None))


class Decoder(Module):
    """Embeddings of tokens and positions, and layers of attention to earlier tokens and to the encoder's results."""

    def __init__(self, settings: WhisperSettings) -> None:
        self.embed_tokens = Embedding(settings.vocabulary, settings.width)
        self.embed_positions = Embedding(settings.decoder.positions, settings.width)
        self.layers = ModuleList(DecoderLayer(settings, settings.decoder) for _ in range(settings.decoder.layers))
        self.layer_norm = LayerNorm(settings.width)

    def forward(self, ids: Tensor, encoded: Tensor) -> Tensor:
        self.expect(ids.ndim == 2, "token ids [batch, length]", ids)
        positions = positions_of(ids)
        x: Tensor = self.embed_tokens(ids) + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x, encoded, CausalPlaces(positions, positions))
        return self.layer_norm(x)

    def sources(self, encoded: Tensor) -> list[KeysValues]:
        """The keys and values of each layer for the encoder's results."""
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        return [layer.encoder_attn.source(encoded) for layer in layers]

    def after(self, ids: Tensor, past: list[KeysValues], sources: list[KeysValues]) -> tuple[Tensor, list[KeysValues]]:
        """The same for tokens that follow those of `past`, and their keys and values."""
        places = places_after(ids, past[0])
        x, new = self.embed_tokens(ids) + self.embed_positions(places.queries), []
        for layer, before, source in zip(self.layers, past, sources, strict=True):
            assert isinstance(layer, DecoderLayer)
            x, own = layer.after(x, before, source, places)
            new.append(own)
        return self.layer_norm(x), new


class DecoderLayer(_Layer):
    """Attention to earlier tokens, attention to the encoder's results, and a feed-forward network."""

    def __init__(self, settings: WhisperSettings, stack: StackSettings) -> None:
        super().__init__(settings, stack)
        self.encoder_attn = Attention(settings.width, stack.heads)
        self.encoder_attn_layer_norm = LayerNorm(settings.width)

    def forward(self, x: Tensor, encoded: Tensor, places: CausalPlaces) -> Tensor:
        x = self.attended(x, places)
        x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), encoded, None)
        return self.fed_forward(x)

    def after(self, x: Tensor, past: KeysValues, source: KeysValues, places: CausalPlaces) -> tuple[Tensor, KeysValues]:
        """The same for tokens that follow those of `past`, and their keys and values."""
        own = self.self_attn_layer_norm(x)
        new = self.self_attn.source(own)
        x = x + self.self_attn.attended(own, past.followed_by(new), places)
        x = x + self.encoder_attn.attended(self.encoder_attn_layer_norm(x), source, None)
        return self.fed_forward(x), new


class Attention(Module):
    """Attention of `x` to `source`: projections of both, and the output projection. Keys have no bias."""

    def __init__(self, width: int, heads: int) -> None:
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.k_proj = Linear(width, width, bias=False)
        self.v_proj, self.q_proj, self.out_proj = (Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, source: Tensor, causal: CausalPlaces | None) -> Tensor:
        return self.attended(x, self.source(source), causal)

    def source(self, x: Tensor) -> KeysValues:
        """The keys and values of a source [batch, length, width]."""
        return KeysValues(split_heads(self.k_proj(x), self.heads), split_heads(self.v_proj(x), self.heads))

    def attended(self, x: Tensor, source: KeysValues, causal: CausalPlaces | None) -> Tensor:
        query = split_heads(self.q_proj(x), self.heads)
        return self.out_proj(joined_heads(attend_heads(query, source, self.scale, None, causal)))
