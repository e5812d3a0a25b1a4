"""Symbolic memory against memory of single bytes, and boxes against NumPy's views."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from lathe.core.check.boxes import Box, Layout, Spans, whole_box
from lathe.core.check.memory import Memory
from lathe.core.ir.graph import Value
from lathe.core.ir.types import DType, TensorType

_BYTES = 400


def spans_of(rng: Random) -> Spans:
    """One range, a few, or enough that they are inserted in bulk."""
    count, length = rng.choice((1, 1, 3, 40)), rng.randrange(1, 6)
    step = rng.randrange(length, length + 4)
    start = rng.randrange(_BYTES - step * count)
    return Spans([start + step * k for k in range(count)], length)


@pytest.mark.parametrize("seed", range(40))
def test_symbolic_memory_agrees_with_a_model_of_single_bytes(seed: int) -> None:
    rng = Random(seed)
    memory, plain = Memory(_BYTES), [None] * _BYTES  # type: tuple[Memory, list[int | None]]
    for _ in range(60):
        spans, shift = spans_of(rng), rng.randrange(4)
        kind = rng.randrange(6)
        if kind == 0:
            low = rng.randrange(_BYTES)
            high = rng.randrange(low, _BYTES)
            memory.wipe(low, high)
            plain[low:high] = [None] * (high - low)
        elif kind == 1 and rng.randrange(8) == 0:
            low = rng.randrange(_BYTES // 2)
            memory.keep_only(low, _BYTES - 50)
            plain = [value if low <= at < _BYTES - 50 else None for at, value in enumerate(plain)]
        else:
            memory.write(spans, shift)
            for start in spans.starts:
                plain[start : start + spans.length] = [shift] * spans.length
        asked, wanted = spans_of(rng), rng.randrange(4)
        missing = next(
            ((s, s + asked.length) for s in asked.starts if set(plain[s : s + asked.length]) != {wanted}), None
        )
        assert memory.lacks(asked, wanted) == missing
        seen = [None] * _BYTES  # type: list[int | None]
        for low, high, held in memory.runs(0, _BYTES):
            assert low < high
            seen[low:high] = [held] * (high - low)
        assert seen == plain
        mine, theirs = spans_of(rng), spans_of(rng)
        assert mine.overlaps(theirs) == bool(bytes_of(mine) & bytes_of(theirs))


def bytes_of(spans: Spans) -> set[int]:
    return {at for start in spans.starts for at in range(start, start + spans.length)}


def places(box: Layout) -> np.ndarray:
    """The first byte of every element."""
    grids = np.indices(box.shape)
    return box.start + sum((g * s for g, s in zip(grids, box.strides, strict=True)), np.zeros(box.shape, np.int64))


@pytest.mark.parametrize("seed", range(60))
def test_boxes_agree_with_numpy_views(seed: int) -> None:
    rng = Random(seed)
    shape = tuple(rng.choice((1, 2, 3, 4, 6)) for _ in range(rng.randrange(1, 5)))
    value = Value("x", TensorType(DType.FLOAT32, shape))
    box = whole_box(value, shape, 4)
    array = np.arange(int(np.prod(shape))).reshape(shape) * 4
    for _ in range(4):
        axis = rng.randrange(max(len(box.shape), 1))
        kind = rng.randrange(3)
        if kind == 0 and box.shape:
            step = rng.choice((1, 1, 2, -1, -2))
            taken = range(box.shape[axis])[::step][rng.randrange(2) :]
            box = box.cut(axis, taken.start, taken.step, len(taken))
            array = np.take(array, list(taken), axis)
        elif kind == 1 and box.shape and box.shape[axis]:
            at = rng.randrange(box.shape[axis])
            box, array = box.picked(axis, at), np.take(array, at, axis)
        else:
            box, array = _reshaped(box, array, rng)
        assert box.shape == array.shape
        np.testing.assert_array_equal(places(box), array)
        wanted = {at for first in array.ravel().tolist() for at in range(first, first + 4)}
        assert bytes_of(box.spans()) == wanted
        assert sorted(box.spans().starts) == list(box.spans().starts)
        flat = array.ravel()
        assert box.is_dense == bool(array.size <= 1 or (np.diff(flat) == 4).all())


def _reshaped(box: Box, array: np.ndarray, rng: Random) -> tuple[Box, np.ndarray]:
    size = array.size
    options = [(size,), (1, size), (size, 1), *((k, size // k) for k in (2, 3, 4) if size and size % k == 0)]
    shape = rng.choice(options)
    found = box.reshaped(shape)
    lines = np.diff(array.ravel())
    if found is None:
        assert len(set(lines.tolist())) > 1  # elements at one constant distance can take any shape
        return box, array
    return found, array.reshape(shape)


def test_broadcast_and_permuted_layouts() -> None:
    row = Layout(8, (3,), (4,), 4)
    assert row.broadcast((2, 3)) == Layout(8, (2, 3), (0, 4), 4)
    assert row.broadcast((2, 4)) is None
    assert Layout(0, (2, 3), (12, 4), 4).permuted((1, 0)) == Layout(0, (3, 2), (4, 12), 4)
    assert row.is_same_as(Layout(8, (1, 3), (99, 4), 4))
    assert not row.is_same_as(Layout(12, (3,), (4,), 4))
