"""Batches are the same for any number of workers and wherever an epoch is resumed."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from lathe.core.errors import DataError
from lathe.core.train.data import Loader, from_arrays, select

ROWS = 103
EXAMPLES = select(from_arrays({"x": np.arange(ROWS * 4.0).reshape(ROWS, 4), "y": np.arange(ROWS) % 3}))


def epoch(number: int, skip: int = 0, **options: Any) -> list[dict[str, Any]]:
    with Loader(EXAMPLES, np.arange(ROWS), 10, seed=5, **options) as loader:
        return list(loader.epoch(number, skip))


def first(batches: list[dict[str, Any]]) -> list[float]:
    return [float(x) for batch in batches for x in batch["x"][:, 0]]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_number_of_workers_does_not_matter(workers: int) -> None:
    assert first(epoch(1, workers=workers)) == first(epoch(1, workers=0))


def test_each_row_once_in_an_order_of_its_own_per_epoch() -> None:
    orders = [first(epoch(number)) for number in range(3)]
    assert all(sorted(order) == EXAMPLES.take(np.arange(ROWS))["x"][:, 0].tolist() for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_an_epoch_resumes_where_it_stopped() -> None:
    assert first(epoch(2, skip=4)) == first(epoch(2))[40:]
    assert epoch(2, skip=11) == []


def test_the_last_batch() -> None:
    assert [len(batch["target"]) for batch in epoch(0)] == [10] * 10 + [3]
    assert [len(batch["target"]) for batch in epoch(0, drop_last=True)] == [10] * 10
    assert first(epoch(0, shuffle=False)) == sorted(first(epoch(0)))


def test_consecutive_epochs_equal_separate_ones() -> None:
    with Loader(EXAMPLES, np.arange(ROWS), 10, seed=5, workers=2) as loader:
        in_a_row = [
            first(list(loader.epoch(number, skip))) for number, skip in ((0, 0), (1, 0), (2, 3), (1, 0), (2, 0))
        ]
    alone = [first(epoch(number, skip)) for number, skip in ((0, 0), (1, 0), (2, 3), (1, 0), (2, 0))]
    assert in_a_row == alone


def test_the_next_epoch_is_prefetched_while_one_ends() -> None:
    begun = threading.Event()
    made: list[int] = []

    class Noting(Loader):
        def _make_batches(self, number: int, rows: Any) -> Any:
            made.append(number)
            if number == 1:
                begun.set()
            return super()._make_batches(number, rows)

    with Noting(EXAMPLES, np.arange(ROWS), 10, workers=1) as loader:
        list(loader.epoch(0))
        assert begun.wait(timeout=30)  # epoch 1 has not been requested yet
        list(loader.epoch(1))
    assert made.count(1) == made.count(0), "what was begun is made once"


def test_threads_end_when_an_epoch_is_abandoned() -> None:
    before = threading.active_count()
    with Loader(EXAMPLES, np.arange(ROWS), 10, workers=3) as loader:
        next(loader.epoch(0))
        assert threading.active_count() > before
    assert threading.active_count() == before


def test_a_bad_row_is_named_in_its_turn() -> None:
    x = np.zeros((2000, 2), np.float32)
    x[1033, 1] = np.nan
    examples = select(from_arrays({"x": x, "y": np.zeros(2000, np.int64)}))
    with Loader(examples, np.arange(2000), 10, shuffle=False, workers=2) as loader:
        batches = loader.epoch(0)
        for _ in range(102):  # rows are prepared 510 at a time
            next(batches)
        with pytest.raises(
            DataError, match=r"row 1033: column 'x': the number is missing or NaN, expected a finite one"
        ):
            next(batches)


@pytest.mark.parametrize(
    ("rows", "batch", "drop", "message"),
    [
        (0, 1, False, "rows: expected at least 1, got 0"),
        (5, 0, False, "batch: expected at least 1, got 0"),
        (5, 6, True, "rows: expected at least 6, got 5"),
    ],
)
def test_invalid_batch_sizes_are_refused(rows: int, batch: int, drop: bool, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Loader(EXAMPLES, np.arange(rows), batch, drop_last=drop)
