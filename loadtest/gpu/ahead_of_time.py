"""Compiles ahead of time, without a GPU, the kernels of a run and the candidates that its tuner would time."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from onnx import ModelProto

import lathe
from lathe.core.compiler.ahead_of_time import compile_kernels, dimensions
from lathe.core.errors import LatheError, UnsupportedError
from lathe.core.ir.graph import Graph
from lathe.core.runtime.artifact.store import Store
from lathe.core.runtime.device import portable_cache
from lathe.core.train import step
from lathe.core.train.training_step import losses, optimizers
from loadtest import model_builder as build
from loadtest import training, zoo
from loadtest.gpu import families, models
from loadtest.gpu.case import Options
from loadtest.gpu.lathe import elementwise
from loadtest.gpu.parts import agreement, probe
from loadtest.gpu.parts import training as trained


def prepare(target: str, options: Options, path: Path) -> int:
    """Add the missing kernels to the cache file `path`, and return the number of kernels in it.

    The file is written after every model, so that an interrupted run keeps its work. Kernels that do not compile are
    left to the benchmark run.
    """
    with tempfile.TemporaryDirectory(prefix="lathe-gpu-") as folder:
        store = Store(Path(folder))
        if path.exists():
            portable_cache.read_tar(path, store)
        for work in _work(target, options, folder):
            try:
                work()
            except (LatheError, RuntimeError) as error:  # the run reports it in its case
                print(f"not compiled ahead: {str(error).splitlines()[0]}", file=sys.stderr)
            portable_cache.write_tar(path, store)
        return portable_cache.write_tar(path, store)


def _work(target: str, options: Options, folder: str) -> list[Callable[[], None]]:
    """The compilations of a run, in the order of its parts."""
    onnx = {name: partial(zoo.model, name) for name in zoo.ZOO} | {
        name: partial(models.onnx_of, name) for name in models.LARGE
    }
    most, tune = max(options.batches), "off" if options.tune == "off" else "default"
    ahead = partial(_compile_ahead, target=target, folder=folder, max_batch=most)
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


def _compile_ahead(
    graph: Callable[[], Graph], target: str, folder: str, max_batch: int, precision: str = "float32", tune: str = "off",
    sizes: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    compile_kernels(graph(), target, folder, precision, max_batch, tune, sizes)


def _family(index: int, ahead: Callable[..., None]) -> None:
    """Compile a node once, or for each probed size if `n` is not its batch dimension."""
    graph = partial(families.graph_of, *families.FAMILIES[index])
    for sizes in [{"n": n} for n in probe.BATCHES] if dimensions(graph()) else [None]:
        ahead(graph, sizes=sizes)


def _graph(model: Callable[[], ModelProto]) -> Graph:
    return lathe.load(model().SerializeToString())


def _train(name: str, target: str, folder: str, precision: Any, optimizer: Any) -> None:
    """Compile the kernels of a training step of model `name` for the GPU `target`, into the cache in `folder`.

    The first run of the step compiles them, then raises UnsupportedError because there is no GPU. This error is
    ignored.
    """
    graph = lathe.load(build.build(name, training.MODELS[name]).SerializeToString())
    learner = step(graph, losses.CrossEntropy(), optimizer, device=target, precision=precision, cache_dir=folder)
    with suppress(UnsupportedError):
        learner.run({"x": training.sample(name), "target": training.targets()})
