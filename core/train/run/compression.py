"""Compresses a version in a work folder like that of a training, and compares the result with the version.

recipe.json           a `Compression`
result/model.onnx     the compressed model
result/metrics.json   metrics of the model on the test rows, also compared with the version: see `Comparison`
result/report.html    the figures of both, and each layer
events.jsonl          the events `stage`, `done` or `failed`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import onnx

from lathe.core.compress.calibration import Feeds
from lathe.core.compress.latency import time_in_turns
from lathe.core.compress.layer_report import LayerReport, report_layers
from lathe.core.compress.mixed import LayerChoice
from lathe.core.errors import DataError
from lathe.core.frontends.content_digest import may_have_external_data
from lathe.core.frontends.export import export
from lathe.core.frontends.external import extent_of, is_external
from lathe.core.frontends.onnx import load
from lathe.core.frontends.proto import all_messages
from lathe.core.train.data import Loader
from lathe.core.train.recipe.compression import LATENCY, SIZE, Compression, CompressionData, from_json, select_data
from lathe.core.train.recipe.data_selection import dataset_for
from lathe.core.train.recipe.parent_model import Parent, classes_of, with_classes
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.report.compression import compression_page
from lathe.core.train.run import events, result
from lathe.core.train.run.model_comparison import Comparison, compare_models
from lathe.core.train.run.scores import Stopped
from lathe.core.train.run.single_run import SingleResult, run_once
from lathe.core.train.run.training_loop import Outcome
from lathe.core.train.run.work_folder import PARENT, RECIPE, Sources

REPORT = "report.html"
_EVENT_INTERVAL = 1.0  # seconds between two events of a stage
_LAYER_ROWS = 4  # of a batch: the results of all layers are in memory together


@dataclass(frozen=True)
class Inputs:
    """The recipe, the version with its class names, and the rows to read."""

    recipe: Compression
    parent: Parent
    model: Path
    data: CompressionData


def run_compression(
    folder: Path, sources: Sources, resources: Resources, stop: Callable[[], bool], watch: events.Watcher | None = None
) -> Outcome:
    """Run the compression in the folder unless it has a result; DONE, or STOPPED if `stop` returned true.

    `sources.parent` is the version, by default `parent.onnx` in the folder. `watch` gets the events. Occupied if
    another process works here. RecipeError, DataError, FeedError or ModelError if recipe, data and version do not fit
    together. OSError if a file cannot be read, or the result cannot be written.
    """

    def work(event_log: events.EventLog) -> SingleResult:
        inputs = read_inputs(folder / RECIPE, sources.dataset, sources.parent or folder / PARENT)
        return _Run(inputs, resources, _Stages(event_log, stop)).result()

    return run_once(folder, watch, work)


def read_inputs(recipe: Path, dataset: Path, model: Path) -> Inputs:
    """Read and check everything that a compression needs, and run nothing.

    RecipeError, DataError or ModelError if recipe, data and version do not fit together, or if the method has nothing
    to change in the version. OSError if a file cannot be read.
    """
    parsed = from_json(recipe.read_bytes())
    parent = Parent(load(model), classes_of(model.read_bytes()))
    parsed.method.check(parent.model)
    return Inputs(parsed, parent, model, select_data(parsed, dataset_for(parsed.data, dataset), parent))


class _Stages:
    """Reports progress, and ends the work when a stop is requested."""

    def __init__(self, event_log: events.EventLog, stop: Callable[[], bool]) -> None:
        self._event_log, self._stop = event_log, stop
        self._reported = -_EVENT_INTERVAL

    def begin(self, stage: str, total: int) -> None:
        self._reported = -_EVENT_INTERVAL
        self.reach(stage, 0, total)

    def reach(self, stage: str, ended: int, total: int) -> None:
        """Report that `ended` of `total` parts of a stage have ended; Stopped if a stop is requested."""
        if self._stop():
            raise Stopped
        if monotonic() - self._reported >= _EVENT_INTERVAL:
            self._event_log.emit("stage", stage=stage, ended=ended, total=total)
            self._reported = monotonic()


class _CalibrationBatches:
    """The feeds of the calibration. Each iteration reads the rows again, so that they need not stay in memory."""

    def __init__(self, data: CompressionData, stages: _Stages) -> None:
        self._data, self._stages = data, stages

    def __iter__(self) -> Iterator[Feeds]:
        data = self._data
        with Loader(data.examples, data.calibration, data.batch, shuffle=False, workers=0) as loader:
            self._stages.begin("calibrating", len(loader))
            for ended, batch in enumerate(loader.epoch(0)):
                yield {name: batch[name] for name in data.examples.inputs}
                self._stages.reach("calibrating", ended + 1, len(loader))

    def first(self, rows: int) -> Feeds:
        """The feeds of a run of the first `rows` calibration rows, or of as many as there are."""
        batch = self._data.examples.take(self._data.calibration[:rows])
        return {name: batch[name] for name in self._data.examples.inputs}


class _Run:
    """One compression: the inputs, and the results of its stages."""

    def __init__(self, inputs: Inputs, resources: Resources, stages: _Stages) -> None:
        self._inputs, self._stages, self._threads = inputs, stages, resources.threads
        self._cache = resources.cache_dir
        self._batches = _CalibrationBatches(inputs.data, stages)
        self._began = perf_counter()

    def result(self) -> SingleResult:
        """Compress, compare and measure; returns the result's files. Errors as in `run_compression`; Stopped."""
        inputs, source = self._inputs, self._inputs.parent
        made = inputs.recipe.method.compress(source.model, self._batches, self._threads)
        model = with_classes(export(made.graph), source.classes)
        layers = report_layers(source.model, made.graph, self._batches.first(self._layer_rows), self._threads)
        compared = self._compare(model)
        nanoseconds = self._time(model)
        sizes = [file_bytes(inputs.model), len(model)]
        metrics = {
            **compared.metrics,
            SIZE: sizes[1] / sizes[0],
            LATENCY: nanoseconds[1] / nanoseconds[0],
        }
        figures = [
            {"metrics": scores, "bytes": size, "microseconds": time / 1e3}
            for scores, size, time in zip((compared.before, compared.after), sizes, nanoseconds, strict=True)
        ]
        record = self._record(metrics, figures, _layer_table(layers, made.choices))
        page = compression_page(record)
        files = {result.MODEL: model, result.METRICS: json.dumps(record, indent=1).encode(), REPORT: page.encode()}
        return SingleResult(files, {"metrics": metrics, "seconds": record["seconds"]})

    @property
    def _layer_rows(self) -> int:
        fixed = self._inputs.parent.model.inputs[0].shape[:1]
        return fixed[0] if fixed and isinstance(fixed[0], int) else _LAYER_ROWS

    def _compare(self, model: bytes) -> Comparison:
        data = self._inputs.data
        if not len(data.test):
            return Comparison({}, {}, {})
        self._stages.begin("comparing", -(-len(data.test) // data.batch))
        return compare_models(
            self._inputs.model,
            model,
            data,
            lambda ended, total: self._stages.reach("comparing", ended, total),
            self._threads,
            self._cache,
        )

    def _time(self, model: bytes) -> list[int]:
        feeds = self._batches.first(self._inputs.data.timed_rows)
        self._stages.begin("timing", 1)
        return time_in_turns([self._inputs.parent.model, model], feeds, lambda: self._stages.reach("timing", 0, 1))

    def _record(self, metrics: dict[str, float], figures: list[Any], layers: list[dict[str, Any]]) -> dict[str, Any]:
        """The content of metrics.json."""
        recipe, data = self._inputs.recipe, self._inputs.data
        resolved = recipe.model_copy(update={"data": data.data})
        return {
            "metrics": metrics,
            "figures": dict(zip(("source", "result"), figures, strict=True)),
            "layers": layers,
            "rows": {"calibration": len(data.calibration), "test": len(data.test), "timed": data.timed_rows},
            "classes": data.examples.classes,
            "recipe": resolved.model_dump(mode="json"),
            "data": data.examples.digest,
            "version": result.code_version(),
            "seconds": round(perf_counter() - self._began, 3),
        }


def _layer_table(layers: list[LayerReport], choices: Any) -> list[dict[str, Any]]:
    """The reports of layers as JSON, with what the method measured of each, if it did."""
    by_name: dict[str, LayerChoice] = {choice.name: choice for choice in choices}
    return [asdict(layer) | _choice(by_name.get(layer.name)) for layer in layers]


def _choice(choice: LayerChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    return {
        "error_alone": choice.error,
        "float32_microseconds": choice.exact_ns / 1e3,
        "int8_microseconds": choice.integer_ns / 1e3,
        "reason": choice.reason,
    }


def file_bytes(path: Path) -> int:
    """The size of an ONNX file together with the files of its folder that hold its external data.

    OSError if a file cannot be read, DataError for an external file that does not exist.
    """
    raw = path.read_bytes()
    if not may_have_external_data(raw):
        return len(raw)
    proto = onnx.load_model_from_string(raw)
    tensors = (each for each in all_messages(proto) if isinstance(each, onnx.TensorProto) and is_external(each))
    files = {path.parent / extent_of(tensor, tensor.name).location for tensor in tensors}
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(f"expected the external file {missing[0]} beside the model", file=path.name)
    return len(raw) + sum(file.stat().st_size for file in files)
