"""The classification extension: the best n entries of each row, as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from server.datatypes import object_array
from server.errors import BadRequest
from server.types import Array


def classify(scores: Array, datatype: str, best: int, batched: bool, labels: Sequence[bytes] = ()) -> Array:
    """Return BYTES ``[rows, n]`` (``[n]`` for a model without rows), best first: elements ``value:index``, or
    ``value:index:label`` where the class has a label.

    A row is everything behind the leading axis, flattened; n is at most its length; equal values keep their order.
    """
    if scores.dtype.kind not in "iuf":
        raise BadRequest(f"classification: expected an output of numbers, this one is {datatype}")
    rows = scores.reshape(scores.shape[0], -1) if batched else scores.reshape(1, -1)
    count = min(best, rows.shape[1])
    order = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :count]
    values = np.take_along_axis(rows, order, axis=1)
    integral = rows.dtype.kind in "iu"
    text = [
        (f"{value}:{index}" if integral else f"{value:f}:{index}").encode() + _suffix(labels, index)
        for value, index in zip(values.ravel().tolist(), order.ravel().tolist(), strict=True)
    ]
    return object_array(text, (len(rows), count) if batched else (count,))


def _suffix(labels: Sequence[bytes], index: int) -> bytes:
    label = labels[index] if index < len(labels) else b""
    return b":" + label if label else b""
