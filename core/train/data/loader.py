"""`Loader`: batches of examples, read and augmented by threads while the model learns from earlier ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np

from core.errors import DataError
from core.train.data.dataset import Rows, Values
from core.train.data.examples import Examples
from core.train.data.philox import Randoms

Batch = dict[str, Values]

_ORDER_STREAM = 0x0DE12
_AHEAD = 2  # pieces of work per thread that may be waiting


class Loader:
    """The given rows of `examples` in batches, in an order and with random numbers that `seed` and epoch decide alone.

    `workers` threads prepare batches ahead (0: none, batches are made when asked for). With `shuffle` off, rows come
    as given. The last batch of an epoch is smaller where the rows do not divide, or left out with `drop_last`.
    """

    def __init__(
        self,
        examples: Examples,
        rows: Rows,
        batch: int,
        seed: int = 0,
        *,
        workers: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        if batch < 1 or not len(rows) or (drop_last and len(rows) < batch):
            raise DataError(f"{len(rows)} rows do not make batches of {batch}", file=examples.dataset.name)
        self.examples = examples
        self.rows = np.asarray(rows, np.int64)
        self.batch = batch
        self.seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, "lathe-loader") if workers else None

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.rows) // self.batch if self._drop_last else -(-len(self.rows) // self.batch)

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, from the one after the first `skip`: what a run that was interrupted still needs.

        DataError when a row cannot be read, in the place of its batch.
        """
        order = Randoms(self.seed, number, self.rows).order(_ORDER_STREAM) if self._shuffle else self.rows
        pieces = [order[i * self.batch : (i + 1) * self.batch] for i in range(skip, len(self))]
        if self._pool is None:
            return (self._make(number, piece) for piece in pieces)
        return self._ahead(self._pool, number, pieces)

    def close(self) -> None:
        """End the threads. Batches that are being made are waited for."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ahead(self, pool: ThreadPoolExecutor, number: int, pieces: Sequence[Rows]) -> Iterator[Batch]:
        waiting: deque[Future[Batch]] = deque()
        remaining = iter(pieces)
        try:
            for piece in remaining:
                waiting.append(pool.submit(self._make, number, piece))
                if len(waiting) >= _AHEAD * self._workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def _make(self, number: int, rows: Rows) -> Batch:
        return self.examples.take(rows)
