"""`Loader`: batches of examples, read and augmented by threads while the model learns from earlier ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from types import TracebackType
from typing import TypeAlias

import numpy as np

from core.errors import DataError
from core.ir.types import DType
from core.train.data.dataset import Column, Rows, Values
from core.train.data.examples import Examples
from core.train.data.philox import Randoms
from core.train.data.transforms import Augment

Batch: TypeAlias = dict[str, Values]

_ORDER_STREAM = 0x0DE12
_AHEAD = 2  # pieces of work per thread that may be waiting
_PIECE = 512  # rows that are prepared together where they are small: NumPy costs more per call than per row
_PIECE_BYTES = 4 << 20


class Loader:
    """The given rows of `examples` in batches, in an order and with random numbers that `seed` and epoch decide alone.

    `workers` threads prepare batches ahead (0: none, batches are made when asked for). With `shuffle` off, rows come
    as given. The last batch of an epoch is smaller where the rows do not divide, or left out with `drop_last`.

    `transforms` change the images of the one input that holds images; it becomes float32 for that, in its own layout
    and range: `inputs` says what comes out.
    """

    def __init__(
        self,
        examples: Examples,
        rows: Rows,
        batch: int,
        seed: int = 0,
        *,
        transforms: Sequence[Augment] = (),
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
        self.transforms = tuple(transforms)
        self._image = _image_input(examples) if transforms else ""
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, "lathe-loader") if workers else None
        self._next: tuple[tuple[int, int], _Queue] | None = None  # epoch and skipped batches of what was begun

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.rows) // self.batch if self._drop_last else -(-len(self.rows) // self.batch)

    @property
    def inputs(self) -> dict[str, Column]:
        """The columns of a batch without its target."""
        columns = self.examples.inputs
        return columns | {name: replace(columns[name], dtype=DType.FLOAT32) for name in (self._image,) if name}

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, from the one after the first `skip`: what a run that was interrupted still needs.

        DataError when a row cannot be read, in the place of its batch (or of an earlier one, where rows are small).
        """
        if self._pool is None:
            return chain.from_iterable(self._make(number, rows) for rows in self._pieces(number, skip))
        return chain.from_iterable(self._ahead(self._pool, number, skip))

    def close(self) -> None:
        """End the threads. Batches that are being made are waited for."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _pieces(self, number: int, skip: int) -> list[Rows]:
        """The rows of an epoch in its order, as many at a time as are prepared together."""
        order = Randoms(self.seed, number, self.rows).order(_ORDER_STREAM) if self._shuffle else self.rows
        order = order[skip * self.batch : len(self) * self.batch]
        piece = self.batch * self._batches_at_once()
        return [order[start : start + piece] for start in range(0, len(order), piece)]

    def _begun(self, pool: ThreadPoolExecutor, number: int, skip: int) -> _Queue:
        """What there is of an epoch already, or its beginning."""
        (place, queue), self._next = self._next or (None, None), None
        if queue is not None and place == (number, skip):
            return queue
        if queue is not None:
            queue.cancel()
        return _Queue(pool, partial(self._make, number), self._pieces(number, skip))

    def _ahead(self, pool: ThreadPoolExecutor, number: int, skip: int) -> Iterator[list[Batch]]:
        """The first batches of the next epoch are made while the last ones of this one are used."""
        queue, most = self._begun(pool, number, skip), _AHEAD * self._workers
        try:
            while queue.fill(most):
                yield queue.take()
            following = self._begun(pool, number + 1, 0)
            following.fill(most)
            self._next = ((number + 1, 0), following)
            while queue:
                yield queue.take()
        finally:
            queue.cancel()

    def _make(self, number: int, rows: Rows) -> list[Batch]:
        """The batches of some rows that follow each other."""
        arrays = self.examples.take(rows)
        if self.transforms:
            arrays[self._image] = self._augmented(arrays[self._image], Randoms(self.seed, number, rows))
        cuts = [slice(start, start + self.batch) for start in range(0, len(rows), self.batch)]
        return [{name: array[cut] for name, array in arrays.items()} for cut in cuts]

    def _augmented(self, values: Values, randoms: Randoms) -> Values:
        """The images changed, in the layout they came in."""
        layout = self.examples.inputs[self._image].layout
        images = values.astype(np.float32)
        images = images[:, None] if layout == "HW" else np.moveaxis(images, 3, 1) if layout == "HWC" else images
        for stream, transform in enumerate(self.transforms):
            images = transform.apply(images, randoms, stream)
        images = images[:, 0] if layout == "HW" else np.moveaxis(images, 1, 3) if layout == "HWC" else images
        return np.ascontiguousarray(images)

    def _batches_at_once(self) -> int:
        size = sum(column.row_bytes for column in self.examples.inputs.values())
        rows = min(_PIECE, _PIECE_BYTES // max(size, 1))
        return max(rows // self.batch, 1)


class _Queue:
    """Work on pieces of an epoch, in order, of which some are waiting for threads or for being taken."""

    def __init__(self, pool: ThreadPoolExecutor, make: Callable[[Rows], list[Batch]], pieces: Sequence[Rows]) -> None:
        self._pool, self._make = pool, make
        self._pieces = deque(pieces)
        self._waiting: deque[Future[list[Batch]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def fill(self, most: int) -> bool:
        """Let threads work on one piece more than `most`; whether there are so many."""
        while self._pieces and len(self._waiting) <= most:
            self._waiting.append(self._pool.submit(self._make, self._pieces.popleft()))
        return len(self._waiting) > most

    def take(self) -> list[Batch]:
        return self._waiting.popleft().result()

    def cancel(self) -> None:
        for future in self._waiting:
            future.cancel()


def _image_input(examples: Examples) -> str:
    """The input that holds images; DataError unless exactly one does."""
    found = [name for name, column in examples.inputs.items() if column.layout]
    if len(found) != 1:
        there = ", ".join(f"'{name}' {column}" for name, column in examples.inputs.items())
        message = f"{len(found)} inputs hold images, expected the one that augmentation is for; there are {there}"
        raise DataError(message, file=examples.dataset.name)
    return found[0]
