"""Functions of segments: rows that belong to the same group, such as the rows of one sequence of a ragged tensor.

`ids` [n] has the segment of each row, an int64 below `count`, in any order. All functions are made of Gather and
ScatterND, so they have gradients, and their graphs are standard ONNX.
"""

from __future__ import annotations

import math

import numpy as np

from lathe.core.ir.types import Dim, DType
from lathe.core.nn.tensor import Operand, Tensor, tensor


def segment_sum(x: Tensor, ids: Tensor, count: Dim) -> Tensor:
    """[count, ...]: the sum of the rows of each segment, 0 for an empty one. `x` is [n, ...]."""
    return _scattered(x, ids, count, 0, "add")


def segment_mean(x: Tensor, ids: Tensor, count: Dim) -> Tensor:
    """[count, ...]: the mean of the rows of each segment, 0 for an empty one. `x` is [n, ...], floats."""
    ones = tensor(1.0).to(x.dtype).expand(x.shape[0])
    sizes = segment_sum(ones, ids, count).clamp(min=1)
    return segment_sum(x, ids, count) / sizes.reshape(count, *[1] * (x.ndim - 1))


def segment_max(x: Tensor, ids: Tensor, count: Dim) -> Tensor:
    """[count, ...]: the largest number of each segment, -inf for an empty one. `x` is [n, ...], floats.

    Equal largest numbers share the gradient.
    """
    return _scattered(x, ids, count, -math.inf, "max")


def segment_softmax(x: Tensor, ids: Tensor, count: Dim) -> Tensor:
    """[n, ...]: the exponentials of the rows, divided by their sum in the segment. `x` is [n, ...], floats."""
    largest = segment_max(x, ids, count).detach()
    powers = (x - largest.op("Gather", ids, axis=0)).exp()
    return powers / segment_sum(powers, ids, count).op("Gather", ids, axis=0)


def ids_of_splits(row_splits: Tensor, rows: Dim) -> Tensor:
    """[rows]: the segment of each row, for the first row of each segment and the end, [segments + 1]."""
    inner = row_splits[1:-1]
    ones = tensor(1).expand(inner.shape[0])
    starts = _scattered(ones, inner, rows + 1, 0, "add")
    return starts.op("CumSum", tensor(0))[:rows]


def ids_of_lengths(lengths: Tensor) -> Tensor:
    """[rows]: the segment of each row, for the numbers of rows, int64[segments]. Only a run shows their sum."""
    total, starts = lengths.sum(), lengths.op("CumSum", tensor(0), exclusive=1)
    # One place more than rows: empty segments at the end start there.
    none = (total + 1).reshape(1).op("ConstantOfShape", value=np.zeros(1, np.int64))
    begun = none.op("ScatterND", starts.unsqueeze(-1), starts * 0 + 1, reduction="add").op("CumSum", tensor(0))
    return begun.op("Gather", tensor(0).op("Range", total, tensor(1)), axis=0) - 1


def _scattered(x: Tensor, ids: Operand, count: Dim, initial: float, reduction: str) -> Tensor:
    start = tensor(initial).to(x.dtype).expand(count, *x.shape[1:])
    places = (ids if isinstance(ids, Tensor) else tensor(ids)).to(DType.INT64).unsqueeze(-1)
    return start.op("ScatterND", places, x, reduction=reduction)
