"""Random bits inside a training step: a function of a key and of where an element lies, so that they cost one pass over
the data, need no state, and are the same again when a run is repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import pi, prod

import numpy as np

from core.ir.types import Dim, DType
from core.ops.terms import Term, Writer

_BITS = DType.UINT32
_UNUSED = 8  # of 32 bits a float32 holds 24
_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: keys of neighbouring numbers lie far apart


def kept(writer: Writer, key: Term, salt: int, shape: Sequence[Dim], ratio: float) -> Term:
    """bool[shape]: False with probability `ratio`. `salt` tells apart what draws with one key (uint32, rank 0)."""
    return bits(writer, key, salt, shape) >= min(round(ratio * 2**32), 2**32 - 1)


def uniform(writer: Writer, key: Term, salt: int, shape: Sequence[Dim]) -> Term:
    """float32[shape], evenly distributed over [0, 1) in steps of 2**-24."""
    high = bits(writer, key, salt, shape).op("BitShift", _UNUSED, direction="RIGHT")
    return high.cast(DType.FLOAT32) * 2.0**-24


def normal(writer: Writer, key: Term, salt: int, shape: Sequence[Dim]) -> Term:
    """float32[shape], standard normal (G. Box and M. Muller, 1958)."""
    first, second = (uniform(writer, key, 2 * salt + i, shape) for i in range(2))
    return ((1 - first).log() * -2).sqrt() * (second * (2 * pi)).op("Cos")


def bits(writer: Writer, key: Term, salt: int, shape: Sequence[Dim]) -> Term:
    """uint32[shape], evenly distributed: the key is stirred once with every coordinate."""
    found = _stirred(key + salt * _GOLDEN % 2**32)
    for coordinate in _coordinates(writer, shape):
        found = _stirred(found + coordinate * _GOLDEN)
    return found


def _coordinates(writer: Writer, shape: Sequence[Dim]) -> Iterator[Term]:
    """Arrays that broadcast to `shape` and together name each of its elements; neighbouring static axes share one."""
    axis, rank = 0, len(shape)
    while axis < rank:
        end = axis + 1
        while isinstance(shape[axis], int) and end < rank and isinstance(shape[end], int):
            end += 1
        yield _counted(writer, shape[axis:end]).reshape((*(1,) * axis, *shape[axis:end], *(1,) * (rank - end)))
        axis = end


def _counted(writer: Writer, shape: Sequence[Dim]) -> Term:
    """0, 1, 2 ... in a tensor of this shape, which is static or has one axis."""
    sizes = [size for size in shape if isinstance(size, int)]
    if len(sizes) == len(shape):
        return writer.array(np.arange(prod(sizes)).reshape(sizes), _BITS)
    ones = writer.fill(1, DType.INT32, shape)
    return ones.op("CumSum", writer.number(0, DType.INT64), exclusive=1).cast(_BITS)


def _stirred(x: Term) -> Term:
    """Every bit of the result depends on every bit of x: the finalizer "lowbias32" of C. Wellons' hash prospector."""
    x = _folded(x, 16) * 0x7FEB352D
    x = _folded(x, 15) * 0x846CA68B
    return _folded(x, 16)


def _folded(x: Term, by: int) -> Term:
    return x.op("BitwiseXor", x.op("BitShift", by, direction="RIGHT"))
