"""Binary tensor payloads, and estimates of the cost and size of an answer."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from lathe.server.datatypes import ELEMENTS_PER_STEP, elements_of, pack_in_steps
from lathe.server.steps import Steps
from lathe.server.types import Array, RequestedOutput

Payload: TypeAlias = bytes | memoryview

_SMALL = 4096  # bytes below which a copy costs less than a view
# Costs of writing, in the unit of reading one byte (`reader_threads.INLINE_BYTES` bytes take less than a millisecond):
NUMBER_COST, _TEXT = 8, 16  # per number in JSON; per text, in JSON or binary
_SORTED, _CLASS = 16, 64  # per number that is sorted; per class that is written
_DIGITS = 12  # typical bytes of a number in JSON
COPIED_PER_READ = 4  # bytes that can be copied in the time of reading one


def payload_steps(datatype: str, array: Array) -> Steps[Payload]:
    """The binary representation of a tensor on the wire: a length before each BYTES element, otherwise `raw_bytes`."""
    if datatype == "BYTES":
        return (yield from pack_in_steps(array))
    return raw_bytes(array)


def raw_bytes(array: Array) -> Payload:
    """The bytes of an array's elements in row-major order; for a contiguous array above `_SMALL` bytes a view of it."""
    if array.nbytes <= _SMALL:
        return array.tobytes()
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    if array.dtype.kind == "V":  # bfloat16 has no buffer format
        array = array.reshape(-1).view(np.uint8)
    return array.data.cast("B")


def write_cost(wanted: RequestedOutput, datatype: str, array: Array) -> int:
    """The estimated cost of writing one output into an answer; 0 for binary data without a copy.

    The unit is the cost of reading one byte of a request.
    """
    if wanted.classes:
        rows = array.shape[0] if array.ndim else 1
        return array.size * _SORTED + rows * min(wanted.classes, array.size) * _CLASS
    if datatype == "BYTES":
        return _text_size(array)
    if wanted.binary:
        return 0 if array.flags.c_contiguous else array.nbytes
    return array.nbytes // COPIED_PER_READ if wanted.span is not None else array.size * NUMBER_COST


def written_bytes(wanted: RequestedOutput, datatype: str, array: Array) -> int:
    """The approximate bytes of one output in the answer; 0 in shared memory.

    The lengths of more than `ELEMENTS_PER_STEP` texts are left out, so the result is too low for them; use it for
    outputs of low `write_cost`.
    """
    if wanted.span is not None:
        return 0
    if datatype == "BYTES":
        return _text_size(array)
    return array.nbytes if wanted.binary and not wanted.classes else array.size * _DIGITS


def _text_size(array: Array) -> int:
    """The approximate bytes of a BYTES tensor: `_TEXT` for each element, and the lengths of the texts.

    The lengths are left out if there are more than `ELEMENTS_PER_STEP` texts: summing them would take long, and their
    number alone makes the result exceed every threshold.
    """
    text = sum(map(len, elements_of(array, 0))) if array.size <= ELEMENTS_PER_STEP else 0
    return array.size * _TEXT + text
