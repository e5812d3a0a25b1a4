"""`Loader`: makes batches of examples, read and augmented by threads ahead of the training."""

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

from lathe.core.errors import DataError
from lathe.core.ir.types import DType
from lathe.core.train.data.dataset import Column, Rows, Values
from lathe.core.train.data.examples import Examples
from lathe.core.train.data.philox import RowRandoms
from lathe.core.train.data.transforms import Augment

Batch: TypeAlias = dict[str, Values]

_ORDER_STREAM = 0x0DE12  # the stream of random numbers for the order of rows
_CHUNKS_AHEAD = 2  # chunks per thread that may be prepared ahead
_CHUNK_ROWS = 512  # most rows of a chunk of several batches: a call of NumPy costs more than a small row
_CHUNK_BYTES = 4 << 20  # most bytes of a chunk with several batches


class Loader:
    """Batches of the given rows of `examples`. Order and random numbers depend on `seed` and the epoch only.

    `workers` threads prepare batches ahead, and run until `close`; with 0 the caller's thread makes each batch when it
    is needed. Without `shuffle` rows keep their order. The last batch of an epoch has the remaining rows; `drop_last`
    leaves it out if it is not full. DataError if `batch` is below 1, or if there is no row, or with `drop_last` fewer
    rows than a batch.

    `transforms` augment the input that holds images; DataError unless there is exactly one such input. It becomes
    float32 in the same layout and value range; `inputs` gives the resulting types.
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
        if batch < 1:
            raise DataError(f"batch: expected at least 1, got {batch}", file=examples.dataset.name)
        min_rows = batch if drop_last else 1
        if len(rows) < min_rows:
            raise DataError(f"rows: expected at least {min_rows}, got {len(rows)}", file=examples.dataset.name)
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
        # The epoch that was begun ahead: (epoch, skip) and its queue.
        self._next: tuple[tuple[int, int], _Queue] | None = None

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return len(self.rows) // self.batch if self._drop_last else -(-len(self.rows) // self.batch)

    @property
    def inputs(self) -> dict[str, Column]:
        """The types of the inputs of a batch, by name, without the target."""
        columns = self.examples.inputs
        return columns | {name: replace(columns[name], dtype=DType.FLOAT32) for name in (self._image,) if name}

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """The batches of an epoch without the first `skip`, which a resumed training has had already.

        A batch maps the names of the inputs, and `target`, to arrays [batch, ...]. DataError if a row cannot be read,
        in place of its batch or of an earlier batch in the same chunk. Only one epoch may be iterated at a time.
        """
        if self._pool is None:
            return chain.from_iterable(self._make_batches(number, rows) for rows in self._chunks(number, skip))
        return chain.from_iterable(self._prepared_chunks(self._pool, number, skip))

    def close(self) -> None:
        """End the threads. Waits for chunks that are being prepared."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _chunks(self, number: int, skip: int) -> list[Rows]:
        """The rows of an epoch in their order, in chunks that are prepared together."""
        order = RowRandoms(self.seed, number, self.rows).order(_ORDER_STREAM) if self._shuffle else self.rows
        order = order[skip * self.batch : len(self) * self.batch]
        chunk_rows = self.batch * self._batches_at_once()
        return [order[start : start + chunk_rows] for start in range(0, len(order), chunk_rows)]

    def _queue_of(self, pool: ThreadPoolExecutor, number: int, skip: int) -> _Queue:
        """The queue of an epoch's chunks after `skip` batches: the one begun ahead if it fits, otherwise a new one."""
        (place, queue), self._next = self._next or (None, None), None
        if queue is not None and place == (number, skip):
            return queue
        if queue is not None:
            queue.cancel()
        return _Queue(pool, partial(self._make_batches, number), self._chunks(number, skip))

    def _prepared_chunks(self, pool: ThreadPoolExecutor, number: int, skip: int) -> Iterator[list[Batch]]:
        """The batches of each chunk of an epoch, in order.

        While its last chunks are used, the first chunks of the next epoch are prepared.
        """
        queue, limit = self._queue_of(pool, number, skip), _CHUNKS_AHEAD * self._workers
        try:
            while queue.fill(limit):
                yield queue.take()
            following = self._queue_of(pool, number + 1, 0)
            following.fill(limit)
            self._next = ((number + 1, 0), following)
            while queue:
                yield queue.take()
        finally:
            queue.cancel()

    def _make_batches(self, number: int, rows: Rows) -> list[Batch]:
        """The batches of a chunk of rows of epoch `number`, augmented."""
        arrays = self.examples.take(rows)
        if self.transforms:
            arrays[self._image] = self._augment(arrays[self._image], RowRandoms(self.seed, number, rows))
        cuts = [slice(start, start + self.batch) for start in range(0, len(rows), self.batch)]
        return [{name: array[cut] for name, array in arrays.items()} for cut in cuts]

    def _augment(self, values: Values, randoms: RowRandoms) -> Values:
        """The augmented images as float32, in their original layout."""
        layout = self.examples.inputs[self._image].layout
        images = values.astype(np.float32)
        images = images[:, None] if layout == "HW" else np.moveaxis(images, 3, 1) if layout == "HWC" else images
        for stream, transform in enumerate(self.transforms):
            images = transform.apply(images, randoms, stream)
        images = images[:, 0] if layout == "HW" else np.moveaxis(images, 1, 3) if layout == "HWC" else images
        return np.ascontiguousarray(images)

    def _batches_at_once(self) -> int:
        size = sum(column.row_bytes for column in self.examples.inputs.values())
        rows = min(_CHUNK_ROWS, _CHUNK_BYTES // max(size, 1))
        return max(rows // self.batch, 1)


class _Queue:
    """The chunks of an epoch in order. The next ones are being prepared in the thread pool and wait to be taken."""

    def __init__(self, pool: ThreadPoolExecutor, make: Callable[[Rows], list[Batch]], chunks: Sequence[Rows]) -> None:
        self._pool, self._make_batches = pool, make
        self._chunks = deque(chunks)
        self._waiting: deque[Future[list[Batch]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def fill(self, limit: int) -> bool:
        """Submit chunks to the pool until more than `limit` wait; false if there were too few chunks left for that."""
        while self._chunks and len(self._waiting) <= limit:
            self._waiting.append(self._pool.submit(self._make_batches, self._chunks.popleft()))
        return len(self._waiting) > limit

    def take(self) -> list[Batch]:
        return self._waiting.popleft().result()

    def cancel(self) -> None:
        for future in self._waiting:
            future.cancel()


def _image_input(examples: Examples) -> str:
    """The name of the input that holds images. DataError unless there is exactly one."""
    images = [name for name, column in examples.inputs.items() if column.layout]
    if len(images) != 1:
        inputs = ", ".join(f"'{name}' {column}" for name, column in examples.inputs.items())
        message = f"augmentation: expected exactly one input of images, got {len(images)}; inputs are {inputs}"
        raise DataError(message, file=examples.dataset.name)
    return images[0]
