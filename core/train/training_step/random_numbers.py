"""Counter-based random numbers inside a training step: a hash of a key and the coordinates of each element.

They need no state, cost one pass over the data, and are the same when a run is repeated with the same key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import pi, prod
from struct import pack
from zlib import crc32

import numpy as np

from lathe.core.ir.types import Dim, DType
from lathe.core.ops.opdef.terms import Term, Writer

_BITS = DType.UINT32
_UNUSED_BITS = 8  # of 32 bits a float32 holds 24
_GOLDEN = 0x9E3779B9  # 2**32 divided by the golden ratio: spreads neighbouring numbers (Fibonacci hashing)


def dropout_mask(writer: Writer, key: Term, salt: int, shape: Sequence[Dim], ratio: float) -> Term:
    """bool[shape], each False with probability `ratio`: the mask of dropout.

    `key` is uint32 of rank 0. Operators of one graph get different numbers from the same key by different `salt`.
    """
    return random_bits(writer, key, salt, shape) >= min(round(ratio * 2**32), 2**32 - 1)


def uniform(writer: Writer, key: Term, salt: int, shape: Sequence[Dim]) -> Term:
    """float32[shape], uniform over [0, 1) in steps of 2**-24.

    `key` is uint32 of rank 0. Operators of one graph get different numbers from the same key by different `salt`.
    """
    return _to_unit_interval(random_bits(writer, key, salt, shape))


def normal(writer: Writer, key: Term, salt: int, shape: Sequence[Dim]) -> Term:
    """float32[shape], standard normal, by the Box-Muller transform (1958).

    `key` is uint32 of rank 0. Operators of one graph get different numbers from the same key by different `salt`.
    """
    bits = random_bits(writer, key, salt, shape)
    radius, angle = _to_unit_interval(bits), _to_unit_interval(_hash(bits + _GOLDEN))
    return ((1 - radius).log() * -2).sqrt() * (angle * (2 * pi)).op("Cos")


def salt_of_seed(seed: float) -> int:
    """A salt for the attribute `seed` of an operator; unlikely to be one of the small numbers of other operators."""
    return crc32(pack("<d", seed))


def random_bits(writer: Writer, key: Term, salt: int, shape: Sequence[Dim]) -> Term:
    """uint32[shape], each uniform over all 32 bits: a hash of key, `salt` and each coordinate."""
    words = _hash(key + salt * _GOLDEN % 2**32)
    for coordinate in _coordinates(writer, shape):
        words = _hash(words + coordinate * _GOLDEN)
    return words


def _to_unit_interval(bits: Term) -> Term:
    return bits.op("BitShift", _UNUSED_BITS, direction="RIGHT").cast(DType.FLOAT32) * 2.0**-24


def _coordinates(writer: Writer, shape: Sequence[Dim]) -> Iterator[Term]:
    """Arrays of indices that broadcast to `shape` and together identify each element.

    Adjacent static axes share one array, every symbolic axis has an array of its own.
    """
    axis, rank = 0, len(shape)
    while axis < rank:
        end = axis + 1
        while isinstance(shape[axis], int) and end < rank and isinstance(shape[end], int):
            end += 1
        yield _indices(writer, shape[axis:end]).reshape((*(1,) * axis, *shape[axis:end], *(1,) * (rank - end)))
        axis = end


def _indices(writer: Writer, shape: Sequence[Dim]) -> Term:
    """0, 1, 2 ... in row-major order as uint32[shape]; the shape is static or has one axis."""
    sizes = [size for size in shape if isinstance(size, int)]
    if len(sizes) == len(shape):
        return writer.array(np.arange(prod(sizes)).reshape(sizes), _BITS)
    ones = writer.fill(1, DType.INT32, shape)
    return ones.op("CumSum", writer.number(0, DType.INT64), exclusive=1).cast(_BITS)


def _hash(x: Term) -> Term:
    """A 32-bit integer hash: the finalizer "lowbias32" of C. Wellons' hash prospector."""
    x = _xor_shift(x, 16) * 0x7FEB352D
    x = _xor_shift(x, 15) * 0x846CA68B
    return _xor_shift(x, 16)


def _xor_shift(x: Term, by: int) -> Term:
    return x.op("BitwiseXor", x.op("BitShift", by, direction="RIGHT"))
