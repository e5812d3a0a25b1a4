"""Lathe beside PyTorch on one model at one batch size: engines take turns in rounds, and "ahead" is the median over
rounds of (best peer's time / Lathe's)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

import core
from core.runtime.machine import Peaks
from core.runtime.resident import Resident
from core.runtime.session import Session
from core.runtime.upload import Uploader
from loadtest.gpu import models
from loadtest.gpu.case import Bench, Finding
from loadtest.gpu.lathe import only_part
from loadtest.gpu.peers import Engine, torch_is_usable
from loadtest.timing import relative_error, slice_ms

Make = Callable[[str, onnx.ModelProto, NDArray[Any], str], Engine]
OURS = "lathe"
_HEAVIEST = 12  # steps whose times are kept


def compare(model: str, precision: str, batch: int, peers: Mapping[str, Make], bench: Bench) -> Finding:
    """All figures in milliseconds. A peer that does not run is named with its error and costs only its own figures."""
    options = bench.options
    usable = torch_is_usable(options.device)  # PyTorch is imported first, if at all
    file = models.onnx_of(model)
    x = np.random.default_rng(batch).standard_normal((batch, *models.LARGE[model].shape)).astype(np.float32)
    figures: dict[str, Any] = {"refused": {}}
    with ExitStack() as ending:
        kind: Any = precision
        tune: Any = options.tune
        session = ending.enter_context(
            core.compile(file.SerializeToString(), device=options.device, precision=kind, max_batch=batch, tune=tune)
        )
        engines = {OURS: ending.enter_context(lathe(session, x))}
        for name, make in (peers if usable else {}).items():
            try:
                engines[name] = make(model, file, x, precision)
                engines[name].whole()
            except Exception as error:  # of whatever kind: a compiler of another project's
                engines.pop(name, None)
                figures["refused"][name] = f"{type(error).__name__}: {str(error)[:200]}"
        figures["error"] = _apart(engines, precision)
        session.settle(20)
        figures["whole"] = turns({name: each.whole for name, each in engines.items()}, options.rounds, options.slice)
        figures["resident"] = turns(
            {name: each.resident for name, each in engines.items()}, options.rounds, options.slice
        )
        figures["kernels"] = {
            name: statistics.median(each.seconds() for _ in range(3)) * 1e3 for name, each in engines.items()
        }
        figures["steps"] = steps_of(session, x, bench, precision)
    return _finding(f"{model}, batch {batch}, {precision}", figures, precision)


@contextmanager
def lathe(session: Session, x: NDArray[Any]) -> Iterator[Engine]:
    """Lathe as an engine; its input lies on the device as long as this is open."""
    session.run({"x": x})
    part, n = only_part(session), len(x)
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


def turns(runs: Mapping[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, Any]:
    """Median milliseconds by engine, and "ahead" where there is a peer."""
    for run in runs.values():
        slice_ms(run, seconds / 2)
    found = [{name: slice_ms(run, seconds) for name, run in runs.items()} for _ in range(rounds)]
    return {name: statistics.median(each[name] for each in found) for name in runs} | ahead_of(found)


def ahead_of(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median over rounds of the best peer's time over Lathe's; nothing without a peer."""
    if len(rounds[0]) < 2:
        return {}
    ratios = [min(ms for name, ms in each.items() if name != OURS) / each[OURS] for each in rounds]
    return {"ahead": statistics.median(ratios)}


def steps_of(session: Session, x: NDArray[Any], bench: Bench, precision: str) -> list[dict[str, Any]]:
    """The steps that take longest, each by itself, and their shares of what the GPU reaches."""
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
    """What the part "ceilings" found, as far as it came."""
    product, copy = known.get(f"ceilings/product/{precision}", {}), known.get("ceilings/copy", {})
    return Peaks(product["flops"], copy["bandwidth"]) if "flops" in product and "bandwidth" in copy else None


def _apart(engines: Mapping[str, Engine], precision: str) -> dict[str, float]:
    """How far Lathe's result is from each peer's, as a share of the largest output."""
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
