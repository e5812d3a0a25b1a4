"""`EncoderDecoderRunner`: T5 and Whisper over a cache: an encoder run for each source, decoder runs for new tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lathe.core.compiler.compile import compile
from lathe.core.errors import FeedError
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import DType
from lathe.core.language.chunk_groups import PagedArrays, Slots, run_in_groups
from lathe.core.language.encoder_decoder import EncoderDecoderModel
from lathe.core.language.head_attention import KeysValues
from lathe.core.language.source import Source
from lathe.core.language.t5 import T5, T5Settings
from lathe.core.language.text_sizes import TextSizes
from lathe.core.language.token_runner import Chunk
from lathe.core.language.whisper import Whisper
from lathe.core.nn.module import Module
from lathe.core.nn.tensor import Tensor
from lathe.core.nn.trace import trace

T5_CONTEXT = 1024  # tokens of a target: T5 has no positions of its own that would end
_PARTS = ("keys", "values")


class EncoderDecoderRunner:
    """Runs tokens of many targets: implements `lathe.core.language.token_runner.TokenRunner`.

    Each chunk has the `Source` of its text. The encoder, and the keys and values of the decoder's layers for its
    results, are computed at the first chunk of a source. Both graphs are compiled once, for any lengths. Chunks of
    equal positions, lengths and lengths of sources share a run. Not thread-safe: one run at a time.
    """

    adapter_count = 0

    def __init__(
        self,
        model: EncoderDecoderModel,
        *,
        pages: int,
        page_size: int = 32,
        capacity: int = 512,
        threads: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Compile both graphs, and claim the memory of the cache. ValueError for numbers below 1."""
        if min(pages, page_size, capacity) < 1:
            raise ValueError(f"expected at least 1, got {pages=}, {page_size=}, {capacity=}")
        self._settings, self._source_shape = model.settings, _source_shape(model)
        self.page_size, self.page_count, self.capacity = page_size, pages, capacity
        self.vocabulary = model.settings.vocabulary
        sizes = text_sizes(model)
        self.context = sizes.context
        graphs = encoder_graph(model), decoder_graph(model)
        self._encoder, self._decoder = (
            compile(graph, threads=threads, new_shapes="wait", cache_dir=cache_dir) for graph in graphs
        )
        self._names = [f"{part}.{layer}" for layer in range(sizes.layers) for part in _PARTS]
        self._cache = PagedArrays(
            len(self._names), sizes.kv_heads, sizes.head_size, pages * page_size, np.dtype(np.float32)
        )
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile what is compiled at first runs: an empty past and a past with tokens."""
        shape, dtype = self._source_shape
        source = Source(np.zeros(shape, dtype.numpy))
        for count, position in ((1, 0), (2, 0), (1, 2), (3, 2)):
            if position + count <= min(self.context, self.capacity, self.page_size):
                self.run([Chunk(np.zeros(count, np.int64), position, (0,), source=source)])

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Logits [sum of wanted, vocabulary] of the wanted tokens, in the order of the chunks. Fills the pages.

        FeedError for a chunk without a source, for a source whose shape, dtype or tokens the encoder does not take, and
        as `run_in_groups`.
        """
        for number, chunk in enumerate(chunks):
            if chunk.source is None:
                raise FeedError(f"chunk {number}: expected a source")
            if chunk.source.encoded is None:
                chunk.source.encoded = self._encoded(chunk.source.array)
        return run_in_groups(self, chunks, lambda chunk: _encoded_of(chunk)[0].shape, self._run_group)

    def _encoded(self, array: Array) -> list[Array]:
        """The keys and values of each layer for a source: float32 [1, heads, source length, size]."""
        shape, dtype = self._source_shape
        is_text = isinstance(self._settings, T5Settings)
        fits = array.ndim == 1 and len(array) if is_text else array.shape == shape
        if not fits or array.dtype != dtype.numpy:
            expected = f"{dtype} [length]" if is_text else f"{dtype} {list(shape)}"
            raise FeedError(f"source: expected {expected}, got {array.dtype} {list(array.shape)}")
        if is_text and (array.min() < 0 or array.max() >= self.vocabulary):
            raise FeedError(f"source: expected tokens of 0 to {self.vocabulary - 1}")
        found = self._encoder.run({"source": array[None]})
        return [found[f"source.{name}"] for name in self._names]

    def _run_group(self, chunks: Sequence[Chunk], slots: Slots) -> NDArray[np.float32]:
        position = chunks[0].position
        sources = [_encoded_of(chunk) for chunk in chunks]
        feeds: dict[str, Array] = {"ids": np.stack([chunk.tokens for chunk in chunks])}
        pasts = self._cache.read(slots[:, :position])
        for index, name in enumerate(self._names):
            feeds[f"past.{name}"] = pasts[index]
            of_layer = [arrays[index] for arrays in sources]
            feeds[f"source.{name}"] = of_layer[0] if len(of_layer) == 1 else np.concatenate(of_layer)
        outputs = self._decoder.run(feeds)
        self._cache.write(slots[:, position:], [outputs[f"new.{name}"] for name in self._names])
        logits: NDArray[np.float32] = outputs["logits"]
        return logits

    def close(self) -> None:
        """Free code and weights. Further runs raise SessionClosed."""
        self._encoder.close()
        self._decoder.close()


