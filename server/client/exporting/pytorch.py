"""Exports PyTorch models to ONNX files, by PyTorch's own exporter.

Also a script that any Python interpreter with torch can run on a .pt2 file:

    python pytorch.py PROGRAM.pt2 FOLDER        writes FOLDER/model.onnx

On exit status 2 the error is on standard output, as JSON. As a script it must import only the standard library and
torch.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE = "model.onnx"
EXIT_NOT_EXPORTED = 2
_LONGEST = 400  # characters of PyTorch's message, enough for a conflict of shapes
BATCH = "batch"  # the symbol of the inputs' leading dimension
# Advice if the leading dimensions cannot all be the batch.
_HINT = "; every leading dimension was to be the batch: say which ones are free, dynamic_shapes=({0: 'batch'}, ...)"


class NotExported(Exception):
    """A model cannot be exported; the message says why in one sentence."""


def export_module(
    module: Any,
    example: Any,
    dynamic_shapes: Any,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    folder: Path,
) -> Path:
    """Export a module in evaluation mode to an ONNX file in `folder`, and return the file's path; raises NotExported.

    `example` has its inputs: a tensor, a tuple of them, or a mapping by name. Without `dynamic_shapes` the leading
    dimensions of all inputs are one symbol, the batch.
    """
    import torch

    _check_exporter()
    args, kwargs = _arguments(example)
    hint = ""
    if dynamic_shapes is None:
        dynamic_shapes, hint = _batches(module, args, kwargs), _HINT
    with _evaluation_mode(module), _as_not_exported(hint):
        program = torch.onnx.export(
            module,
            args,
            kwargs=kwargs,
            dynamo=True,
            verbose=False,
            dynamic_shapes=dynamic_shapes,
            input_names=input_names,
            output_names=output_names,
        )
    return save(program, folder)


def export_program(
    program: Any,
    folder: Path,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> Path:
    """Export an ExportedProgram with its own dynamic shapes to an ONNX file in `folder`; returns the file's path.

    Raises NotExported.
    """
    import torch

    _check_exporter()
    with _as_not_exported():
        onnx_program = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=input_names, output_names=output_names
        )
    return save(onnx_program, folder)


def save(program: Any, folder: Path) -> Path:
    """Write an ONNXProgram to `folder` and return the ONNX file's path; weights beyond 2 GB are in a file beside it."""
    program.save(folder / FILE)
    return folder / FILE


def _check_exporter() -> None:
    if importlib.util.find_spec("onnxscript") is None:
        raise NotExported("PyTorch's exporter needs onnxscript: pip install onnxscript")


@contextmanager
def _as_not_exported(hint: str = "") -> Iterator[None]:
    """A context manager that turns any exception into NotExported, with the message of its root cause, then `hint`."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise NotExported(f"PyTorch: {type(cause).__name__}: {str(cause)[:_LONGEST]}{hint}") from error


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of `forward`; NumPy arrays are converted to tensors."""
    import torch
    from torch.utils import _pytree

    def tensor(leaf: Any) -> Any:
        return torch.from_numpy(leaf) if type(leaf).__module__ == "numpy" and hasattr(leaf, "ndim") else leaf

    if isinstance(example, Mapping):
        return (), {name: _pytree.tree_map(tensor, each) for name, each in example.items()}
    inputs = example if isinstance(example, tuple | list) else (example,)
    return tuple(_pytree.tree_map(tensor, each) for each in inputs), {}


def _batches(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dynamic shapes that make the leading dimension of every tensor the same symbol.

    The symbol is given as a string: for a `Dim` that cannot be dynamic PyTorch 2.13 silently exports a number.
    """
    import torch
    from torch.utils import _pytree

    def free(leaf: Any) -> Any:
        return {0: BATCH} if isinstance(leaf, torch.Tensor) and leaf.ndim else None

    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise NotExported(f"the example does not fit {type(module).__name__}.forward{signature}: {error}") from error
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return {name: _pytree.tree_map(free, each) for name, each in bound.items()}


@contextmanager
def _evaluation_mode(module: Any) -> Iterator[None]:
    """A context manager inside which a module is in evaluation mode (no dropout, running statistics in norms).

    Afterwards the module and its submodules have their modes again.
    """
    training = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, was in training:
            each.training = was


def main(program: str, folder: str) -> int:
    """Convert the .pt2 file `program` to an ONNX file in `folder`; returns the exit status."""
    try:
        import torch
    except ImportError as error:
        return _print_error(f"a .pt2 file needs torch and onnxscript, and {sys.executable} has no torch ({error})")
    try:
        with _as_not_exported():
            exported = torch.export.load(program)
        export_program(exported, Path(folder))
    except NotExported as error:
        return _print_error(str(error))
    return 0


def _print_error(message: str) -> int:
    print(json.dumps({"error": message}), flush=True)
    return EXIT_NOT_EXPORTED


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
