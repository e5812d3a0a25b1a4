"""GGUF tensors as codes of 4 or 8 bits with scales, the form of the operator DequantizedMatMul.

Results are those of `gguf_blocks.py`: an element is number(code) * scale + offset, with the scale of its block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.language import gguf_blocks as blocks
from lathe.core.language.gguf_blocks import Bytes, Floats
from lathe.core.language.stored_tensor import StoredTensor

FOUR_BITS = 16  # numbers


@dataclass(frozen=True)
class BlockCodes:
    """A matrix [rows, columns]: codes, int8 or indices of `numbers` in uint8; `block` adjacent columns share a scale.

    `scales` and `offsets`, if there are any, are float32 [rows, columns / block].
    """

    codes: Array
    scales: Array
    offsets: Array | None
    numbers: tuple[float, ...]
    block: int


@dataclass(frozen=True)
class _Parts:
    """The parts of blocks [count, ...]: codes [count, elements], scales and offsets [count, scales in a block]."""

    codes: Array
    scales: Floats
    offsets: Floats | None = None


def can_split(tensor: StoredTensor) -> bool:
    """Whether a tensor is a matrix of type Q4_0, Q4_1, Q8_0, Q4_K or Q6_K."""
    return tensor.kind in _SPLIT and len(tensor.shape) == 2


def block_codes(tensor: StoredTensor) -> BlockCodes | None:
    """The codes of a matrix of a type that `can_split` accepts; None for other tensors."""
    if not can_split(tensor):
        return None
    split, first, size = _SPLIT[tensor.kind]
    with np.errstate(all="ignore"):  # the scales of a damaged file may be infinite or NaN
        parts = split(tensor.data.reshape(-1, size))
    rows, columns = tensor.shape
    numbers = () if first is None else tuple(float(first + code) for code in range(FOUR_BITS))
    scales = np.ascontiguousarray(parts.scales).reshape(rows, -1)
    offsets = None if parts.offsets is None else np.ascontiguousarray(parts.offsets).reshape(rows, -1)
    return BlockCodes(parts.codes.reshape(rows, columns), scales, offsets, numbers, columns // scales.shape[1])


def _q4_0(data: Bytes) -> _Parts:
    return _Parts(blocks.nibbles(data[:, 2:], 16), blocks.scale(data, 0))


def _q4_1(data: Bytes) -> _Parts:
    return _Parts(blocks.nibbles(data[:, 4:], 16), blocks.scale(data, 0), blocks.scale(data, 2))


def _q8_0(data: Bytes) -> _Parts:
    return _Parts(np.ascontiguousarray(data[:, 2:]).view(np.int8), blocks.scale(data, 0))


def _q4_k(data: Bytes) -> _Parts:
    steps, offsets = blocks.steps_of_q4_k(data)
    return _Parts(blocks.nibbles(data[:, 16:], 32), steps, -offsets)


def _q6_k(data: Bytes) -> _Parts:
    codes, steps = blocks.parts_of_q6_k(data)
    return _Parts(codes, steps)


# By type: the function that splits blocks, the number of code 0 (None for int8), and bytes per block.
_SPLIT: dict[str, tuple[Callable[[Bytes], _Parts], int | None, int]] = {
    "Q4_0": (_q4_0, -8, 18),
    "Q4_1": (_q4_1, 0, 20),
    "Q8_0": (_q8_0, None, 34),
    "Q4_K": (_q4_k, 0, 144),
    "Q6_K": (_q6_k, None, 210),
}
