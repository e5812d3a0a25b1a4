"""Interrupts executions that may never end, once no caller waits for them."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Protocol

from lathe.server.backends.base import EndlessModel
from lathe.server.batching.entry import DONE, Entry

WATCH_INTERVAL = 0.2  # seconds between two checks
INTERRUPT_DELAY = 1.0  # seconds after a request's deadline before its execution may be interrupted


class RunningBatches(Protocol):
    """The batches that workers run, each with the id of its thread; implemented by `dispatcher.Dispatcher`."""

    running: int

    @property
    def running_batches(self) -> list[tuple[int, list[Entry]]]: ...


class AbandonedRuns:
    """Checks the running batches of an endless model, whose loops may never end, while any batch runs.

    Used on the event loop's thread only.
    """

    __slots__ = ("_batches", "_is_scheduled", "_model")

    def __init__(self, model: EndlessModel, batches: RunningBatches) -> None:
        self._model = model
        self._batches = batches
        self._is_scheduled = False

    def watch(self) -> None:
        """Check from now on, until no batch runs."""
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_later(WATCH_INTERVAL, self._interrupt)

    def _interrupt(self) -> None:
        """Interrupt executions for which no caller waits, and schedule the next check while a batch runs.

        No caller waits for a batch if each of its requests is done, or its deadline passed `INTERRUPT_DELAY` ago.
        """
        self._is_scheduled = False
        if not self._batches.running:
            return
        self._schedule()
        # Runs are read before batches: if a thread starts another batch in between, its run number here is outdated,
        # and interrupting an ended run does nothing.
        runs, batches, past = self._model.runs(), self._batches.running_batches, monotonic() - INTERRUPT_DELAY
        for thread, batch in batches:
            if thread in runs and all(_is_abandoned(entry, past) for entry in batch):
                self._model.interrupt(runs[thread])


def _is_abandoned(entry: Entry, past: float) -> bool:
    return entry.state is DONE or (entry.deadline is not None and entry.deadline < past)
