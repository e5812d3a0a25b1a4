"""Calibration: runs a graph on data, and collects a histogram of each value that is to be quantized."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lathe.core.compiler.compile import compile
from lathe.core.compress.histogram import Histogram
from lathe.core.errors import DataError
from lathe.core.ir.graph import Graph

Feeds = Mapping[str, Any]


def collect_histograms(
    graph: Graph, names: Iterable[str], batches: Iterable[Feeds], threads: int | None = None
) -> dict[str, Histogram]:
    """The histogram of each value that `names` names, over all batches; a batch maps names of inputs to arrays.

    The memory is that of one run whose results are these values, plus `Histogram.nbytes` for each of them; no batch is
    kept. `graph` does not change. `threads` are those of `compile`. DataError if there is no batch, or an element of
    these values is not finite; FeedError if a batch does not fit the inputs; KeyError for a name that no value has.
    """
    histograms = {name: Histogram() for name in names}
    inputs = {value.name for value in graph.inputs}
    observed = graph.clone()
    by_name = {value.name: value for value in observed.values()}
    observed.outputs = [by_name[name] for name in histograms if name not in inputs] or observed.outputs
    observed.remove_dead()
    number = -1
    with compile(observed, tune="off", threads=threads) as session:
        for number, batch in enumerate(batches):
            results = session.run(batch)
            for name, histogram in histograms.items():
                try:
                    histogram.add(batch[name] if name in inputs else results[name])
                except DataError as error:
                    raise DataError(f"batch {number}: %{name}: {error}") from None
    if number < 0:
        raise DataError("calibration: expected at least one batch of data, got none")
    return histograms
