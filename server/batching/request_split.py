"""Splits a request with more rows than one batch into parts, and joins their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from lathe.server.batching.entry import Entry, Outcome
from lathe.server.batching.signature import BatchGroup
from lathe.server.errors import Internal, TooLarge
from lathe.server.types import Tensors

MAX_JOINED_BYTES = (
    1 << 30
)  # bytes of joined outputs: a bound, because many small rows may give more outputs than memory


class JoinedRequest:
    """Collects the outcomes of the parts; answers the whole request when all are there, or with the first error."""

    def __init__(self, whole: Entry, count: int, cancel: Callable[[Entry], None]) -> None:
        self._whole = whole
        self._outputs: Tensors = {}
        self._missing = count
        self._nbytes = 0
        self._cancel = cancel

    def take(self, rows: slice, outcome: Outcome) -> None:
        """Take the outcome of the part with these rows, and copy its outputs to their place.

        Copying all parts at the end would block the event loop for longer.
        """
        if isinstance(outcome, Exception):
            self._fail(outcome)
            return
        self._nbytes += sum(array.nbytes for array in outcome.values())
        if self._nbytes > MAX_JOINED_BYTES:
            self._fail(
                TooLarge(f"the outputs of {self._whole.rows} rows are larger than {MAX_JOINED_BYTES} bytes: send fewer")
            )
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
            if part.shape != (rows.stop - rows.start, *whole.shape[1:]):  # NumPy would broadcast an extent of 1
                raise ValueError(name)
            whole[rows] = part

    def _fail(self, error: Exception) -> None:
        self._outputs = {}
        self._whole.finish(error)
        for part in self._whole.parts:
            self._cancel(part)


def split_request(whole: Entry, max_rows: int, cancel: Callable[[Entry], None]) -> Iterator[Entry]:
    """Yield entries of at most `max_rows` for a request of independent rows; their joined outcomes answer `whole`.

    Their inputs are views. After an error in one of them, `cancel` is called for all that were queued.
    """
    rows, key, work, _ = whole.group
    starts = range(0, rows, max_rows)
    join = JoinedRequest(whole, len(starts), cancel)
    for start in starts:
        end = min(start + max_rows, rows)
        inputs = {name: array[start:end] for name, array in whole.inputs.items()}
        group = BatchGroup(end - start, key, work * (end - start) // rows)
        part = Entry(inputs, group, partial(join.take, slice(start, end)), whole.deadline, whole.priority)
        part.nbytes = whole.nbytes * (end - start) // rows
        part.padded = whole.padded
        part.client, part.id, part.trace = whole.client, whole.id, whole.trace
        yield part
