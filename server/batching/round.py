"""Requests that one turn of the event loop brings and that need no look of their own: they can run unqueued."""

from __future__ import annotations

from typing import Protocol

from server.types import Tensors


class Round(Protocol):
    """Requests for one model, of independent rows and equal inner shapes, without deadlines; none, if all left.

    Whoever takes it either runs :meth:`stack`'s rows and hands :meth:`answer` the outputs, or has it :meth:`queue` the
    requests.
    """

    @property
    def since(self) -> list[float]:
        """When each request came, in monotonic seconds."""
        ...

    @property
    def rows(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

    def is_plain(self) -> bool:
        """Whether all of it may run for those who ask, and nobody counts or watches the requests one by one."""
        ...

    def stack(self) -> Tensors:
        """Return the inputs, the requests' rows one after the other."""
        ...

    def answer(self, outputs: Tensors) -> None:
        """Answer the requests by the outputs' rows, and end the round."""
        ...

    def queue(self) -> None:
        """Submit the requests one by one, as if each had come alone, and end the round."""
        ...
