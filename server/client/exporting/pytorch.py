"""PyTorch's models as ONNX files, by PyTorch's own exporter.

Also a script, for a file in a process of its own, by any Python that has torch:

    python pytorch.py PROGRAM.pt2 FOLDER        writes FOLDER/model.onnx

Exit status 2: the error stands on standard output, as JSON. So this module imports the standard library and torch.
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
AT_FAULT = 2
_LONGEST = 400  # characters of PyTorch's own sentence: a conflict of shapes takes so many
BATCH = "batch"  # what the leading dimension of the inputs is called
# What to do where the leading dimensions cannot all be the batch.
_HINT = "; every leading dimension was to be the batch: say which ones are free, dynamic_shapes=({0: 'batch'}, ...)"


class NotExported(Exception):
    """A sentence about a model that cannot be exported, and why."""


def export_module(
    module: Any,
    example: Any,
    dynamic_shapes: Any,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    folder: Path,
) -> Path:
    """Write a module as it answers outside of training. ``example``: a tensor, a tuple of them, or a mapping by name.

    Without ``dynamic_shapes`` all leading dimensions are one symbol, the batch. Raises NotExported.
    """
    import torch

    _check_exporter()
    args, kwargs = _arguments(example)
    hint = ""
    if dynamic_shapes is None:
        dynamic_shapes, hint = _batches(module, args, kwargs), _HINT
    with _evaluating(module), _told(hint):
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
    """Write an exported program with the dynamic shapes that it has. Raises NotExported."""
    import torch

    _check_exporter()
    with _told():
        made = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=input_names, output_names=output_names
        )
    return save(made, folder)


def save(program: Any, folder: Path) -> Path:
    """Write what the exporter made; weights beyond 2 GB go into a file beside it."""
    program.save(folder / FILE)
    return folder / FILE


def _check_exporter() -> None:
    if importlib.util.find_spec("onnxscript") is None:
        raise NotExported("PyTorch's exporter needs onnxscript: pip install onnxscript")


@contextmanager
def _told(hint: str = "") -> Iterator[None]:
    """Say what PyTorch's exporter raises, which may be anything, by the error that began it."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise NotExported(f"PyTorch: {type(cause).__name__}: {str(cause)[:_LONGEST]}{hint}") from error


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what ``forward`` is called with; NumPy's arrays become tensors."""
    import torch
    from torch.utils import _pytree

    def tensor(leaf: Any) -> Any:
        return torch.from_numpy(leaf) if type(leaf).__module__ == "numpy" and hasattr(leaf, "ndim") else leaf

    if isinstance(example, Mapping):
        return (), {name: _pytree.tree_map(tensor, each) for name, each in example.items()}
    given = example if isinstance(example, tuple | list) else (example,)
    return tuple(_pytree.tree_map(tensor, each) for each in given), {}


def _batches(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dynamic shapes that make the leading dimension of every tensor the same symbol.

    By name: for a `Dim` that cannot be free PyTorch 2.13 exports a number, and says nothing.
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
def _evaluating(module: Any) -> Iterator[None]:
    """Have a module answer as it will be served: without dropout, with the running statistics of its norms."""
    training = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, was in training:
            each.training = was


def main(program: str, folder: str) -> int:
    """Convert one file; returns the exit status."""
    try:
        import torch
    except ImportError as error:
        return _refused(f"a .pt2 file needs torch and onnxscript, and {sys.executable} has no torch ({error})")
    try:
        with _told():
            read = torch.export.load(program)
        export_program(read, Path(folder))
    except NotExported as error:
        return _refused(str(error))
    return 0


def _refused(message: str) -> int:
    print(json.dumps({"error": message}), flush=True)
    return AT_FAULT


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
