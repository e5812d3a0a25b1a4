"""`Trained`: the result of a training in its folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from core import compiler
from core.frontends.onnx import load
from core.ir.graph import Array, Graph
from core.runtime.session import Session
from core.train import report, result

_SHOWN = 3  # metrics, which come in the order of their weight


@dataclass(frozen=True)
class Trained:
    """A model that was trained, and what it is worth: a folder with a result, which `lathe train` leaves as well."""

    folder: Path

    @cached_property
    def record(self) -> Mapping[str, Any]:
        """What `result/metrics.json` holds: metrics, classes, rows, steps, seconds, recipe, digest of the data."""
        return result.read_metrics(self.folder)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the rows that were held out, as the exported model answers them; empty if there were none."""
        found: Mapping[str, float] = self.record["metrics"]
        return found

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, in the order of the model's outputs; None for numbers."""
        names = self.record["classes"]
        return tuple(names) if names is not None else None

    @property
    def path(self) -> Path:
        """The model as an ONNX file: what `lathe push` and `Client.push` take."""
        return self.folder / result.FOLDER / result.MODEL

    @property
    def report(self) -> Path:
        """The page about the training: curves, confusions, graph, slowest operators."""
        return self.folder / result.FOLDER / report.FILE

    @cached_property
    def graph(self) -> Graph:
        """The model as a graph, preprocessing included."""
        return load(self.path)

    @property
    def weights(self) -> dict[str, Array]:
        """The graph's constants by name: for a module of `core.nn` its parameters and buffers by path, among others."""
        return {value.name: array for value, array in self.graph.constants.items()}

    def compile(self, **options: Any) -> Session:
        """Compile the model; the options are those of `core.compile`."""
        return compiler.compile(self.path, **options)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Copy the ONNX file there."""
        return Path(shutil.copyfile(self.path, path))

    def __repr__(self) -> str:
        first = list(self.metrics.items())[:_SHOWN]
        shown = ", ".join(f"{name} {value:.4f}" for name, value in first)
        return f"Trained({shown or 'no rows were held out'}; {self.path})"
