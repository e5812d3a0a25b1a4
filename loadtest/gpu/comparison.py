"""Compares Lathe with PyTorch on one model at one batch size.

Engines take turns in rounds; "ahead" is the median over rounds of (best peer's time / Lathe's).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

import lathe
from lathe.core.runtime.device.upload import Uploader
from lathe.core.runtime.host.machine import Peaks
from lathe.core.runtime.host.resident_values import Resident
from lathe.core.runtime.session.session import Session
from loadtest.gpu import models
from loadtest.gpu.case import Bench, Finding
from loadtest.gpu.lathe import only_executable
from loadtest.gpu.pytorch_peers import Engine, torch_is_usable
from loadtest.timing import relative_error, slice_ms

Make = Callable[[str, onnx.ModelProto, NDArray[Any], str], Engine]
OURS = "lathe"
_HEAVIEST = 12  # number of steps whose times are recorded


def compare(model: str, precision: str, batch: int, peers: Mapping[str, Make], bench: Bench) -> Finding:
    """Measure all figures of a model, with times in milliseconds, those of its slowest steps in microseconds.

    A peer that fails is listed with its error under `refused`. The finding is broken if results differ.
    """
    options = bench.options
    usable = torch_is_usable(options.device)  # PyTorch is imported first, if at all
    file = models.onnx_of(model)
    x = np.random.default_rng(batch).standard_normal((batch, *models.LARGE[model].shape)).astype(np.float32)
    figures: dict[str, Any] = {"refused": {}}
    with ExitStack() as ending:
        kind: Any = precision
        tune: Any = options.tune
        most = max(options.batches)  # one session's worth of tuning serves all batch sizes
        session = ending.enter_context(
            lathe.compile(file.SerializeToString(), device=options.device, precision=kind, max_batch=most, tune=tune)
        )
        engines = {OURS: ending.enter_context(lathe_engine(session, x))}
        for name, make in (peers if usable else {}).items():
            try:
                engines[name] = make(model, file, x, precision)
                engines[name].whole()
            except Exception as error:  # any kind: the peer is another project's compiler
                engines.pop(name, None)
                figures["refused"][name] = f"{type(error).__name__}: {str(error)[:200]}"
        figures["error"] = _apart(engines, precision)
        session.settle(20)
        figures["whole"] = time_in_turns(
            {name: each.whole for name, each in engines.items()}, options.rounds, options.slice
        )
        figures["resident"] = time_in_turns(
            {name: each.resident for name, each in engines.items()}, options.rounds, options.slice
        )
        figures["kernels"] = {
            name: statistics.median(each.seconds() for _ in range(3)) * 1e3 for name, each in engines.items()
        }
        figures["steps"] = slowest_steps(session, x, bench, precision)
    return _finding(f"{model}, batch {batch}, {precision}", figures, precision)


@contextmanager
def lathe_engine(session: Session, x: NDArray[Any]) -> Iterator[Engine]:
    """Lathe as an engine, with its input in device memory for the time of the block."""
    session.run({"x": x})
    part, n = only_executable(session), len(x)
    device, stream = part.device, part.device.stream()
    address = device.allocate(x.nbytes)
    uploader = Uploader(device, stream)
    try:
        uploader.put(address, [np.ascontiguousarray(x).data.cast("B")])
        resident = Resident(device, address, x.nbytes)
        yield Engine(
            lambda: session.run({"x": x})["y"],
            lambda: part.hold(n, [resident], ()).close(),
            lambda: part.nanoseconds(n) / 1e9,
        )
    finally:
        uploader.close()
        device.free(address)
        stream.close()


def time_in_turns(runs: Mapping[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, Any]:
    """Median milliseconds by engine, and "ahead" if there is a peer."""
    for run in runs.values():
        slice_ms(run, seconds / 2)
    found = [{name: slice_ms(run, seconds) for name, run in runs.items()} for _ in range(rounds)]
    return {name: statistics.median(each[name] for each in found) for name in runs} | ahead_of(found)


def ahead_of(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`{"ahead": median over rounds of best peer's time / Lathe's}`; empty without a peer."""
    if len(rounds[0]) < 2:
        return {}
    ratios = [min(ms for name, ms in each.items() if name != OURS) / each[OURS] for each in rounds]
    return {"ahead": statistics.median(ratios)}


def slowest_steps(session: Session, x: NDArray[Any], bench: Bench, precision: str) -> list[dict[str, Any]]:
    """The 12 slowest steps, each timed separately, with their shares of the GPU's peak (roofline).

    A share is None if the peaks were not measured.
    """
    most = _most(bench.known, precision)
    nodes = sorted(session.profile({"x": x}, runs=1).nodes, key=lambda node: -node.nanoseconds)
    return [
        {
            "op": node.op, "kernel": node.kernel, "us": node.nanoseconds / 1e3,
            "share": most.seconds(node.flops, node.bytes) * 1e9 / max(node.nanoseconds, 1) if most else None,
        }
        for node in nodes[:_HEAVIEST]
    ]  # fmt: skip


def _most(known: Mapping[str, Mapping[str, Any]], precision: str) -> Peaks | None:
    """The peaks that the part "ceilings" measured; None unless it measured both."""
    product, copy = known.get(f"ceilings/product/{precision}", {}), known.get("ceilings/copy", {})
    return Peaks(product["flops"], copy["bandwidth"]) if "flops" in product and "bandwidth" in copy else None


def _apart(engines: Mapping[str, Engine], precision: str) -> dict[str, float]:
    """The relative error between Lathe's result and each peer's."""
    ours = engines[OURS].whole()
    return {name: relative_error(ours, each.whole()) for name, each in engines.items() if name != OURS}


def _finding(what: str, figures: dict[str, Any], precision: str) -> Finding:
    most = 1e-3 if precision == "float32" else 5e-2
    lines = [f"{kind} {_line(figures[kind])}" for kind in ("kernels", "resident", "whole")]
    refused = "".join(f"; {name}: {why}" for name, why in figures["refused"].items())
    wrong = [name for name, error in figures["error"].items() if not error <= most]
    text = f"{what} [ms]: {'; '.join(lines)}{refused}{f'; off from {wrong}' if wrong else ''}"
    return Finding(text, False if wrong else None, figures)


def _line(times: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {'x' if name == 'ahead' else ''}{value:.3f}" for name, value in times.items())
