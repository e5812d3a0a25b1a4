"""MurmurHash3 of com.microsoft: hashes numbers or strings, such as keys of embedding tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, OpDef, RowAxis, register
from lathe.core.ops.opdef.type_rules import Kind, check_kind

_KIND = Kind(
    "int32, uint32, int64, uint64, float32, float64 or string",
    frozenset({DType.INT32, DType.UINT32, DType.INT64, DType.UINT64, DType.FLOAT32, DType.FLOAT64, DType.STRING}),
)
_C1, _C2, _MASK = 0xCC9E2D51, 0x1B873593, 0xFFFFFFFF


@register
class MurmurHash3(OpDef):
    """MurmurHash3_x86_32 (A. Appleby) of each element's bytes, text as UTF-8: uint32, or int32 if `positive` is 0."""

    inputs = "X"
    outputs = "Y"
    domain = "com.microsoft"
    attrs = {"positive": 1, "seed": 0}
    zero_gradient = "a hash is an integer"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, _KIND)
        return [TensorType(DType.UINT32 if c.attr("positive") else DType.INT32, c.shape(0))]

    def reference(self, c: Call, x: Array) -> Array:
        seed = np.uint32(c.attr("seed") & _MASK)
        if x.dtype.kind in "OUST":
            found = np.array([_of_text(str(item).encode(), int(seed)) for item in x.ravel()], np.uint32)
        else:
            words = np.ascontiguousarray(x).reshape(-1, 1).view(np.uint32)
            found = _of_words(words, seed)
        found = found.reshape(x.shape)
        return found if c.attr("positive") else found.view(np.int32)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return [axes[0]]


def _rotate(x: Array, by: int) -> Array:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def _mix(word: Array) -> Array:
    return _rotate(word * np.uint32(_C1), 15) * np.uint32(_C2)


def _finalize(h: Array, length: int) -> Array:
    h = h ^ np.uint32(length)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def _of_words(words: Array, seed: np.uint32) -> Array:
    """The hash of each row of 32-bit words."""
    h = np.full(len(words), seed, np.uint32)
    for column in words.T:
        h = _rotate(h ^ _mix(column), 13) * np.uint32(5) + np.uint32(0xE6546B64)
    return _finalize(h, 4 * words.shape[1])


def _of_text(text: bytes, seed: int) -> np.uint32:
    """The hash of one string: its whole words, then the remaining bytes as one word without rotation."""
    whole = len(text) // 4 * 4
    h = np.full(1, seed, np.uint32)
    for word in np.frombuffer(text[:whole], np.uint32):
        h = _rotate(h ^ _mix(np.full(1, word, np.uint32)), 13) * np.uint32(5) + np.uint32(0xE6546B64)
    if whole < len(text):
        h = h ^ _mix(np.full(1, int.from_bytes(text[whole:], "little"), np.uint32))
    return np.uint32(_finalize(h, len(text))[0])
