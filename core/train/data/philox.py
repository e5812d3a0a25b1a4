"""Philox4x32-10, a counter-based random number generator, for whole arrays.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The random bits of a row depend on the seed,
the epoch, the stream and the row only, not on the thread, the order of computation or the version of NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lathe.core.train.data.dataset import Rows

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


def philox(key: int, counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Four 32-bit words, as uint64, for each 128-bit counter: [4, ...] -> [4, ...]. `key` has 64 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), p1 & _LOW
        c2, c3 = (p0 >> _HALF) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


@dataclass(frozen=True)
class RowRandoms:
    """Random numbers for each of `rows`, from `seed` and `epoch`. `stream` selects one of many independent streams."""

    seed: int
    epoch: int
    rows: Rows

    def uniform(self, stream: int, count: int) -> NDArray[np.float32]:
        """Uniform numbers in [0, 1): float32 [rows, count]."""
        return (self._words(stream, count) >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)

    def normal(self, stream: int, count: int) -> NDArray[np.float32]:
        """Standard normal numbers: float32 [rows, count], by the Box-Muller transform (1958)."""
        half = -(-count // 2)
        uniform = self.uniform(stream, 2 * half)
        radius = np.sqrt(-2 * np.log1p(-uniform[:, :half]))
        angle = np.float32(2 * np.pi) * uniform[:, half:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)[:, :count]

    def order(self, stream: int) -> Rows:
        """The rows in random order, as a new array: sorted by 64 random bits of each row."""
        words = self._words(stream, 2)
        return self.rows[np.argsort(words[:, 0] << _HALF | words[:, 1], kind="stable")]

    def _words(self, stream: int, count: int) -> NDArray[np.uint64]:
        """`count` random words of 32 bits per row, as uint64: [rows, count]."""
        blocks = -(-count // 4)
        counter = np.empty((4, len(self.rows), blocks), np.uint64)
        counter[0] = self.rows[:, None]
        counter[1] = np.arange(blocks)
        counter[2] = self.epoch
        counter[3] = stream
        words = philox(self.seed, counter)
        return np.moveaxis(words, 0, 2).reshape(len(self.rows), 4 * blocks)[:, :count]
