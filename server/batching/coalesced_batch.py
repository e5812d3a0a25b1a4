"""The interface of a coalesced batch: requests of one iteration of the event loop that can run without the queue."""

from __future__ import annotations

from typing import Protocol

from lathe.server.types import Tensors


class CoalescedBatch(Protocol):
    """Requests for one model, with independent rows, equal inner shapes and no deadlines; empty if all callers left.

    The batcher either executes `stack()` and passes the outputs to `answer`, or calls `queue`.
    """

    @property
    def since(self) -> list[float]:
        """The arrival time of each request (monotonic seconds)."""
        ...

    @property
    def rows(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

    def is_plain(self) -> bool:
        """Whether all requests may run for their callers, and none has to be counted or traced on its own."""
        ...

    def stack(self) -> Tensors:
        """The inputs of all requests, concatenated along axis 0; raises MemoryError."""
        ...

    def answer(self, outputs: Tensors) -> None:
        """Answer each request with its rows of the outputs. The coalesced batch is then empty."""
        ...

    def queue(self) -> None:
        """Submit the requests one by one, as if each had come alone. The coalesced batch is then empty."""
        ...
