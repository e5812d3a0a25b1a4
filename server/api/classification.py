"""The classification extension: the best n entries of each row, as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from server.datatypes import STEP, object_array
from server.errors import BadRequest
from server.steps import Steps
from server.types import Array


def classifying(scores: Array, datatype: str, best: int, batched: bool, labels: Sequence[bytes] = ()) -> Steps[Array]:
    """Return BYTES ``[rows, n]`` (``[n]`` for a model without rows), best first: elements ``value:index``, or
    ``value:index:label`` where the class has a label.

    A row is everything behind the leading axis, flattened; n is at most its length; equal values keep their order.
    """
    if scores.dtype.kind not in "iuf":
        raise BadRequest(f"classification: expected an output of numbers, this one is {datatype}")
    rows = scores.reshape(scores.shape[0], -1) if batched else scores.reshape(1, -1)
    count = min(best, rows.shape[1])
    text: list[bytes] = []
    several = max(1, STEP // max(rows.shape[1], 1))  # rows that are sorted in one go
    for at in range(0, len(rows), several):
        part = rows[at : at + several]
        order = np.argsort(-part.astype(np.float64), axis=1, kind="stable")[:, :count]
        values = np.take_along_axis(part, order, axis=1)
        yield from _write(text, values.ravel(), order.ravel(), labels)
    return object_array(text, (len(rows), count) if batched else (count,))


def _write(text: list[bytes], values: Array, order: Array, labels: Sequence[bytes]) -> Steps[None]:
    integral = values.dtype.kind in "iu"
    for at in range(0, len(values), STEP):
        pairs = zip(values[at : at + STEP].tolist(), order[at : at + STEP].tolist(), strict=True)
        text += [
            (f"{value}:{index}" if integral else f"{value:f}:{index}").encode() + _suffix(labels, index)
            for value, index in pairs
        ]
        yield


def _suffix(labels: Sequence[bytes], index: int) -> bytes:
    label = labels[index] if index < len(labels) else b""
    return b":" + label if label else b""
