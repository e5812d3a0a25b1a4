"""What a built-in step is: options in, either a function on the host or a graph to compile out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from core.mistakes import mistakes
from server.pipelines.definition import BadPipeline
from server.types import Tensors, TensorSpec

O = TypeVar("O", bound="Options")  # noqa: E741 - a type variable

PLATFORM = "lathe_builtin"
MAX_BATCH = 4096


class Options(BaseModel):
    """A step's ``options`` table."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass(frozen=True, slots=True)
class Request:
    """What a step is made from: its options, the types of its inputs as far as they are known, the version's files."""

    options: Mapping[str, Any]
    types: Mapping[str, TensorSpec]
    folder: Path

    def read(self, kind: type[O]) -> O:
        """Return the options, checked; raises BadPipeline naming the field."""
        try:
            return kind(**self.options)
        except ValidationError as error:
            found = mistakes(error.errors(include_url=False), kind, dict(self.options))
            raise BadPipeline("; ".join(f"options.{each}" for each in found)) from error

    def type_of(self, name: str) -> TensorSpec:
        """Return an input's type; raises BadPipeline where nothing says it."""
        if name not in self.types:
            raise BadPipeline(f"input {name!r}: expected a tensor of known type; declare the pipeline's input with "
                              "datatype and shape")  # fmt: skip
        return self.types[name]

    def file(self, name: str, largest: int) -> bytes:
        """Return a file of the version; raises BadPipeline where there is none, or it is larger than ``largest``."""
        return self._path(name, largest).read_bytes()

    def open(self, name: str, largest: int) -> int:
        """Return a descriptor of a file, which the caller closes: the folder may move. Raises BadPipeline likewise."""
        return os.open(self._path(name, largest), os.O_RDONLY | os.O_CLOEXEC)

    def _path(self, name: str, largest: int) -> Path:
        path = self.folder / name
        if Path(name).name != name or path.is_symlink() or not path.is_file():
            raise BadPipeline(f"the version has no file {name[:80]!r}")
        if path.stat().st_size > largest:
            raise BadPipeline(f"file {name!r}: expected at most {largest} bytes, got {path.stat().st_size}")
        return path


class HostStep:
    """A step that Python code or a library does, row by row. Subclasses say what they take and give, and execute."""

    platform = PLATFORM
    batchable = True
    batch_reason = "rows are worked on one by one"
    max_batch = MAX_BATCH
    inline = False  # whether short executions may hold the event loop up

    def __init__(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    @property
    def memory_bytes(self) -> int:
        """What it takes beside the process it is in."""
        return 0

    def execute(self, inputs: Tensors) -> Tensors:
        """Do it for the rows of one request; raises BadRequest for rows that are no such thing."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is held."""


Made: TypeAlias = HostStep | bytes  # an ONNX file, compiled like a model of the repository
Maker: TypeAlias = Callable[[Request], Made]
