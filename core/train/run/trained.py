"""`Trained`: the result of a training in its folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lathe.core.compiler import compile as compile_module
from lathe.core.frontends.onnx import load
from lathe.core.ir.graph import Array, Graph
from lathe.core.runtime.session.session import Session
from lathe.core.train import report
from lathe.core.train.run import result

_SHOWN = 3  # metrics in `repr`; the most important ones come first


@dataclass(frozen=True)
class Trained:
    """A trained model and its metrics: a folder with a result, as `fit` and `lathe train` write it."""

    folder: Path

    @cached_property
    def record(self) -> Mapping[str, Any]:
        """The content of `result/metrics.json`: metrics, classes, rows, steps, seconds, recipe, digest of the data.

        OSError if the folder has no result.
        """
        return result.read_metrics(self.folder)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the exported model on the test rows, by name; empty if no rows were held out."""
        metrics: Mapping[str, float] = self.record["metrics"]
        return metrics

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The class names in the order of the model's outputs; None for regression."""
        names = self.record["classes"]
        return tuple(names) if names is not None else None

    @property
    def path(self) -> Path:
        """The path of the model's ONNX file, which `lathe push` and `Client.push` take."""
        return self.folder / result.FOLDER / result.MODEL

    @property
    def report(self) -> Path:
        """The path of the HTML report: curves, confusion matrix, graph, slowest operators.

        The file is missing if it could not be written.
        """
        return self.folder / result.FOLDER / report.FILE

    @cached_property
    def graph(self) -> Graph:
        """The model as a graph, with its preprocessing."""
        return load(self.path)

    @property
    def weights(self) -> dict[str, Array]:
        """The graph's constants by name. For a `lathe.core.nn.Module` they include parameters and buffers by path."""
        return {value.name: array for value, array in self.graph.constants.items()}

    def compile(self, **options: Any) -> Session:
        """Compile the model to a new session, which the caller closes; the options are those of `lathe.compile`."""
        return compile_module.compile(self.path, **options)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Copy the ONNX file to `path`; returns that path."""
        return Path(shutil.copyfile(self.path, path))

    def __repr__(self) -> str:
        first = list(self.metrics.items())[:_SHOWN]
        shown = ", ".join(f"{name} {value:.4f}" for name, value in first)
        return f"Trained({shown or 'no rows were held out'}; {self.path})"
