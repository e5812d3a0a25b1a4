"""Calibration: runs a graph on data, and collects a histogram of each value that is to be quantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from lathe.core.compiler.compile import compile
from lathe.core.compress.channel_statistics import ChannelStatistics
from lathe.core.compress.histogram import Histogram
from lathe.core.compress.moments import Moments
from lathe.core.compress.row_parts import RowParts
from lathe.core.errors import DataError
from lathe.core.ir.graph import Graph

MOST_BYTES = 1 << 30  # of moments that are collected at a time

Feeds = Mapping[str, Any]


def observe(
    graph: Graph, names: Iterable[str], batches: Iterable[Feeds], threads: int | None = None
) -> Iterator[dict[str, NDArray[Any]]]:
    """Run `graph` on each batch (names of inputs to arrays), and yield the arrays of the values that `names` names.

    For an input that is the batch's own array. The memory is that of one run whose results are these values; no batch
    is kept. `graph` does not change. `threads` are those of `compile`. KeyError, before the first run, for a name that
    no value has; FeedError if a batch does not fit the inputs; DataError at the end if there was no batch.
    """
    wanted, inputs = list(names), {value.name for value in graph.inputs}
    observed = graph.clone()
    by_name = {value.name: value for value in observed.values()}
    observed.outputs = [by_name[name] for name in wanted if name not in inputs] or observed.outputs
    observed.remove_dead()
    is_empty = True
    with compile(observed, tune="off", threads=threads) as session:
        for batch in batches:
            is_empty, results = False, session.run(batch)
            yield {name: batch[name] if name in inputs else results[name] for name in wanted}
    if is_empty:
        raise DataError("calibration: expected at least one batch of data, got none")


def observe_parts(
    graph: Graph, names: Iterable[str], batches: Iterable[Feeds], threads: int | None = None
) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
    """As `observe`, with the number of the batch; batches of independent rows are run in parts (`RowParts`).

    So the memory of the values does not grow with the rows of a batch.
    """
    wanted = list(names)
    divided, numbers = RowParts(graph, wanted), list[int]()

    def parts() -> Iterator[Feeds]:
        for number, batch in enumerate(batches):
            for part in divided.of(batch):
                numbers.append(number)
                yield part

    for arrays in observe(graph, wanted, parts(), threads):
        yield numbers.pop(), arrays


class _Collector(Protocol):
    def add(self, batch: NDArray[Any]) -> None:
        """Add the array of one batch; DataError if a number is not finite."""
        ...


_Collected = TypeVar("_Collected", bound=_Collector)


def _collect(
    collectors: dict[str, _Collected], graph: Graph, batches: Iterable[Feeds], threads: int | None
) -> dict[str, _Collected]:
    for number, arrays in observe_parts(graph, collectors, batches, threads):
        for name, collector in collectors.items():
            try:
                collector.add(arrays[name])
            except DataError as error:
                raise DataError(f"batch {number}: %{name}: {error}") from None
    return collectors


def collect_histograms(
    graph: Graph, names: Iterable[str], batches: Iterable[Feeds], threads: int | None = None
) -> dict[str, Histogram]:
    """The histogram of each value that `names` names, over all batches.

    The memory is that of `observe_parts`, plus `Histogram.nbytes` for each of them. DataError also if an element of
    these values is not finite; other errors as in `observe`.
    """
    return _collect({name: Histogram() for name in names}, graph, batches, threads)


def collect_channels(
    graph: Graph, axes: Mapping[str, int], batches: Iterable[Feeds], threads: int | None = None
) -> dict[str, ChannelStatistics]:
    """The statistics of the channels of the values named in `axes`, which gives the axis of the channels.

    Memory and errors as in `collect_histograms`.
    """
    return _collect({name: ChannelStatistics(axis) for name, axis in axes.items()}, graph, batches, threads)


def collect_moments(
    graph: Graph, widths: Mapping[str, int], batches: Sequence[Feeds], threads: int | None = None
) -> Iterator[dict[str, Moments]]:
    """Yield the moments of the values named in `widths` (with the extent of their last axis), some values at a time.

    The memory is that of `observe_parts`, plus `Moments.nbytes` of the values that are yielded together: at most
    `MOST_BYTES`, or a single value. All batches are run for each dictionary that is yielded. Errors as in
    `collect_histograms`.
    """
    group: dict[str, Moments] = {}
    for name, width in widths.items():
        if group and Moments.nbytes(width) + sum(Moments.nbytes(len(m.largest)) for m in group.values()) > MOST_BYTES:
            yield _collect(group, graph, batches, threads)
            group = {}
        group[name] = Moments.empty(width)
    if group:
        yield _collect(group, graph, batches, threads)
