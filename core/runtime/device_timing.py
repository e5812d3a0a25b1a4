"""How long launches take on a device by themselves: without the host, which between two launches needs longer than many
a kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

from core.runtime.device import Device, Stream

_SAMPLE = 100_000  # nanoseconds that a sample should last: events have a resolution of half a microsecond
_LEAST_LAUNCHES, _MOST_LAUNCHES = 4, 64


def nanoseconds_each(device: Device, stream: Stream, give: Callable[[], None], launches: int | None = None) -> int:
    """The time of what `give` gives to `stream`, as a mean over `launches` of it in one graph between two events. By
    default as many as a sample needs. The work is done again and again, so it must bear that."""
    with ExitStack() as ending:
        start, end = (ending.enter_context(closing(device.event(timed=True))) for _ in range(2))

        def timed(work: Callable[[], None]) -> int:
            stream.record(start)
            work()
            stream.record(end)
            end.synchronize()
            return end.since(start)

        give()  # the first time, code is loaded, too
        count = launches or max(_LEAST_LAUNCHES, min(_MOST_LAUNCHES, _SAMPLE // max(timed(give), 1)))
        graph = stream.capture(lambda: _repeated(give, count))
        ending.callback(graph.close)
        timed(lambda: stream.replay(graph))  # the first time, the graph is uploaded
        return timed(lambda: stream.replay(graph)) // count


def _repeated(give: Callable[[], None], count: int) -> None:
    for _ in range(count):
        give()
