"""The interface of built-in steps: from options to a function on the host, or to an ONNX graph to compile."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from lathe.core.validation_errors import error_messages
from lathe.server.pipelines.definition import BadPipeline
from lathe.server.types import Tensors, TensorSpec

O = TypeVar("O", bound="Options")  # noqa: E741 - a type variable

PLATFORM = "lathe_builtin"
MAX_BATCH = 4096


class Options(BaseModel):
    """A step's `options` table."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass(frozen=True, slots=True)
class StepRequest:
    """The inputs for making a step: its options, the known types of its inputs, and the version's folder."""

    options: Mapping[str, Any]
    types: Mapping[str, TensorSpec]
    folder: Path

    def read(self, kind: type[O]) -> O:
        """Return the validated options; raises BadPipeline naming the field."""
        try:
            return kind(**self.options)
        except ValidationError as error:
            found = error_messages(error.errors(include_url=False), kind, dict(self.options))
            raise BadPipeline("; ".join(f"options.{each}" for each in found)) from error

    def type_of(self, name: str) -> TensorSpec:
        """Return an input's type; raises BadPipeline if it is unknown."""
        if name not in self.types:
            raise BadPipeline(f"input {name!r}: expected a tensor of known type; declare the pipeline's input with "
                              "datatype and shape")  # fmt: skip
        return self.types[name]

    def file(self, name: str, largest: int) -> bytes:
        """Return the content of a file; raises BadPipeline if it is missing or larger than `largest` bytes."""
        return self._path(name, largest).read_bytes()

    def open(self, name: str, largest: int) -> int:
        """Return a descriptor of a file, because the folder may move; the caller closes it. Raises like `file`."""
        return os.open(self._path(name, largest), os.O_RDONLY | os.O_CLOEXEC)

    def _path(self, name: str, largest: int) -> Path:
        path = self.folder / name
        if Path(name).name != name or path.is_symlink() or not path.is_file():
            raise BadPipeline(f"file {name[:80]!r}: expected a regular file in the version's folder, got none")
        if path.stat().st_size > largest:
            raise BadPipeline(f"file {name!r}: expected at most {largest} bytes, got {path.stat().st_size}")
        return path


class HostStep:
    """A step that Python code or a library executes, row by row. Subclasses define the tensors and `execute`."""

    platform = PLATFORM
    batchable = True
    batch_reason = "rows are processed one by one"
    max_batch = MAX_BATCH
    inline = False  # whether short executions may run on the event loop's thread

    def __init__(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory outside this process."""
        return 0

    def execute(self, inputs: Tensors) -> Tensors:
        """Return the outputs for the rows of one request; raises BadRequest for invalid rows."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the step's resources; by default there are none."""


StepModel: TypeAlias = HostStep | bytes  # an ONNX file, compiled like a model of the repository
StepMaker: TypeAlias = Callable[[StepRequest], StepModel]
