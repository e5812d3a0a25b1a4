"""The classification extension of the protocol: the n highest scores of each row, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.server.datatypes import ELEMENTS_PER_STEP, object_array
from lathe.server.errors import BadRequest
from lathe.server.steps import Steps
from lathe.server.types import Array


def classify_steps(
    scores: Array, datatype: str, best: int, batched: bool, labels: Sequence[bytes] = ()
) -> Steps[Array]:
    """The `best` highest scores of each row, highest first: BYTES of shape `[rows, n]`, or `[n]` if not `batched`.

    The elements are `value:index`, or `value:index:label` if `labels[index]` exists and is not empty. If `batched`, a
    row is everything after the leading axis, flattened; otherwise the whole array is one row. n is `best`, but at most
    the length of a row. Equal values keep their order, NaN is below all numbers. BadRequest for BOOL and BYTES.
    """
    if datatype in ("BOOL", "BYTES"):
        raise BadRequest(f"classification: expected an output of numbers, got {datatype}")
    rows = scores.reshape(scores.shape[0], -1) if batched else scores.reshape(1, -1)
    count = min(best, rows.shape[1])
    text: list[bytes] = []
    rows_per_step = max(1, ELEMENTS_PER_STEP // max(rows.shape[1], 1))  # rows sorted per step
    for at in range(0, len(rows), rows_per_step):
        part = rows[at : at + rows_per_step]
        if datatype == "BF16":
            part = part.astype(np.float32)
        order = _descending(part)[:, :count]
        values = np.take_along_axis(part, order, axis=1)
        yield from _write(text, values.ravel(), order.ravel(), labels)
    return object_array(text, (len(rows), count) if batched else (count,))


def _descending(rows: NDArray[Any]) -> NDArray[np.intp]:
    """The indices that sort each row in descending order, stable; NaN comes last.

    Integers are not converted to float64, which cannot tell those above 2**53 apart.
    """
    if rows.dtype.kind == "f":
        return np.argsort(-rows, axis=1, kind="stable")
    ascending: NDArray[np.intp] = np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1]
    order: NDArray[np.intp] = rows.shape[1] - 1 - ascending
    return order


def _write(text: list[bytes], values: Array, order: Array, labels: Sequence[bytes]) -> Steps[None]:
    integral = values.dtype.kind in "iu"
    for at in range(0, len(values), ELEMENTS_PER_STEP):
        pairs = zip(
            values[at : at + ELEMENTS_PER_STEP].tolist(), order[at : at + ELEMENTS_PER_STEP].tolist(), strict=True
        )
        text += [
            (f"{value}:{index}" if integral else f"{value:f}:{index}").encode() + _suffix(labels, index)
            for value, index in pairs
        ]
        yield


def _suffix(labels: Sequence[bytes], index: int) -> bytes:
    label = labels[index] if index < len(labels) else b""
    return b":" + label if label else b""
