"""Words of matrix products: 32 bits that hold one float32, two bfloat16 or four bytes, adjacent along the depth.

A product of narrow numbers is laid out as a product of words. Its left operand keeps its layout in memory. Its weights
are packed so that the elements that are multiplied by one word of the left operand form a word too (the VNNI layout).

No vector instruction multiplies float16 and accumulates in float32. Vector kernels therefore treat each float16 as a
word of its own: 16 bits in memory, a float32 in registers. Tile instructions (AMX) take words of two float16.
"""

from __future__ import annotations

import numpy as np

from lathe.core.ir.dim import SymDim
from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType

WORD_BYTES = 4
NARROW = frozenset({DType.BFLOAT16, DType.FLOAT16})  # kernels load and store these types, and compute in float32
_ELEMENTS = {
    (DType.FLOAT32, DType.FLOAT32): DType.FLOAT32,
    (DType.BFLOAT16, DType.FLOAT32): DType.BFLOAT16,
    (DType.FLOAT16, DType.FLOAT32): DType.FLOAT16,
    (DType.UINT8, DType.INT8): DType.UINT8,
}


def element_of(left: DType, right: DType) -> DType | None:
    """The element type in the words of a product's left operand, given the types of both operands.

    None for pairs of types that the kernels of words do not multiply.
    """
    return _ELEMENTS.get((left, right))


def elements_per_word(element: DType) -> int:
    """Elements per word in vector kernels: 1 for float32 and float16, 2 for bfloat16, 4 for bytes."""
    return 1 if element is DType.FLOAT16 else WORD_BYTES // element.itemsize


def elements_per_tile_word(element: DType) -> int:
    """Elements per word in matrix tiles (AMX), whose words always have 32 bits."""
    return WORD_BYTES // element.itemsize


def word_dtype(element: DType) -> DType:
    """The type of a word in a register, and in scratch: float32 for float32 and float16, otherwise int32."""
    return DType.FLOAT32 if element in (DType.FLOAT32, DType.FLOAT16) else DType.INT32


def stored_dtype(element: DType) -> DType:
    """The type of a word in tensors and packed weights: as in registers, but float16 for float16."""
    return DType.FLOAT16 if element is DType.FLOAT16 else word_dtype(element)


def accumulator_dtype(element: DType) -> DType:
    """The type in which a product of words with such elements adds up: float32 for floats, int32 for bytes."""
    return DType.FLOAT32 if element.is_float else DType.INT32


def word_of_bytes(value: int) -> int:
    """The word, as a signed integer, of four bytes of the value `value`, from 0 to 255."""
    return int(np.full(WORD_BYTES, value, np.uint8).view(np.int32)[0])


def count_in_words(count: Dim, element: DType) -> Dim | None:
    """The number of words that hold `count` elements; None unless each coefficient of `count` fills whole words."""
    size = elements_per_word(element)
    if isinstance(count, int):
        return count // size if count % size == 0 else None
    if any(coefficient % size for _, coefficient in count.terms):
        return None
    return SymDim([(monomial, coefficient // size) for monomial, coefficient in count.terms])


def compute_dtype(dtype: DType) -> DType:
    """The type of elements of this type in registers: float32 for float16 and bfloat16, otherwise the type itself."""
    return DType.FLOAT32 if dtype in NARROW else dtype


def pack_words(matrix: Array, element: DType, size: int | None = None) -> Array:
    """A right operand [..., K, N] as words [..., ceil(K / size), N], padded with zeros along K.

    `size` is the number of elements per word; by default that of vector kernels. Words of several elements are int32,
    other words have the type `element`. A matrix that needs no conversion is returned itself.
    """
    size = size or elements_per_word(element)
    narrow = matrix.astype(element.numpy if element.is_float else np.int8, copy=False)
    if size == 1:
        return narrow
    *batch, depth, columns = narrow.shape
    padded = np.zeros((*batch, -(-depth // size) * size, columns), narrow.dtype)
    padded[..., :depth, :] = narrow
    split = padded.reshape(*batch, -1, size, columns)
    return np.ascontiguousarray(np.swapaxes(split, -1, -2)).view(np.int32).reshape(*batch, -1, columns)
