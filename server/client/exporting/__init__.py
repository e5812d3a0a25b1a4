"""Exports models of other libraries to ONNX for `push`, on the client's machine: the server gets data, never code.

A model of PyTorch or scikit-learn is recognised by its class, which is in memory if such a model exists. So other
users do not need these libraries, and this package imports them only for such a model.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lathe.server.archive import UploadBody, body_of
from lathe.server.client.errors import ClientError
from lathe.server.client.exporting.error_text import one_line
from lathe.server.client.exporting.files import exported_file

Model: TypeAlias = Any  # bytes, a path, or an object of a library that may not be installed

_EXPECTED = (
    "an ONNX file (path, bytes or onnx.ModelProto), a pipeline.toml, a .pt2 file, a torch.nn.Module with an example of "
    "its inputs, a torch.export.ExportedProgram, a torch.onnx.ONNXProgram, a fitted scikit-learn estimator, "
    "or a lathe.Graph"
)


@dataclass(frozen=True, slots=True)
class Options:
    """How a model is exported. Options that do not apply to a kind of model must be None."""

    example: Any = None
    dynamic_shapes: Any = None
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    python: Path | str | None = None
    adapters: Mapping[str, Path | str] | None = None
    draft: Path | str | None = None

    def refuse(self, what: str, *allowed: str) -> None:
        """Raise ClientError if an option outside `allowed` is set; `what` names the kind of model in the message."""
        for name in self.__slots__:
            if name not in allowed and getattr(self, name) is not None:
                raise ClientError(f"{name}: does not apply to {what}")


@contextmanager
def export_model(model: Model, options: Options) -> Iterator[UploadBody]:
    """A context manager that yields the upload of a model, valid until it is left.

    Raises ClientError if the model cannot be exported, OSError or ModelError as `body_of`.
    """
    with tempfile.TemporaryDirectory(prefix="lathe-") as folder:
        yield _body(model, options, Path(folder))


def _body(model: Model, options: Options, folder: Path) -> UploadBody:
    if isinstance(model, bytes):
        options.refuse("the bytes of an ONNX file")
        return body_of(model)
    if isinstance(model, str | Path):
        adapters = {name: Path(each) for name, each in (options.adapters or {}).items()}
        draft = None if options.draft is None else Path(options.draft)
        return body_of(exported_file(Path(model), options, folder), adapters, draft)
    for module, name, export in _KINDS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(model, kind):
            return export(model, options, folder)
    raise ClientError(f"content: expected {_EXPECTED}, got {_describe(model)}")


def _describe(model: Model) -> str:
    """Return the name of an unsupported model's class, with advice on what to push instead."""
    kind = type(model) if not isinstance(model, type) else model
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(model, type):
        return f"the class {name}, not an object of it"
    if any(base.__module__.startswith("lathe.core.nn.") for base in kind.__mro__):
        return f"{name}: trace it first, lathe.nn.trace(model, {{'x': 'float32[n,4]'}})"
    return name


def _torch_module(model: Model, options: Options, folder: Path) -> UploadBody:
    from lathe.server.client.exporting import pytorch

    options.refuse("a torch.nn.Module", "example", "dynamic_shapes", "input_names", "output_names")
    if options.example is None:
        raise ClientError("example: a torch.nn.Module needs an example of its inputs: push(name, module, (x,))")
    arguments = (options.example, options.dynamic_shapes, options.input_names, options.output_names)
    with _as_client_error(pytorch.NotExported):
        return body_of(pytorch.export_module(model, *arguments, folder))


def _torch_program(model: Model, options: Options, folder: Path) -> UploadBody:
    from lathe.server.client.exporting import pytorch

    options.refuse("an exported program, which has its own inputs and shapes", "input_names", "output_names")
    with _as_client_error(pytorch.NotExported):
        return body_of(pytorch.export_program(model, folder, options.input_names, options.output_names))


def _onnx_program(model: Model, options: Options, folder: Path) -> UploadBody:
    from lathe.server.client.exporting import pytorch

    options.refuse("a torch.onnx.ONNXProgram")
    return body_of(pytorch.save(model, folder))


def _estimator(model: Model, options: Options, folder: Path) -> UploadBody:
    from lathe.server.client.exporting import scikit_learn

    options.refuse("a scikit-learn estimator", "example")
    with _as_client_error(scikit_learn.NotExported):
        return body_of(scikit_learn.export(model, options.example))


def _proto(model: Model, options: Options, folder: Path) -> UploadBody:
    options.refuse("an onnx.ModelProto")
    return body_of(bytes(model.SerializeToString()))


def _graph(model: Model, options: Options, folder: Path) -> UploadBody:
    import lathe

    options.refuse("a lathe.Graph")
    return body_of(lathe.export(model))


@contextmanager
def _as_client_error(kind: type[Exception]) -> Iterator[None]:
    """A context manager that turns an exception of this kind into a ClientError with a message of one line."""
    try:
        yield
    except kind as error:
        raise ClientError(f"content: {one_line(str(error))}") from error


# The module and name of each supported class, and the function that exports its objects.
_KINDS: tuple[tuple[str, str, Callable[[Model, Options, Path], UploadBody]], ...] = (
    ("torch.nn", "Module", _torch_module),
    ("torch.export", "ExportedProgram", _torch_program),
    ("torch.onnx", "ONNXProgram", _onnx_program),
    ("sklearn.base", "BaseEstimator", _estimator),
    ("onnx", "ModelProto", _proto),
    ("lathe.core.ir.graph", "Graph", _graph),
)
