"""Decoders as ONNX files whose inputs are the keys and values of earlier tokens: which input and output is which.

Exporters of PyTorch and Optimum, and ONNX Runtime GenAI (with GroupQueryAttention), use these names: `input_ids`,
`attention_mask`, `position_ids`, `past_key_values.N.key` and `.value`; `logits`, `present.N.key` and `.value`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.ir.graph import Array, Graph, Value
from lathe.core.ir.types import DType, Shape, TensorType, ValueType

_PAST = re.compile(r"past(?:_key_values)?\.(\d+)\.(key|value)")
_PRESENT = re.compile(r"present(?:_key_values)?\.(\d+)\.(key|value)")
_PARTS = ("key", "value")


@dataclass(frozen=True)
class CacheTensor:
    """Keys or values of a layer: the input with those of earlier tokens, and the output with those of all tokens."""

    layer: int
    part: str
    input: str
    output: str


@dataclass(frozen=True)
class PastInputs:
    """The inputs and outputs of a decoder with past. `mask` and `positions` are None if it has no such input.

    Keys and values are `dtype` [batch, kv_heads, tokens, head_size]; `caches` has those of all layers, keys before
    values.
    """

    tokens: str
    mask: str | None
    positions: str | None
    logits: str
    caches: tuple[CacheTensor, ...]
    kv_heads: int
    head_size: int
    dtype: DType

    @property
    def layers(self) -> int:
        return len(self.caches) // len(_PARTS)

    def empty(self, batch: int) -> dict[str, Array]:
        """The inputs of a run without earlier tokens, for `batch` sequences: caches of length 0."""
        shape = (batch, self.kv_heads, 0, self.head_size)
        return {cache.input: np.zeros(shape, self.dtype.numpy) for cache in self.caches}

    def following(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """The caches that the next run takes, from the outputs of this one."""
        return {cache.input: outputs[cache.output] for cache in self.caches}


def find_past_inputs(graph: Graph) -> PastInputs | None:
    """The description of a decoder with past; None for a graph without inputs `past_key_values.N.key` or `.value`.

    ModelError if keys or values of a layer are missing, lack their output, or have other sizes than those of the first
    layer. UnsupportedError for other inputs than those of this module, and for sizes that are not known.
    """
    pasts = _numbered(graph.inputs, _PAST)
    if not pasts:
        return None
    presents = _numbered(graph.outputs, _PRESENT)
    first: tuple[int, int, DType] | None = None
    caches = []
    for layer in range(-(-len(pasts) // len(_PARTS))):
        for part in _PARTS:
            source, result = pasts.get((layer, part)), presents.get((layer, part))
            if source is None or result is None:
                kind = "input 'past_key_values" if source is None else "output 'present"
                raise ModelError(f"{kind}.{layer}.{part}' is missing", where=graph.name)
            sizes = _sizes(source, result)
            first = first or sizes
            if sizes != first:
                raise ModelError(f"input '{source.name}' is {source.type}, unlike that of the first layer")
            caches.append(CacheTensor(layer, part, source.name, result.name))
    named = {value.name for value in graph.inputs} - {cache.input for cache in caches}
    unknown = sorted(named - {"input_ids", "attention_mask", "position_ids"})
    outputs = {value.name for value in graph.outputs}
    if unknown or "input_ids" not in named or "logits" not in outputs:
        expected = "input_ids, attention_mask and position_ids, and an output logits"
        raise UnsupportedError(f"expected inputs {expected}, got {', '.join(sorted(named | outputs))}")
    mask, positions = (name if name in named else None for name in ("attention_mask", "position_ids"))
    assert first is not None
    return PastInputs("input_ids", mask, positions, "logits", tuple(caches), *first)


def _numbered(values: list[Value], pattern: re.Pattern[str]) -> dict[tuple[int, str], Value]:
    """The values whose names match, by layer and part."""
    found = ((pattern.fullmatch(value.name), value) for value in values)
    return {(int(match[1]), match[2]): value for match, value in found if match is not None}


def _sizes(source: Value, result: Value) -> tuple[int, int, DType]:
    """Heads, elements of a head, and type of keys or values. UnsupportedError unless both sizes are known.

    Some files of ONNX Runtime GenAI have a name instead of a size in the input; the output has the size.
    """
    known = [shape for value in (source, result) if (shape := _four(value.type)) is not None]
    if _four(source.type) is not None:
        heads, size = (next((s[axis] for s in known if isinstance(s[axis], int)), None) for axis in (1, 3))
        if isinstance(heads, int) and isinstance(size, int):
            return heads, size, source.tensor.dtype
    expected = "expected [batch, heads, tokens, size] with known sizes"
    raise UnsupportedError(f"input '{source.name}' is {source.type}, {expected}")


def _four(type_: ValueType) -> Shape | None:
    """The shape of a tensor of rank 4; None for another type."""
    return type_.shape if isinstance(type_, TensorType) and type_.shape and len(type_.shape) == 4 else None
