"""The values of a growing graph, each with its arrays for several feeds of the whole graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

F32, F64, F16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)
BF16 = np.dtype(ml_dtypes.bfloat16)
I64, I32, I16, I8 = (np.dtype(name) for name in ("int64", "int32", "int16", "int8"))
U64, U32, U16, U8 = (np.dtype(name) for name in ("uint64", "uint32", "uint16", "uint8"))
BOOL, STRING = np.dtype(bool), np.dtype(object)
FLOATS = (F32, F64, F16, BF16)
SIGNED = (I64, I32, I16, I8)
UNSIGNED = (U64, U32, U16, U8)
INTS = (*SIGNED, *UNSIGNED)
NUMBERS = (*FLOATS, *INTS)
ALL = (*NUMBERS, BOOL, STRING)

# The largest difference of two correct programs after one operator, relative to the largest number.
ROUNDING = {F32: 1e-6, F64: 1e-13, F16: 1e-3, BF16: 8e-3}


class UnfitNode(Exception):
    """A rule built an invalid node, or one on which correct programs may differ. The generator tries another."""


@dataclass(eq=False)
class Item:
    """A value: its arrays by case, and the arrays after small changes of all rounded values (`shadows`).

    `root` names the value whose memory this one may share: views and windows keep the root of their source. `steps`
    counts the rounded operations that it depends on: 0 and 1 mean that correct programs agree in every bit.
    """

    name: str
    arrays: dict[int, Array]
    shadows: dict[int, Array]
    root: str = ""
    window: bool = False  # a proper part of its root
    counted: bool = False  # computed from an extent that differs from case to case
    rankless: bool = False  # of a rank that cannot be known before the run
    static: bool = False  # a constant of the model
    steps: int = 0

    def __post_init__(self) -> None:
        self.root = self.root or self.name

    def at(self, case: int) -> Array:
        return self.arrays[case]

    @property
    def dtype(self) -> np.dtype[Any]:
        return next(iter(self.arrays.values())).dtype

    def shapes(self, cases: Sequence[int]) -> list[tuple[int, ...]]:
        return [self.arrays[case].shape for case in cases]

    def rank(self, cases: Sequence[int]) -> int | None:
        """The rank; None if it differs between cases."""
        ranks = {len(shape) for shape in self.shapes(cases)}
        return ranks.pop() if len(ranks) == 1 else None

    def extents(self, axis: int, cases: Sequence[int]) -> list[int]:
        return [shape[axis] for shape in self.shapes(cases)]

    def fixed(self, axis: int, cases: Sequence[int]) -> int | None:
        """The extent along an axis; None if it differs between cases."""
        extents = set(self.extents(axis, cases))
        return extents.pop() if len(extents) == 1 else None

    @property
    def exact(self) -> bool:
        return self.steps < 2


def random_array(
    rng: np.random.Generator, dtype: np.dtype[Any], shape: Sequence[int], low: float = -1.0, high: float = 1.0
) -> Array:
    """Random floats, integers from -4 (unsigned: 0) to 9, strings or booleans."""
    if dtype in FLOATS:
        return rng.uniform(low, high, shape).astype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == STRING:
        return np.array(["", "a", "b", "lathe"], object)[np.asarray(rng.integers(0, 4, shape)).ravel()].reshape(shape)
    least = 0 if dtype.kind == "u" else -4
    return rng.integers(least, 10, shape).astype(dtype)


def same_shape(a: Item, b: Item, cases: Sequence[int]) -> bool:
    return a.shapes(cases) == b.shapes(cases)


def broadcast(a: Item, b: Item, cases: Sequence[int]) -> list[tuple[int, ...]] | None:
    """The broadcast shape in each case; None if the shapes do not broadcast."""
    try:
        pairs = zip(a.shapes(cases), b.shapes(cases), strict=True)
        return [np.broadcast_shapes(left, right) for left, right in pairs]
    except ValueError:
        return None
