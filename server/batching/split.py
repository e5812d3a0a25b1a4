"""A request with more rows than one batch holds, cut into parts and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from server.batching.entry import Entry, Outcome
from server.batching.signature import Group
from server.errors import Internal, TooLarge
from server.types import Tensors

LARGEST = 1 << 30  # bytes of outputs: many small rows may become more than there is memory


class Join:
    """Collects the outcomes of parts; the whole is answered when all are there, or with the first failure."""

    def __init__(self, whole: Entry, count: int, cancel: Callable[[Entry], None]) -> None:
        self._whole = whole
        self._outputs: Tensors = {}
        self._missing = count
        self._nbytes = 0
        self._cancel = cancel

    def take(self, rows: slice, outcome: Outcome) -> None:
        """Accept the outcome of the part that has these rows. Its outputs are copied to their place at once: all
        together would hold up the event loop."""
        if isinstance(outcome, Exception):
            self._fail(outcome)
            return
        self._nbytes += sum(array.nbytes for array in outcome.values())
        if self._nbytes > LARGEST:
            self._fail(TooLarge(f"the outputs of {self._whole.rows} rows are larger than {LARGEST} bytes: send fewer"))
            return
        try:
            self._copy(rows, outcome)
        except (KeyError, ValueError):
            self._fail(Internal("the outputs of the request's parts do not fit together: their shapes differ"))
            return
        self._missing -= 1
        if self._missing == 0:
            self._whole.finish(self._outputs)

    def _copy(self, rows: slice, outcome: Tensors) -> None:
        if not self._outputs:
            rows_of_all = self._whole.rows
            self._outputs = {name: np.empty((rows_of_all, *x.shape[1:]), x.dtype) for name, x in outcome.items()}
        for name, whole in self._outputs.items():
            part = outcome[name]
            if part.shape != (rows.stop - rows.start, *whole.shape[1:]):  # NumPy would repeat an extent of 1
                raise ValueError(name)
            whole[rows] = part

    def _fail(self, error: Exception) -> None:
        self._outputs = {}
        self._whole.finish(error)
        for part in self._whole.parts:
            self._cancel(part)


def split(whole: Entry, max_rows: int, cancel: Callable[[Entry], None]) -> Iterator[Entry]:
    """Cut a request of independent rows into entries of at most ``max_rows`` which, all queued, answer it together."""
    rows, key, work, _ = whole.group
    starts = range(0, rows, max_rows)
    join = Join(whole, len(starts), cancel)
    for start in starts:
        end = min(start + max_rows, rows)
        inputs = {name: array[start:end] for name, array in whole.inputs.items()}
        group = Group(end - start, key, work * (end - start) // rows)
        part = Entry(inputs, group, partial(join.take, slice(start, end)), whole.deadline, whole.priority)
        part.nbytes = whole.nbytes * (end - start) // rows
        part.padded = whole.padded
        part.client, part.id, part.trace = whole.client, whole.id, whole.trace
        yield part
