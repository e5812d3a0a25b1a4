"""The two graphs of a decoder with a cache: tokens to hidden states, and hidden states to logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lathe.core.ir.graph import Graph, State
from lathe.core.ir.types import DType, TensorType
from lathe.core.language.adapters import Adapter
from lathe.core.language.attention import LayerCache, cache_places
from lathe.core.language.coded_weights import traced_with_codes
from lathe.core.language.decoder import Decoder
from lathe.core.nn.module import Module
from lathe.core.nn.tensor import Tensor


@dataclass(frozen=True)
class CacheLayout:
    """The extents of a cache: `pages` pages of `page_size` tokens, in elements of `dtype`."""

    pages: int
    page_size: int
    dtype: DType = DType.FLOAT32

    def types(self, settings: CacheSizes) -> dict[str, TensorType]:
        """The types of the parts of a layer's cache (`LayerCache.parts`), in order."""
        heads, size = settings.kv_heads, settings.head_size
        found = {
            "keys": TensorType(self.dtype, (self.pages, heads, size, self.page_size)),
            "values": TensorType(self.dtype, (self.pages, heads, self.page_size, size)),
        }
        if self.dtype is DType.INT8:
            scales = TensorType(DType.FLOAT32, (self.pages, heads, self.page_size, 1))
            found |= {"key_scales": scales, "value_scales": scales}
        return found

    def nbytes(self, settings: CacheSizes) -> int:
        """The bytes of the whole cache."""
        return self.pages * page_bytes(settings, self.page_size, self.dtype)

    def table_pages(self, context: int) -> int:
        """The pages of a sequence that fills the context."""
        return -(-context // self.page_size)


class CacheSizes(Protocol):
    """The sizes of a model's keys and values."""

    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...


def page_bytes(settings: CacheSizes, page_size: int = 32, dtype: DType = DType.FLOAT32) -> int:
    """The bytes of one page of the cache: keys and values of `page_size` tokens in all layers.

    With int8 each row of a head has a scale of 4 bytes.
    """
    row = settings.head_size * dtype.itemsize + (4 if dtype is DType.INT8 else 0)
    return 2 * settings.layers * settings.kv_heads * page_size * row


def step_graph(
    decoder: Decoder, layout: CacheLayout, precision: str = "float32", adapters: Sequence[Adapter] = ()
) -> Graph:
    """Tokens of many sequences to hidden states, with the cache as state.

    `embedded` float32 [n, width] are the rows of the embedding. `positions`, `sequences` and `slots` int64 [n], and
    `tables` int64 [n, pages of the longest sequence]: see the operators CacheWrite and CachedAttention. The result is
    `hidden` float32 [n, width], after the last normalization. Weights that a GGUF file has in codes stay codes. With
    `adapters` the last input is `adapters` int64 [n]: the number of each token's adapter from 1 on, 0 for none.
    """
    settings = decoder.settings
    parts = layout.types(settings)
    inputs: dict[str, TensorType | str] = {"embedded": f"float32[n,{settings.width}]"}
    inputs |= dict.fromkeys(("positions", "sequences", "slots"), "int64[n]")
    inputs["tables"] = f"int64[n,{layout.table_pages(settings.context)}]"
    for layer in range(settings.layers):
        inputs |= {f"{name}.{layer}": type_ for name, type_ in parts.items()}

    graph = traced_with_codes(decoder, _Step, inputs, (), settings.family, precision, adapters)
    return with_states(graph)


def head_graph(decoder: Decoder, precision: str = "float32") -> Graph:
    """Hidden states to logits: `hidden` float32 [n, width] -> `logits` float32 [n, vocabulary]."""
    types = {"hidden": f"float32[n,{decoder.settings.width}]"}
    return traced_with_codes(decoder, _Head, types, ["logits"], f"{decoder.settings.family}_head", precision)


class _Step(Module):
    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def forward(
        self, embedded: Tensor, positions: Tensor, sequences: Tensor, slots: Tensor, tables: Tensor, *pages: Tensor
    ) -> dict[str, Tensor]:
        places = cache_places(positions, sequences, slots, tables, self.decoder.settings)
        size = len(pages) // self.decoder.settings.layers
        caches = [LayerCache(*pages[i : i + size]) for i in range(0, len(pages), size)]
        hidden, following = self.decoder.model.cached(embedded, places, caches)
        outputs = {"hidden": hidden}
        for layer, cache in enumerate(following):
            outputs |= {f"next.{name}.{layer}": part for name, part in cache.parts.items()}
        return outputs


class _Head(Module):
    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def forward(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


def with_states(graph: Graph) -> Graph:
    """The graph with the inputs `NAME` that have an output `next.NAME` as states, whose next values these are.

    The states begin with zeros, which take no memory here.
    """
    following = {value.name: value for value in graph.outputs}
    for value in [value for value in graph.inputs if f"next.{value.name}" in following]:
        initial = np.broadcast_to(np.zeros((), value.dtype.numpy), value.tensor.evaluate({}))
        graph.states.append(State(value, following[f"next.{value.name}"], initial))
    states = {state.value for state in graph.states}
    graph.inputs = [value for value in graph.inputs if value not in states]
    graph.outputs = [value for value in graph.outputs if not value.name.startswith("next.")]
    return graph
