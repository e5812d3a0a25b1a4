"""What `push` takes besides ONNX files, made into ONNX on the client's side: a server gets data, never code.

A model of PyTorch or scikit-learn is known by its class, which its own library has loaded. So nobody else needs these
libraries, and nothing here imports them before there is such a model.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from server.archive import Body, body_of
from server.client.errors import ClientError
from server.client.exporting.files import file_of
from server.client.exporting.sentences import one_line

Model: TypeAlias = Any  # bytes, a path, or an object of a library that need not be there

_EXPECTED = (
    "an ONNX file (path, bytes or onnx.ModelProto), a pipeline.toml, a .pt2 file, a torch.nn.Module with an example of "
    "its inputs, a torch.export.ExportedProgram, a torch.onnx.ONNXProgram, a fitted scikit-learn estimator, "
    "or a core.Graph"
)


@dataclass(frozen=True, slots=True)
class Options:
    """How a model is exported. What does not concern a kind of model must be left at None."""

    example: Any = None
    dynamic_shapes: Any = None
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    python: Path | str | None = None

    def refuse(self, what: str, *allowed: str) -> None:
        """Raise ClientError for an option that says nothing about models of this kind."""
        for name in self.__slots__:
            if name not in allowed and getattr(self, name) is not None:
                raise ClientError(f"{name}: says nothing about {what}")


@contextmanager
def exported(model: Model, options: Options) -> Iterator[Body]:
    """Yield what to upload for a model; ClientError for what cannot be exported, OSError for what cannot be read."""
    with tempfile.TemporaryDirectory(prefix="lathe-") as folder:
        yield _body(model, options, Path(folder))


def _body(model: Model, options: Options, folder: Path) -> Body:
    if isinstance(model, bytes):
        options.refuse("the bytes of an ONNX file")
        return body_of(model)
    if isinstance(model, str | Path):
        return body_of(file_of(Path(model), options, folder))
    for module, name, export in _KINDS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(model, kind):
            return export(model, options, folder)
    raise ClientError(f"content: expected {_EXPECTED}, got {_said(model)}")


def _said(model: Model) -> str:
    """Name a model that cannot be pushed, and what to push in its place."""
    kind = type(model) if not isinstance(model, type) else model
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(model, type):
        return f"the class {name}, not an object of it"
    if any(base.__module__.startswith("core.nn.") for base in kind.__mro__):
        return f"{name}: trace it first, core.nn.trace(model, {{'x': 'float32[n,4]'}})"
    return name


def _torch_module(model: Model, options: Options, folder: Path) -> Body:
    from server.client.exporting import pytorch

    options.refuse("a torch.nn.Module", "example", "dynamic_shapes", "input_names", "output_names")
    if options.example is None:
        raise ClientError("example: a torch.nn.Module needs an example of its inputs: push(name, module, (x,))")
    given = (options.example, options.dynamic_shapes, options.input_names, options.output_names)
    with _told(pytorch.NotExported):
        return body_of(pytorch.export_module(model, *given, folder))


def _torch_program(model: Model, options: Options, folder: Path) -> Body:
    from server.client.exporting import pytorch

    options.refuse("an exported program, which has its own", "input_names", "output_names")
    with _told(pytorch.NotExported):
        return body_of(pytorch.export_program(model, folder, options.input_names, options.output_names))


def _onnx_program(model: Model, options: Options, folder: Path) -> Body:
    from server.client.exporting import pytorch

    options.refuse("a torch.onnx.ONNXProgram")
    return body_of(pytorch.save(model, folder))


def _estimator(model: Model, options: Options, folder: Path) -> Body:
    from server.client.exporting import scikit_learn

    options.refuse("a scikit-learn estimator", "example")
    with _told(scikit_learn.NotExported):
        return body_of(scikit_learn.export(model, options.example))


def _proto(model: Model, options: Options, folder: Path) -> Body:
    options.refuse("an onnx.ModelProto")
    return body_of(bytes(model.SerializeToString()))


def _graph(model: Model, options: Options, folder: Path) -> Body:
    import core

    options.refuse("a core.Graph")
    return body_of(core.export(model))


@contextmanager
def _told(kind: type[Exception]) -> Iterator[None]:
    """Raise ClientError, of one line, where a model cannot be exported."""
    try:
        yield
    except kind as error:
        raise ClientError(f"content: {one_line(str(error))}") from error


# Where a class lies that its own library loads with the first object of it, and what exports such objects.
_KINDS: tuple[tuple[str, str, Callable[[Model, Options, Path], Body]], ...] = (
    ("torch.nn", "Module", _torch_module),
    ("torch.export", "ExportedProgram", _torch_program),
    ("torch.onnx", "ONNXProgram", _onnx_program),
    ("sklearn.base", "BaseEstimator", _estimator),
    ("onnx", "ModelProto", _proto),
    ("core.ir.graph", "Graph", _graph),
)
