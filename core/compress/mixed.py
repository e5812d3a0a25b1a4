"""Mixed precision by measurement: integers only where they are faster on this machine, within a budget of error.

For each product the error of the outputs is measured when it alone is quantized, and the time of its kernels in both
forms. Products are then quantized in the order of time saved per squared error, as long as the error of the outputs
stays within the budget. Errors are measured in place of the Hessians of HAWQ (Dong et al. 2019, arXiv 1905.03696),
times as in HAQ (Wang et al. 2019, arXiv 1811.08886).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lathe.core.compiler.compile import compile
from lathe.core.compress.calibration import Feeds
from lathe.core.compress.static import DEFAULTS, Calibrated, StaticQuantization, calibrate
from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Graph, Node

_ROUNDS, _RUNS = 7, 3  # profiles of each form in turns, and their runs: the least of medians, as other work adds time
_LEAST_GAIN = 1.05  # of integers over float32; below it noise would choose

Outputs = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class LayerChoice:
    """One product: what it costs in both forms, and the choice.

    `error` is the root mean square error of the outputs, relative to their root mean square, when this product alone is
    quantized. `exact_ns` and `integer_ns` are the nanoseconds of its kernels on one thread, for one calibration batch.
    `reason` says why it is quantized or not.
    """

    name: str
    op: str
    weights: int  # elements
    error: float
    exact_ns: int
    integer_ns: int
    is_quantized: bool = False
    reason: str = ""


def quantize_within(
    graph: Graph,
    batches: Sequence[Feeds],
    budget: float,
    options: StaticQuantization = DEFAULTS,
    threads: int | None = None,
) -> tuple[Graph, list[LayerChoice], float]:
    """A copy of `graph` with int8 products, the choice for each product, and the error of the outputs.

    The error is the root mean square error relative to the root mean square, of the worst output, on the first of
    `batches`; it stays within `budget` (0.01: one percent). A product that is not faster with integers stays float32.
    UnsupportedError for a budget that is not above 0; others as in `quantize_static`.
    """
    if not budget > 0:
        raise UnsupportedError(f"budget: expected a number above 0, got {budget}")
    calibrated = calibrate(graph, batches, options, threads)
    feeds = batches[0]
    exact = _outputs(calibrated.graph, feeds, threads)
    choices = _measure(calibrated, feeds, exact, threads)
    chosen, error = _choose(calibrated, choices, feeds, exact, budget, threads)
    report = [_explained(choice, index in chosen, budget) for index, choice in choices.items()]
    return calibrated.quantized(_with_sums(calibrated, chosen)), report, error


def measure_layers(calibrated: Calibrated, feeds: Feeds, threads: int | None = None) -> list[LayerChoice]:
    """What each product costs on `feeds` in both forms, without a choice."""
    return list(_measure(calibrated, feeds, _outputs(calibrated.graph, feeds, threads), threads).values())


def _measure(calibrated: Calibrated, feeds: Feeds, exact: Outputs, threads: int | None) -> dict[int, LayerChoice]:
    """The error and the times of each product, by its index."""
    exact_times, integer_times = _times([calibrated.graph, calibrated.quantized(calibrated.layers)], feeds)
    found = {}
    for index in calibrated.products:
        node = calibrated.graph.nodes[index]
        error = _error(calibrated, {index}, feeds, exact, threads)
        weights = calibrated.graph.constant_of(node.required_input(1))
        assert weights is not None, "products have constant weights"
        times = exact_times.get(node.name, 0), integer_times.get(node.name, 0)
        found[index] = LayerChoice(node.name, node.op, weights.size, error, *times)
    return found


def _choose(
    calibrated: Calibrated,
    choices: Mapping[int, LayerChoice],
    feeds: Feeds,
    exact: Outputs,
    budget: float,
    threads: int | None,
) -> tuple[set[int], float]:
    """The indices of the products to quantize, and the measured error of the outputs."""
    faster = [index for index, choice in choices.items() if choice.exact_ns > _LEAST_GAIN * choice.integer_ns]
    saved = {index: choices[index].exact_ns - choices[index].integer_ns for index in faster}
    order = sorted(faster, key=lambda index: choices[index].error ** 2 / saved[index])
    chosen: list[int] = []
    squares = 0.0
    for index in order:  # errors of different products add up as if they were independent
        if squares + choices[index].error ** 2 <= budget**2:
            squares += choices[index].error ** 2
            chosen.append(index)
    while chosen:
        error = _error(calibrated, set(chosen), feeds, exact, threads)
        if error <= budget:
            return set(chosen), error
        chosen = chosen[: max(len(chosen) * 7 // 8, 0) if len(chosen) > 8 else len(chosen) - 1]
    return set(), 0.0


def _explained(choice: LayerChoice, is_quantized: bool, budget: float) -> LayerChoice:
    if is_quantized:
        reason = f"{choice.exact_ns / max(choice.integer_ns, 1):.1f} times as fast"
    elif choice.exact_ns <= _LEAST_GAIN * choice.integer_ns:
        reason = "integers are not faster here"
    elif choice.error > budget:
        reason = "its error alone exceeds the budget"
    else:
        reason = "the budget is used for products that save more time per error"
    return replace(choice, is_quantized=is_quantized, reason=reason)


def _with_sums(calibrated: Calibrated, products: set[int]) -> set[int]:
    """The products, and the sums of activations that come from these products alone."""
    nodes, all_products = calibrated.graph.nodes, set(calibrated.products)
    place = {node: index for index, node in enumerate(nodes)}
    sources = {index: _sources(nodes[index], place, all_products) for index in set(calibrated.layers) - all_products}
    return products | {index for index, found in sources.items() if found and found <= products}


def _sources(node: Node, place: Mapping[Node, int], products: set[int]) -> set[int]:
    """The indices of the nearest products before a node."""
    found, seen, pending = set(), set(), [node]
    while pending:
        for value in pending.pop().inputs:
            producer = value.producer if value is not None else None
            if producer is None or producer in seen:
                continue
            seen.add(producer)
            if place.get(producer) in products:
                found.add(place[producer])
            else:
                pending.append(producer)
    return found


def _times(graphs: Sequence[Graph], feeds: Feeds) -> list[dict[str, int]]:
    """For each graph the nanoseconds of the steps of each node, by its name, which kernels keep through fusion.

    On one thread: with several, a step's time is that of the slowest one, which other work on the machine may delay.
    """
    found: list[dict[str, int]] = [{} for _ in graphs]
    with ExitStack() as stack:
        sessions = [stack.enter_context(compile(graph, tune="off", threads=1)) for graph in graphs]
        for _ in range(_ROUNDS):
            for session, least in zip(sessions, found, strict=True):
                times: dict[str, int] = {}
                for step in session.profile(feeds, _RUNS).nodes:
                    times[step.label] = times.get(step.label, 0) + step.nanoseconds
                least |= {name: min(time, least.get(name, time)) for name, time in times.items()}
    return found


def _outputs(graph: Graph, feeds: Feeds, threads: int | None) -> Outputs:
    with compile(graph, tune="off", threads=threads) as session:
        return {name: array.astype(np.float64) for name, array in session.run(feeds).items() if array.dtype.kind == "f"}


def _error(calibrated: Calibrated, products: set[int], feeds: Feeds, exact: Outputs, threads: int | None) -> float:
    """The relative root mean square error of the worst output, if these products are quantized."""
    got = _outputs(calibrated.quantized(_with_sums(calibrated, products)), feeds, threads)
    return max((relative_error(got[name], array) for name, array in exact.items()), default=0.0)


def relative_error(got: NDArray[np.float64], exact: NDArray[np.float64]) -> float:
    """The root mean square of the difference, divided by that of the exact numbers; 0 for empty arrays."""
    if not exact.size:
        return 0.0
    return float(np.sqrt(((got - exact) ** 2).mean() / max(float((exact**2).mean()), np.finfo(np.float64).tiny)))
