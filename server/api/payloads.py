"""Tensors as they travel in binary, and what it costs to write an answer."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from server.datatypes import STEP, elements_of, packing
from server.steps import Steps
from server.types import Array, RequestedOutput

Payload: TypeAlias = bytes | memoryview

_SMALL = 4096  # bytes below which a copy costs less than a view
# What is written costs, in bytes that are read (server.api.readers.HERE of them take about a millisecond):
NUMBER_COST, _TEXT = 8, 16  # for each number in JSON, each text in JSON or packed
_SORTED, _CLASS = 16, 64  # for each number that is sorted, each class that is told
_DIGITS = 12  # bytes of a number in JSON, most often
MOVED = 4  # bytes that are copied as soon as one is read


def payload(datatype: str, array: Array) -> Steps[Payload]:
    """Return a tensor as it travels in binary."""
    if datatype == "BYTES":
        return (yield from packing(array))
    return raw_bytes(array)


def raw_bytes(array: Array) -> Payload:
    """Return an array's elements, row-major; a large contiguous one is not copied."""
    if array.nbytes <= _SMALL:
        return array.tobytes()
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    if array.dtype.kind == "V":  # bfloat16 has no buffer format
        array = array.reshape(-1).view(np.uint8)
    return array.data.cast("B")


def cost(wanted: RequestedOutput, datatype: str, array: Array) -> int:
    """Return what it costs to write one output. Takes little time itself."""
    if wanted.classes:
        rows = array.shape[0] if array.ndim else 1
        return array.size * _SORTED + rows * min(wanted.classes, array.size) * _CLASS
    if datatype == "BYTES":
        return _text_size(array)
    if wanted.binary:
        return 0 if array.flags.c_contiguous else array.nbytes
    return array.nbytes // MOVED if wanted.span is not None else array.size * NUMBER_COST


def size(wanted: RequestedOutput, datatype: str, array: Array) -> int:
    """Return about how many bytes of the answer one output takes, if it costs little to write."""
    if wanted.span is not None:
        return 0
    if datatype == "BYTES":
        return _text_size(array)
    return array.nbytes if wanted.binary and not wanted.classes else array.size * _DIGITS


def _text_size(array: Array) -> int:
    """Of many texts the number will do, which is already much."""
    text = sum(map(len, elements_of(array, 0))) if array.size <= STEP else 0
    return array.size * _TEXT + text
