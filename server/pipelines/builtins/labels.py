"""Turns scores into the names of the best classes (top-k)."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lathe.server.pipelines.builtins.base import HostStep, Options, StepRequest
from lathe.server.pipelines.definition import DEFAULT_FILES, BadPipeline
from lathe.server.types import Tensors, TensorSpec

_MAX_FILE_BYTES = 16 << 20  # bytes of labels


class LabelOptions(Options):
    """Options of `label`."""

    file: str = DEFAULT_FILES["label"]  # one label per line, in the classes' order
    top: Annotated[int, Field(ge=1, le=1000)] = 1


def label(request: StepRequest) -> Label:
    """The step `scores` FP32 [n, classes] -> `labels` BYTES, `scores` FP32, `indices` INT64, each [n, top], best first.

    Equal scores are ordered by class index. Raises BadPipeline.
    """
    options = request.read(LabelOptions)
    content = request.file(options.file, _MAX_FILE_BYTES)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise BadPipeline(f"file {options.file!r}: expected UTF-8, {error.reason} at byte {error.start}") from error
    names = content.splitlines()  # as bytes: str.splitlines() would also split at U+2028 and the like
    if not options.top <= len(names):
        raise BadPipeline(
            f"options.top: expected at most the {len(names)} labels of {options.file!r}, got {options.top}"
        )
    return Label(names, options.top)


class Label(HostStep):
    """Returns the top classes with their names and scores."""

    inline = True

    def __init__(self, names: list[bytes], top: int) -> None:
        super().__init__(
            [TensorSpec("scores", "FP32", (-1, len(names)))],
            [
                TensorSpec("labels", "BYTES", (-1, top)),
                TensorSpec("scores", "FP32", (-1, top)),
                TensorSpec("indices", "INT64", (-1, top)),
            ],
        )
        self._names = np.empty(len(names), np.object_)
        self._names[:] = names
        self._top = top

    def execute(self, inputs: Tensors) -> Tensors:
        """Return the outputs for the rows of one request."""
        scores: NDArray[np.float32] = inputs["scores"].astype(np.float32, copy=False)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self._top].astype(np.int64)
        return {"labels": self._names[best], "scores": np.take_along_axis(scores, best, 1), "indices": best}
