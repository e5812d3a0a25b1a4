"""Relative position bias of T5 (Raffel et al., 2020): a learned number for each head and each bucket of distances."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lathe.core.nn.linear import Embedding
from lathe.core.nn.tensor import Tensor, tensor


def bucket_table(buckets: int, distance: int, both_ways: bool) -> NDArray[np.int64]:
    """The bucket of each difference of positions (key minus query) from -`distance` to `distance`.

    Farther keys are in the bucket of that distance. Half of the buckets hold one distance each, the others grow with
    the logarithm up to `distance`. `both_ways`: half of all buckets are for later keys; otherwise later keys are in the
    bucket of the query's own position. Logarithms are rounded to float32, as in PyTorch: at the edge of a bucket the
    rounding decides.
    """
    difference = np.arange(-distance, distance + 1)
    half = buckets // 2 if both_ways else buckets
    first = np.where(difference > 0, half, 0) if both_ways else np.zeros_like(difference)
    away = np.abs(difference) if both_ways else np.maximum(-difference, 0)
    exact = half // 2
    ratio = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(distance / exact))
    large = exact + (ratio * np.float32(half - exact)).astype(np.int64)
    return first + np.where(away < exact, away, np.minimum(large, half - 1))


def relative_bias(weights: Embedding, table: NDArray[np.int64], queries: Tensor, keys: Tensor) -> Tensor:
    """Biases for scores of queries and keys at positions int64 [queries] and [keys]: [1, heads, queries, keys].

    `weights` has a row of heads for each bucket, `table` is that of `bucket_table`.
    """
    farthest = len(table) // 2
    difference = keys.unsqueeze(0) - queries.unsqueeze(1)
    nearest = difference.op("Clip", tensor(-farthest), tensor(farthest)) + farthest
    biases: Tensor = weights(tensor(table))  # of each difference: [2 * farthest + 1, heads]
    return biases.op("Gather", nearest, axis=0).permute(2, 0, 1).unsqueeze(0)
