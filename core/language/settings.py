"""`DecoderSettings`: what distinguishes one family of decoders from another, and one size from another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import ModelError

Frequencies: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class LinearScaling:
    """All rotary frequencies divided by `factor` (Chen et al., 2023: Position Interpolation)."""

    factor: float

    def scaled(self, frequencies: Frequencies) -> Frequencies:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Rotary frequencies of Llama 3.1: low ones are divided by `factor`, high ones stay, those between are mixed.

    With `length` the context of the first training, a frequency is low if its wavelength is above `length / low`, and
    high if it is below `length / high`.
    """

    factor: float
    low: float
    high: float
    length: int

    def scaled(self, frequencies: Frequencies) -> Frequencies:
        turns = self.length * frequencies / (2 * math.pi)  # in the context of the first training
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True)
class DividedFrequencies:
    """Each rotary frequency divided by a number of its own, as GGUF files store scalings."""

    factors: tuple[float, ...]

    def scaled(self, frequencies: Frequencies) -> Frequencies:
        return frequencies / np.array(self.factors)


Scaling: TypeAlias = LinearScaling | Llama3Scaling | DividedFrequencies


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al., 2021): elements i and i + size / 2 of a head are rotated as a pair.

    The angle is the position times a frequency, `theta ** (-2 * i / size)` before `scaling`.
    """

    theta: float
    scaling: Scaling | None = None

    def frequencies(self, size: int) -> NDArray[np.float32]:
        """The frequencies for heads of `size` elements: float32 [size / 2]."""
        found = self.theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
        return (found if self.scaling is None else self.scaling.scaled(found)).astype(np.float32)


@dataclass(frozen=True)
class Experts:
    """Mixtures of experts instead of feed-forward networks, in the layers where `layers` is true.

    Each of `count` experts has `width` hidden elements, and a token goes to `chosen` of them. `normalized`: the shares
    of a token's experts add up to 1. `shared` is the width of a further network for all tokens, None if there is none.
    """

    count: int
    chosen: int
    width: int
    normalized: bool
    shared: int | None
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class DecoderSettings:
    """The settings of a decoder-only Transformer.

    `heads` of queries share `kv_heads` of keys and values, each of `head_size` elements. `windows` has the sliding
    window of each layer: a token attends to this many tokens up to itself; None for all. `context` is the number of
    positions that the model was made for. `rotary` is None if positions are learned embeddings. `normalization` is
    "rms" or "layer". `query_norm`: each head of queries and keys is normalized by its root mean square. `gated`: the
    feed-forward network multiplies its activation by a second projection. `tied`: the last product has the weights of
    the embedding. `experts` are the mixtures of experts of some layers. `unrotated` are the layers that do without
    `rotary` (Yang et al., 2025: RNoPE). ModelError for sizes that do not fit.
    """

    family: str
    vocabulary: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    feedforward: int
    context: int
    windows: tuple[int | None, ...]
    epsilon: float
    activation: str
    rotary: Rotary | None = None
    normalization: str = "rms"
    gated: bool = True
    tied: bool = False
    query_norm: bool = False
    query_bias: bool = False
    output_bias: bool = False
    feedforward_bias: bool = False
    experts: Experts | None = None
    unrotated: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} heads cannot share {self.kv_heads} heads of keys", where=self.family)
        if self.rotary is not None and self.head_size % 2:
            raise ModelError(f"rotary heads: expected an even size, got {self.head_size}", where=self.family)
        scaling = self.rotary.scaling if self.rotary is not None else None
        if isinstance(scaling, DividedFrequencies) and len(scaling.factors) != self.head_size // 2:
            message = f"rotary scaling: expected {self.head_size // 2} factors, got {len(scaling.factors)}"
            raise ModelError(message, where=self.family)
        if self.experts is not None and self.experts.chosen > self.experts.count:
            message = f"{self.experts.chosen} experts of a token: there are only {self.experts.count}"
            raise ModelError(message, where=self.family)

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def largest_weight(self) -> int:
        """The number of elements of the largest weight."""
        return self.width * max(self.vocabulary, self.heads * self.head_size, self.feedforward)

    @property
    def expert_elements(self) -> int:
        """The number of elements of the largest weight of all experts together; 0 without experts."""
        return 0 if self.experts is None else 2 * self.experts.count * self.experts.width * self.width
