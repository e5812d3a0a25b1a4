"""A request with more rows than one batch holds, cut into parts and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from server.batching.entry import Entry, Outcome
from server.batching.signature import Group
from server.errors import TooLarge
from server.types import Tensors

LARGEST = 1 << 30  # bytes of outputs: many small rows may become more than there is memory


class Join:
    """Collects the outcomes of parts; the whole is answered when all are there, or with the first failure."""

    def __init__(self, whole: Entry, count: int, cancel: Callable[[Entry], None]) -> None:
        self._whole = whole
        self._outputs: list[Tensors | None] = [None] * count
        self._missing = count
        self._nbytes = 0
        self._cancel = cancel

    def take(self, index: int, outcome: Outcome) -> None:
        """Accept one part's outcome."""
        if isinstance(outcome, Exception):
            self._fail(outcome)
            return
        self._nbytes += sum(array.nbytes for array in outcome.values())
        if self._nbytes > LARGEST:
            self._fail(TooLarge(f"the outputs of {self._whole.rows} rows are larger than {LARGEST} bytes: send fewer"))
            return
        self._outputs[index] = outcome
        self._missing -= 1
        if self._missing == 0:
            parts = [part for part in self._outputs if part is not None]
            self._whole.finish({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def _fail(self, error: Exception) -> None:
        self._outputs = [None] * len(self._outputs)
        self._whole.finish(error)
        for part in self._whole.parts:
            self._cancel(part)


def split(whole: Entry, max_rows: int, cancel: Callable[[Entry], None]) -> Iterator[Entry]:
    """Cut a request of independent rows into entries of at most ``max_rows`` which, all queued, answer it together."""
    rows, key, work, _ = whole.group
    starts = range(0, rows, max_rows)
    join = Join(whole, len(starts), cancel)
    for index, start in enumerate(starts):
        end = min(start + max_rows, rows)
        inputs = {name: array[start:end] for name, array in whole.inputs.items()}
        group = Group(end - start, key, work * (end - start) // rows)
        part = Entry(inputs, group, partial(join.take, index), whole.deadline, whole.priority)
        part.nbytes = whole.nbytes * (end - start) // rows
        part.client, part.id, part.trace = whole.client, whole.id, whole.trace
        yield part
