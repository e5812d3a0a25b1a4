"""Times launches on a device without the host, which needs longer between two launches than many kernels run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

from lathe.core.runtime.device.device import Device, Stream

_SAMPLE = 100_000  # nanoseconds of a sample: events have a resolution of half a microsecond
_MIN_LAUNCHES, _MAX_LAUNCHES = 4, 64


def mean_nanoseconds(device: Device, stream: Stream, give: Callable[[], None], launches: int | None = None) -> int:
    """The mean time in nanoseconds of the work that `give` submits to `stream`, over `launches` repetitions.

    The repetitions are one graph between two events. By default there are 4 to 64, as many as take 100 microseconds.
    The work must be repeatable.
    """
    with ExitStack() as ending:
        start, end = (ending.enter_context(closing(device.event(timed=True))) for _ in range(2))

        def timed(work: Callable[[], None]) -> int:
            stream.record(start)
            work()
            stream.record(end)
            end.synchronize()
            return end.since(start)

        give()  # the first time includes loading code
        count = launches or max(_MIN_LAUNCHES, min(_MAX_LAUNCHES, _SAMPLE // max(timed(give), 1)))
        graph = stream.capture(lambda: _repeat(give, count))
        ending.callback(graph.close)
        timed(lambda: stream.replay(graph))  # the first time includes uploading the graph
        return timed(lambda: stream.replay(graph)) // count


def _repeat(give: Callable[[], None], count: int) -> None:
    for _ in range(count):
        give()
