"""Types of tensors in GGUF files: block-wise quantization of 32 or 256 elements, as in ggml's `ggml-quants.c`.

A block has its elements in few bits, and one or two scales in float16. Types whose name ends in `_K` have superblocks:
the scales of their sub-blocks are quantized, too. Results equal those of the Python package `gguf` bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Array
from lathe.core.language.stored_tensor import StoredTensor

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]

_BLOCKS_AT_ONCE = 1 << 14  # bounds the memory of temporary arrays: about 50 MiB for 256 elements per block


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF tensors: `elements` per block and `size` of a block in bytes.

    `decode` converts blocks, uint8 [blocks, size], to float32 [blocks, elements]. None if Lathe cannot decode the type;
    then only the size of its tensors is known.
    """

    name: str
    elements: int
    size: int
    decode: Callable[[Bytes], Floats] | None = None


def can_decode(kind: str) -> bool:
    """Whether Lathe can decode tensors of the type with this name."""
    return any(each.name == kind and each.decode is not None for each in BLOCK_TYPES.values())


def decode_blocks(tensor: StoredTensor) -> Array:
    """The elements of a GGUF tensor: float32 is a view of the file, all other types become new float32 arrays.

    UnsupportedError for types without a decoder.
    """
    type_ = next(each for each in BLOCK_TYPES.values() if each.name == tensor.kind)
    if type_.name == "F32":
        return tensor.data.view("<f4").reshape(tensor.shape)
    if type_.decode is None:
        readable = ", ".join(each.name for each in BLOCK_TYPES.values() if each.decode is not None)
        raise UnsupportedError(f"has type {type_.name}, expected one of {readable}", where=f"tensor '{tensor.name}'")
    blocks = tensor.data.reshape(-1, type_.size)
    result = np.empty((len(blocks), type_.elements), np.float32)
    with np.errstate(all="ignore"):  # the scales of a damaged file may be infinite or NaN
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            part = slice(start, start + _BLOCKS_AT_ONCE)
            result[part] = type_.decode(blocks[part])
    return result.reshape(tensor.shape)


def _floats(dtype: Any) -> Callable[[Bytes], Floats]:
    return lambda blocks: np.ascontiguousarray(blocks).view(dtype).astype(np.float32)


def scale(blocks: Bytes, start: int) -> Floats:
    """The little-endian float16 at byte `start` of each block, uint8 [blocks, size], as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def nibbles(packed: Bytes, width: int) -> Bytes:
    """The two halves of each byte [blocks, bytes] as [blocks, 2 * bytes].

    Of each run of `width` bytes the low halves come first, then the high halves.
    """
    runs = packed.reshape(len(packed), -1, 1, width)
    halves = np.concatenate([runs & 15, runs >> 4], axis=2)
    return halves.reshape(len(packed), -1)


def _q4_0(blocks: Bytes) -> Floats:
    return scale(blocks, 0) * (nibbles(blocks[:, 2:], 16).view(np.int8) - np.int8(8)).astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    return scale(blocks, 0) * nibbles(blocks[:, 4:], 16).astype(np.float32) + scale(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return scale(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def steps_of_q4_k(blocks: Bytes) -> tuple[Floats, Floats]:
    """The scales of 8 sub-blocks of 32 elements, and the offsets to subtract from their elements: [blocks, 8] each.

    Scales and minima have 6 bits.
    """
    low, high, rest = (blocks[:, start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([low & 63, (rest & 15) | ((low >> 2) & 48)], axis=1)
    minima = np.concatenate([high & 63, (rest >> 4) | ((high >> 2) & 48)], axis=1)
    return scale(blocks, 0) * scales.astype(np.float32), scale(blocks, 2) * minima.astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    steps, offsets = steps_of_q4_k(blocks)
    elements = nibbles(blocks[:, 16:], 32).reshape(len(blocks), 8, 32).astype(np.float32)
    return (steps[:, :, None] * elements - offsets[:, :, None]).reshape(len(blocks), 256)


def parts_of_q6_k(blocks: Bytes) -> tuple[NDArray[np.int8], Floats]:
    """The elements, int8 [blocks, 256], and the scales of 16 sub-blocks of 16 elements, [blocks, 16].

    4 low bits and 2 high bits of an element lie apart.
    """
    low = nibbles(blocks[:, :128], 64)
    runs = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32)
    high = np.concatenate([(runs >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(len(blocks), 256)
    elements = (low | (high << 4)).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return elements, scale(blocks, 208) * scales


def _q6_k(blocks: Bytes) -> Floats:
    elements, steps = parts_of_q6_k(blocks)
    return (steps[:, :, None] * elements.reshape(len(blocks), 16, 16).astype(np.float32)).reshape(len(blocks), 256)


# By the number in the file (`enum ggml_type`). Types without a decoder are here for errors that name them.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, _floats("<f4")),
    1: BlockType("F16", 1, 2, _floats("<f2")),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    30: BlockType("BF16", 1, 2, _floats(ml_dtypes.bfloat16)),
}
