"""`lathe quantize`: makes an ONNX file whose products are of int8, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lathe.core.byte_sizes import format_bytes
from lathe.server.cli.model import OnnxFile, Threads, model_errors
from lathe.server.cli.terminal import console, fail, make_table

if TYPE_CHECKING:
    from lathe import Graph

_SUFFIX = ".int8.onnx"


def quantize(
    model: OnnxFile,
    data: Annotated[
        Path,
        typer.Option(
            help="Calibrate on this .npz file: an array for each input, with some hundred representative rows. "
            "Further arrays, such as labels, are ignored.",
            exists=True,
            dir_okay=False,
            metavar="FILE.npz",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help=f"Write this ONNX file. Default: FILE with the suffix {_SUFFIX}."),
    ] = None,
    calibration: Annotated[
        str,
        typer.Option(
            help="Choose the range of each activation by: min-max, moving-average, percentile, entropy or mse."
        ),
    ] = "percentile",
    percentile: Annotated[
        float, typer.Option(help="With percentile: the share of numbers within the range, in percent.")
    ] = 99.99,
    activations: Annotated[str, typer.Option(help="Store activations as uint8 or int8.")] = "uint8",
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Use ranges with 0 in the middle.")] = False,
    per_tensor: Annotated[
        bool, typer.Option("--per-tensor", help="Use one scale for a tensor of weights, not one for each channel.")
    ] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Leave the node of this name as it is. Repeat the option.", metavar="NODE"),
    ] = None,
    batch: Annotated[int, typer.Option(help="Run this many rows at a time.", min=1)] = 32,
    threads: Threads = None,
) -> None:
    """Write a model with int8 products, which is smaller and faster; other ONNX runtimes run it, too.

    It measures the error of each output on the first rows of the data.

    \b
    Example:
      lathe quantize model.onnx --data calibration.npz -o small.onnx
    """
    import lathe
    from lathe.core.errors import LatheError

    path = output or model.with_suffix(_SUFFIX)
    arrays = _read(data)
    with model_errors(), console.status("calibrating"):
        graph = lathe.load(model)
        choices: dict[str, Any] = {"calibration": calibration, "percentile": percentile, "activations": activations}
        choices |= {"symmetric": symmetric, "per_channel": not per_tensor, "skip": skip or ()}
        try:
            small = lathe.quantize(graph, arrays, batch=batch, threads=threads, **choices)
        except LatheError as problem:
            raise fail(str(problem)) from None
        written = lathe.export(small)
        errors = _errors(graph, written, {value.name: arrays[value.name][:batch] for value in graph.inputs}, threads)
    path.write_bytes(written)
    before, after = model.stat().st_size, len(written)
    console.print(f"{path}: {format_bytes(after)} instead of {format_bytes(before)}", soft_wrap=True)
    table = make_table("output", "root mean square error", "of the largest")
    for name, (error, largest) in errors.items():
        table.add_row(name, f"{error:.3g}", f"{error / largest:.2%}")
    console.print(table)


def _read(path: Path) -> dict[str, Any]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (ValueError, OSError, EOFError, TypeError) as error:
        raise fail(f"--data: expected a .npz file of arrays, got {path}: {error}") from None


def _errors(graph: Graph, small: bytes, feeds: dict[str, Any], threads: int | None) -> dict[str, tuple[float, float]]:
    """For each output of real numbers the root mean square error, and the largest absolute value."""
    import numpy as np

    import lathe

    with (
        lathe.compile(graph, threads=threads, tune="off") as exact,
        lathe.compile(small, threads=threads, tune="off") as rounded,
    ):
        expected, got = exact.run(feeds), rounded.run(feeds)
    found = {}
    for name, array in expected.items():
        if array.dtype.kind == "f" and array.size:
            difference = np.asarray(got[name], np.float64) - array
            found[name] = float(np.sqrt((difference**2).mean())), max(float(np.abs(array).max()), 1e-30)
    return found
