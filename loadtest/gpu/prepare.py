"""Compiles ahead, without a GPU, every kernel that a run asks for, and those that its tuner would try."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from onnx import ModelProto

import core
from core.ahead import compile_kernels, dimensions
from core.errors import LatheError, UnsupportedError
from core.ir.graph import Graph
from core.runtime import carried
from core.runtime.store import Store
from core.train import losses, optimizers, step
from loadtest import build, training, zoo
from loadtest.gpu import families, models
from loadtest.gpu.case import Options
from loadtest.gpu.lathe import elementwise
from loadtest.gpu.parts import agreement, probe
from loadtest.gpu.parts import training as trained


def prepare(target: str, options: Options, path: Path) -> int:
    """Add to the file what it has not; the number of kernels in it. The file is written after every model, so that a
    run that is broken off has what was compiled by then. Kernels that do not compile are left to the run."""
    with tempfile.TemporaryDirectory(prefix="lathe-gpu-") as folder:
        store = Store(Path(folder))
        if path.exists():
            carried.read_tar(path, store)
        for work in _work(target, options, folder):
            try:
                work()
            except (LatheError, RuntimeError) as error:  # the run meets it where it belongs
                print(f"not compiled ahead: {str(error).splitlines()[0]}", file=sys.stderr)
            carried.write_tar(path, store)
        return carried.write_tar(path, store)


def _work(target: str, options: Options, folder: str) -> list[Callable[[], None]]:
    """What a run compiles, in the order of its parts."""
    onnx = {name: partial(zoo.model, name) for name in zoo.ZOO} | {
        name: partial(models.onnx_of, name) for name in models.LARGE
    }
    most, tune = max(options.batches), "off" if options.tune == "off" else "default"
    ahead = partial(_ahead, target=target, folder=folder, max_batch=most)
    made: list[Callable[[], None]] = [partial(_family, index, ahead) for index in range(len(families.FAMILIES))]
    made.append(partial(ahead, partial(elementwise, 64)))
    for case in agreement.cases(options):
        name, precision = case.words
        made.append(partial(ahead, partial(_graph, onnx[name]), precision=precision))
    made += [
        partial(ahead, partial(_graph, onnx[name]), precision=precision, tune=tune)
        for name in options.models for precision in options.precisions
    ]  # fmt: skip
    for case in trained.cases(options):
        what, name, precision = case.words
        optimizer = trained.SGD if what == "agreement" else optimizers.Adam(training.RATE)
        made.append(partial(_train, name, target, folder, precision, optimizer))
    return made


def _ahead(
    graph: Callable[[], Graph], target: str, folder: str, max_batch: int, precision: str = "float32", tune: str = "off",
    sizes: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    compile_kernels(graph(), target, folder, precision, max_batch, tune, sizes)


def _family(index: int, ahead: Callable[..., None]) -> None:
    """Where `n` is not the batch size, a node is compiled for each of the sizes that are probed."""
    graph = partial(families.graph_of, *families.FAMILIES[index])
    for sizes in [{"n": n} for n in probe.BATCHES] if dimensions(graph()) else [None]:
        ahead(graph, sizes=sizes)


def _graph(model: Callable[[], ModelProto]) -> Graph:
    return core.load(model().SerializeToString())


def _train(name: str, target: str, folder: str, precision: Any, optimizer: Any) -> None:
    """A step is compiled when it first runs, which a GPU that is not here refuses after that."""
    graph = core.load(build.build(name, training.MODELS[name]).SerializeToString())
    learner = step(graph, losses.CrossEntropy(), optimizer, device=target, precision=precision, cache_dir=folder)
    with suppress(UnsupportedError):
        learner.run({"x": training.sample(name), "target": training.targets()})