def _encoded_of(chunk: Chunk) -> list[Array]:
    assert chunk.source is not None
    assert chunk.source.encoded is not None
    return chunk.source.encoded


def encoder_graph(model: EncoderDecoderModel) -> Graph:
    """`source` -> the keys and values of each decoder layer for it: `source.keys.N`, `source.values.N`."""
    shape, dtype = _source_shape(model)
    inner = "source" if isinstance(model.module, T5) else ",".join(map(str, shape))
    return trace(_Sources(model.module), {"source": f"{dtype}[batch,{inner}]"}, (), f"{model.settings.family}_sources")


def decoder_graph(model: EncoderDecoderModel) -> Graph:
    """New tokens `ids` int64 [batch, length] -> `logits`, and their keys and values `new.keys.N`, `new.values.N`.

    Inputs are also `past.*`, those of earlier tokens, and `source.*`: float32 [batch, heads, past or source, size].
    """
    sizes = text_sizes(model)
    length: int | str = "source" if isinstance(model.module, T5) else model.module.settings.encoder.positions
    inputs = {"ids": "int64[batch,length]"}
    for side, tokens in (("past", "past"), ("source", length)):
        shape = f"float32[batch,{sizes.kv_heads},{tokens},{sizes.head_size}]"
        inputs |= {f"{side}.{part}.{layer}": shape for layer in range(sizes.layers) for part in _PARTS}
    return trace(_After(model.module), inputs, (), f"{model.settings.family}_after")


def _source_shape(model: EncoderDecoderModel) -> tuple[tuple[int, ...], DType]:
    """The shape and type of a source; for T5 one of the shapes."""
    settings = model.settings
    if isinstance(settings, T5Settings):
        return (2,), DType.INT64
    return (settings.mels, settings.frames), DType.FLOAT32


def text_sizes(model: EncoderDecoderModel) -> TextSizes:
    """The sizes of the decoder and its cache."""
    settings = model.settings
    if isinstance(settings, T5Settings):
        return TextSizes(settings.vocabulary, T5_CONTEXT, settings.decoder_layers, settings.heads, settings.head_size)
    heads, positions = settings.decoder.heads, settings.decoder.positions
    return TextSizes(settings.vocabulary, positions, settings.decoder.layers, heads, settings.width // heads)


class _Sources(Module):
    def __init__(self, whole: T5 | Whisper) -> None:
        self.whole = whole

    def forward(self, source: Tensor) -> dict[str, Tensor]:
        return _named("source", self.whole.sources(self.whole.encode(source)))


class _After(Module):
    def __init__(self, whole: T5 | Whisper) -> None:
        self.whole = whole

    def forward(self, ids: Tensor, *arrays: Tensor) -> dict[str, Tensor]:
        pairs = [KeysValues(*arrays[at : at + 2]) for at in range(0, len(arrays), 2)]
        layers = len(pairs) // 2
        logits, new = self.whole.decode_after(ids, pairs[:layers], pairs[layers:])
        return {"logits": logits, **_named("new", new)}


def _named(side: str, layers: Sequence[KeysValues]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for layer, each in enumerate(layers):
        found |= {f"{side}.keys.{layer}": each.keys, f"{side}.values.{layer}": each.values}
    return found
