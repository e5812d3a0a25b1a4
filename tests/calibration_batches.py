"""The calibration data of ONNX Runtime's quantizer, from batches in a list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from onnxruntime.quantization import CalibrationDataReader


class CalibrationBatches(CalibrationDataReader):  # type: ignore[misc]  # the package has no types
    """Gives ONNX Runtime's quantizer one batch (inputs by name) after the other."""

    def __init__(self, batches: Iterable[Mapping[str, Any]]) -> None:
        self.batches: Iterator[Mapping[str, Any]] = iter(batches)

    def get_next(self) -> Mapping[str, Any] | None:
        return next(self.batches, None)
