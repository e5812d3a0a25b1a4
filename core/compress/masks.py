"""Masks of pruned weights: which weights stay, by a score of each weight, one by one or in a pattern.

Magnitudes as scores: Han et al. 2015 (https://arxiv.org/abs/1506.02626). N:M: at most N of M consecutive inputs of an
output stay (Mishra et al. 2021, https://arxiv.org/abs/2104.08378). Blocks are pruned by the sum of their scores (Narang
et al. 2017, https://arxiv.org/abs/1711.02782).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import UnsupportedError

Key = TypeVar("Key")


@dataclass(frozen=True)
class Pattern:
    """The weights that are pruned together: `rows` inputs of `columns` outputs; or with `kept`, N:M.

    Of N:M, `kept` of `rows` consecutive inputs stay, so that the sparsity is fixed. The text forms are "element", "2:4"
    and "4x1" (rows x columns).
    """

    rows: int = 1
    columns: int = 1
    kept: int = 0

    @property
    def sparsity(self) -> float | None:
        """The sparsity of N:M; None for other patterns."""
        return 1 - self.kept / self.rows if self.kept else None


def parse_pattern(text: str) -> Pattern:
    """The pattern of a text. UnsupportedError for any other text, and unless 0 < N < M."""
    if text == "element":
        return Pattern()
    found = re.fullmatch(r"([1-9]\d{0,3})([:x])([1-9]\d{0,3})", text)
    if found is None:
        raise UnsupportedError(f"pattern: expected element, N:M such as 2:4, or a block such as 4x1, got {text!r}")
    first, second = int(found[1]), int(found[3])
    if found[2] == "x":
        return Pattern(first, second)
    if first >= second:
        raise UnsupportedError(f"pattern: expected N:M with N below M, got {text!r}")
    return Pattern(second, 1, first)


def masks_of(
    scores: Mapping[Key, NDArray[Any]], sparsity: float, pattern: Pattern, is_global: bool = False
) -> dict[Key, NDArray[np.bool_]]:
    """True for the weights that stay. `scores` are matrices [G, K, N]: G groups, K inputs, N outputs.

    The share `sparsity` of the blocks with the least scores of each matrix goes, or with `is_global` of the blocks of
    all matrices together. N:M ignores both. Of equal scores the earlier ones go. Incomplete blocks at the end count as
    blocks with scores of 0.
    """
    if pattern.kept:
        return {key: _n_of_m(each, pattern) for key, each in scores.items()}
    sums = {key: _block_sums(each, pattern) for key, each in scores.items()}
    if is_global:
        kept = _without_least(np.concatenate([each.ravel() for each in sums.values()]), sparsity)
        ends = np.cumsum([each.size for each in sums.values()])[:-1]
        parts = dict(zip(sums, np.split(kept, ends), strict=True))
    else:
        parts = {key: _without_least(each.ravel(), sparsity) for key, each in sums.items()}
    return {key: _spread(parts[key].reshape(sums[key].shape), pattern, each.shape[1:]) for key, each in scores.items()}


def _without_least(scores: NDArray[Any], sparsity: float) -> NDArray[np.bool_]:
    kept = np.ones(scores.size, np.bool_)
    kept[np.argsort(scores, kind="stable")[: round(sparsity * scores.size)]] = False
    return kept


def _block_sums(scores: NDArray[Any], pattern: Pattern) -> NDArray[np.float64]:
    groups, depth, columns = scores.shape
    down, across = -(-depth // pattern.rows), -(-columns // pattern.columns)
    padded = np.zeros((groups, down * pattern.rows, across * pattern.columns))
    padded[:, :depth, :columns] = scores
    blocks: NDArray[np.float64] = padded.reshape(groups, down, pattern.rows, across, pattern.columns).sum(axis=(2, 4))
    return blocks


def _spread(kept: NDArray[np.bool_], pattern: Pattern, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    wide = np.repeat(np.repeat(kept, pattern.rows, axis=1), pattern.columns, axis=2)
    return np.ascontiguousarray(wide[:, : shape[0], : shape[1]])


def _n_of_m(scores: NDArray[Any], pattern: Pattern) -> NDArray[np.bool_]:
    groups, depth, columns = scores.shape
    down = -(-depth // pattern.rows)
    padded = np.full((groups, down * pattern.rows, columns), -np.inf)
    padded[:, :depth] = scores
    blocks = padded.reshape(groups, down, pattern.rows, columns)
    ranks = np.argsort(np.argsort(-blocks, axis=2, kind="stable"), axis=2)
    return np.ascontiguousarray((ranks < pattern.kept).reshape(groups, -1, columns)[:, :depth])
