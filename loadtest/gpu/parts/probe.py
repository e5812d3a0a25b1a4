"""Installed packages, the device, and one kernel of every family checked against its NumPy reference."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lathe
from lathe.core.ir.graph import Graph
from lathe.core.runtime.device.cublaslt import LEAST_VERSION
from lathe.core.runtime.device.devices import open_device
from loadtest.gpu import families
from loadtest.gpu.case import Bench, Case, Finding, Options

SHARE = 0.12
_PACKAGES = ("numpy", "onnx", "protobuf", "llvmlite", "ml-dtypes", "triton", "torch", "cuda-bindings", "nvidia-cublas")
BATCHES = (1, 3, 17)
TOLERANCES = {
    "float32": 1e-4,
    "bfloat16": 1e-2,
    "float16": 2e-3,
}  # relative to the largest result, by the narrowest type of a node


def cases(options: Options) -> list[Case]:
    kernels = [Case("probe", f"kernel/{index:02d}-{op}") for index, (op, *_) in enumerate(families.FAMILIES)]
    return [Case("probe", "versions"), Case("probe", "device"), *kernels]


def measure(case: Case, bench: Bench) -> Finding:
    match case.words:
        case ["versions"]:
            return _versions()
        case ["device"]:
            return _device(bench.options.device)
        case _:
            index = int(case.words[1].partition("-")[0])
            return _kernel(families.graph_of(*families.FAMILIES[index]), bench.options.device)


def _versions() -> Finding:
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "-"
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    return Finding(text, None, {**found, "executable": sys.version, "cublaslt_needed": LEAST_VERSION})


def _device(name: str) -> Finding:
    device = open_device(name)
    memory, target = device.memory(), device.target
    library = device.library_version()
    facts = {"target": str(target), "free": memory.free, "total": memory.total, "cublaslt": library}
    return Finding(f"{device.name}: {target}, {memory.free / 2**30:.0f} of {memory.total / 2**30:.0f} GiB free, "
                   f"cuBLASLt {library or 'none'}", None, facts)  # fmt: skip


def _kernel(graph: Graph, device: str) -> Finding:
    """The largest error over BATCHES, in multiples of the tolerance, of runs kernel by kernel and as a CUDA graph."""
    worst, tolerance = 0.0, max(TOLERANCES.get(str(value.dtype), 0.0) for value in (*graph.inputs, *graph.outputs))
    with lathe.compile(graph, device=device, tune="off", max_batch=max(BATCHES)) as session:
        kernel = session.profile(families.feeds_of(graph, BATCHES[0]), runs=1).nodes[-1].kernel
        for n in BATCHES:
            feeds = families.feeds_of(graph, n)
            want = lathe.interpret(graph, feeds)
            for _ in range(2):
                got = session.run(feeds)
                session.settle(20)
                worst = max(worst, *(_error(got[name], np.asarray(want[name]), tolerance) for name in want))
    text = f"{kernel}: error {worst:.1e} times the tolerance"
    return Finding(text, worst <= 1, {"kernel": kernel, "of_tolerance": worst})


def _error(got: NDArray[Any], want: NDArray[Any], tolerance: float) -> float:
    """The error over the tolerance. Floats: relative to the largest element; integers must be equal."""
    if got.dtype != want.dtype or str(want.dtype) not in TOLERANCES:
        return 0.0 if got.dtype == want.dtype and np.array_equal(got, want) else float("inf")
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.abs(got - want).max(initial=0.0) / max(np.abs(want).max(initial=0.0), 1e-30)) / tolerance
