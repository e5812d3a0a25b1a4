"""Times every candidate kernel of the heaviest nodes of the timed models, at every batch size."""

from __future__ import annotations

import statistics
from functools import lru_cache
from math import inf

from lathe.core.compiler.description import describe
from lathe.core.compiler.options import make_options
from lathe.core.compiler.placement import placement_of, target_on
from lathe.core.compiler.run_passes import run_passes
from lathe.core.compiler.symbol_binding import bind
from lathe.core.compiler.tuner import Problem, problems
from lathe.core.errors import DeviceMemoryError
from lathe.core.frontends.onnx import load
from lathe.core.runtime.artifact.store import open_store
from lathe.core.runtime.device.device_trial import device_bench
from lathe.core.runtime.device.devices import canonical, open_device
from loadtest.gpu import models
from loadtest.gpu.case import Bench, Case, Finding, Options

SHARE = 0.14
_SAMPLES = 3


def cases(options: Options) -> list[Case]:
    """The cases: the heaviest problem of every model first, then the second heaviest, and so on."""
    return [
        Case("tiles", f"{model}/{precision}/{index}", 40.0)
        for precision in options.precisions for index in range(options.problems) for model in options.models
    ]  # fmt: skip


def measure(case: Case, bench: Bench) -> Finding:
    model, precision, index = case.words
    heaviest = _problems(model, precision, bench.options.device, bench.options.batches)
    if int(index) >= len(heaviest):
        return Finding(f"{model} has {len(heaviest)} problems in {precision}")
    problem = heaviest[int(index)]
    microseconds = _times(problem, bench.options)
    node = problem.request.node
    what = f"{node.op} {', '.join(str(value.type) for value in node.inputs if value is not None)}"
    best = {n: min(times, key=lambda kernel: times[kernel]) for n, times in microseconds.items() if times}
    text = "; ".join(f"batch {n}: {kernel} {microseconds[n][kernel]:.1f} us" for n, kernel in best.items())
    figures = {
        "problem": what,
        "preferred": {n: problem.calls[0].at(n).spec.summary for n in bench.options.batches},
        "microseconds": microseconds,
    }
    return Finding(f"{what}: {text or 'no kernel ran'}", None, figures)


@lru_cache(4)
def _problems(model: str, precision: str, device: str, batches: tuple[int, ...]) -> list[Problem]:
    """The distinct tuning problems of a model with more than one kernel, by work, the heaviest first."""
    graph = load(models.onnx_of(model).SerializeToString())
    options = make_options(device, precision, max_batch=max(batches), tune="default")
    batching = describe(graph, options).batching
    ready, _ = run_passes(bind(graph, batching, ()), options)
    target = target_on(canonical(device), options)
    parts = [part for part in placement_of(ready, options, {}).parts if part.device == canonical(device)]
    found = {each.key: each for part in parts for each in problems(part.graph, target, 1, batches).values()}
    return sorted((each for each in found.values() if len(each.kernels) > 1), key=lambda each: -each.work)


def _times(problem: Problem, options: Options) -> dict[int, dict[str, float]]:
    """Microseconds by batch size and kernel.

    Batch sizes that do not fit into device memory are left out, and so are kernels that did not run.
    """
    device, store = open_device(options.device), open_store(None)
    objects = store.objects if store is not None else None
    device.prepare((call.spec for call in problem.kernels), objects)
    found: dict[int, dict[str, float]] = {}
    with device_bench(device, objects)(problem.kernels, problem.request) as trials_at:
        for n in options.batches:
            try:
                with trials_at(n) as trials:
                    samples = [statistics.median(trial.seconds() for _ in range(_SAMPLES)) for trial in trials]
            except DeviceMemoryError:
                continue
            by_kernel = zip((call.spec.summary for call in problem.kernels), samples, strict=True)
            found[n] = {kernel: seconds * 1e6 for kernel, seconds in by_kernel if seconds < inf}
    return found
