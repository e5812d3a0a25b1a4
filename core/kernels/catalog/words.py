"""Words of matrix products: 32 bits that hold one float32, two bfloat16 or four bytes, neighbours along the depth.

A product of narrow numbers is laid out like one of words. Its left operand lies in memory as it is; its weights are
packed so that the elements which one word of the left operand meets are a word as well (what VNNI instructions want).

No instruction for vectors multiplies float16 and adds up in float32: there each float16 is a word of its own, of 16
bits in memory and a float32 in registers. Those for matrix tiles take words of two.
"""

from __future__ import annotations

import numpy as np

from core.ir.dim import SymDim
from core.ir.graph import Array
from core.ir.types import Dim, DType

WORD_BYTES = 4
NARROW = frozenset({DType.BFLOAT16, DType.FLOAT16})  # kernels store such floats, and compute with them in float32
_ELEMENTS = {
    (DType.FLOAT32, DType.FLOAT32): DType.FLOAT32,
    (DType.BFLOAT16, DType.FLOAT32): DType.BFLOAT16,
    (DType.FLOAT16, DType.FLOAT32): DType.FLOAT16,
    (DType.UINT8, DType.INT8): DType.UINT8,
}


def element_of(left: DType, right: DType) -> DType | None:
    """What the words of the left operand of a product hold; None for types that no kernel multiplies."""
    return _ELEMENTS.get((left, right))


def per_word(element: DType) -> int:
    return 1 if element is DType.FLOAT16 else WORD_BYTES // element.itemsize


def per_tile_word(element: DType) -> int:
    """The same for matrix tiles, all of whose words are of 32 bits."""
    return WORD_BYTES // element.itemsize


def word_dtype(element: DType) -> DType:
    """The type of a word in a register, and in scratch."""
    return DType.FLOAT32 if element in (DType.FLOAT32, DType.FLOAT16) else DType.INT32


def stored_dtype(element: DType) -> DType:
    """The type of a word in tensors and packed weights."""
    return DType.FLOAT16 if element is DType.FLOAT16 else word_dtype(element)


def total_dtype(element: DType) -> DType:
    """The type in which products add up."""
    return DType.FLOAT32 if element.is_float else DType.INT32


def word_of(value: int, element: DType) -> int:
    """The word that holds an integer in every place."""
    if value == 0:
        return 0
    return int(np.full(per_word(element), value, element.numpy).view(np.int32)[0])


def in_words(count: Dim, element: DType) -> Dim | None:
    """So many elements as a number of words; None unless they are whole words for every batch size."""
    size = per_word(element)
    if isinstance(count, int):
        return count // size if count % size == 0 else None
    if any(coefficient % size for _, coefficient in count.terms):
        return None
    return SymDim([(monomial, coefficient // size) for monomial, coefficient in count.terms])


def computed_dtype(dtype: DType) -> DType:
    """The type in which kernels compute with elements of this type."""
    return DType.FLOAT32 if dtype in NARROW else dtype


def pack_words(matrix: Array, element: DType, size: int | None = None) -> Array:
    """A right operand [..., K, N] as words [..., K / per word, N]; the last one is filled up with zeros. `size`:
    elements of a word, where another number of them is wanted."""
    size = size or per_word(element)
    narrow = matrix.astype(element.numpy if element.is_float else np.int8, copy=False)
    if size == 1:
        return narrow
    *batch, depth, columns = narrow.shape
    padded = np.zeros((*batch, -(-depth // size) * size, columns), narrow.dtype)
    padded[..., :depth, :] = narrow
    apart = padded.reshape(*batch, -1, size, columns)
    return np.ascontiguousarray(np.swapaxes(apart, -1, -2)).view(np.int32).reshape(*batch, -1, columns)
