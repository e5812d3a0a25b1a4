"""Scores to the names of the best classes."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from server.pipelines.builtins.base import HostStep, Options, Request
from server.pipelines.definition import BadPipeline
from server.types import Tensors, TensorSpec

_LARGEST = 16 << 20  # bytes of labels


class LabelOptions(Options):
    """Which names, and how many."""

    file: str = "labels.txt"  # one label per line, in the classes' order
    top: Annotated[int, Field(ge=1, le=1000)] = 1


def label(request: Request) -> Label:
    """``scores`` FP32 [n, classes] -> ``labels`` BYTES, ``scores`` FP32, ``indices`` INT64, each [n, top], best first.

    Of equal scores the lower class comes first.
    """
    options = request.read(LabelOptions)
    content = request.file(options.file, _LARGEST)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise BadPipeline(f"file {options.file!r}: expected UTF-8, {error.reason} at byte {error.start}") from error
    names = content.splitlines()  # of bytes: U+2028 and the like, where text has lines end, may be part of a label
    if not options.top <= len(names):
        raise BadPipeline(
            f"options.top: expected at most the {len(names)} labels of {options.file!r}, got {options.top}"
        )
    return Label(names, options.top)


class Label(HostStep):
    """Picks the best."""

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
        """Sort each row."""
        scores: NDArray[np.float32] = inputs["scores"].astype(np.float32, copy=False)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self._top].astype(np.int64)
        return {"labels": self._names[best], "scores": np.take_along_axis(scores, best, 1), "indices": best}
