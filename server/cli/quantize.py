"""`lathe quantize`: makes an ONNX file whose products are of int8, or whose weights have few bits, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lathe.core.byte_sizes import format_bytes
from lathe.server.cli.model import OnnxFile, Threads, model_errors
from lathe.server.cli.terminal import console, fail, make_table

if TYPE_CHECKING:
    from lathe import Graph


def quantize(
    model: OnnxFile,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Calibrate on this .npz file: an array for each input, with some hundred representative rows. "
            "Further arrays, such as labels, are ignored. Needed unless --weights is nearest.",
            exists=True,
            dir_okay=False,
            metavar="FILE.npz",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write this ONNX file. Default: FILE with the suffix .int8.onnx, or .int4.onnx."
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Store only weights in few bits, and compute with float32 inputs. Round them by: nearest, gptq or awq."
        ),
    ] = None,
    bits: Annotated[int, typer.Option(help="With --weights: use 2, 4 or 8 bits.")] = 4,
    block: Annotated[
        int, typer.Option(help="With --weights: use a scale for this many rows of a column; 0: for all rows.")
    ] = 32,
    rounding: Annotated[
        str, typer.Option(help="With --weights nearest or awq: nearest, stochastic, floor or ceil.")
    ] = "nearest",
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
    """Write a model with int8 products, or with weights of few bits; other ONNX runtimes run it, too.

    It measures the error of each output on the first rows of the data.

    \b
    Examples:
      lathe quantize model.onnx --data calibration.npz -o small.onnx
      lathe quantize model.onnx --weights nearest -o small.onnx
      lathe quantize model.onnx --weights gptq --bits 4 --data calibration.npz
    """
    import lathe
    from lathe.core.compress.weight_only import METHODS
    from lathe.core.errors import LatheError

    path = output or model.with_suffix(f".int{bits if weights else 8}.onnx")
    if weights not in (None, *METHODS):
        raise fail(f"--weights: expected one of {', '.join(METHODS)}, got {weights!r}")
    if data is None and weights != "nearest":
        raise fail("--data: expected a .npz file; only --weights nearest needs none")
    arrays = _read(data) if data is not None else {}
    ranges = {"calibration": calibration, "percentile": percentile, "activations": activations}
    ranges |= {"symmetric": symmetric, "per_channel": not per_tensor, "skip": skip or ()}
    codes: dict[str, Any] = {"bits": bits, "block": block, "method": weights, "rounding": rounding}
    codes |= {"symmetric": symmetric, "skip": skip or ()}
    with model_errors(), console.status("calibrating"):
        graph = lathe.load(model)
        inputs = [value.name for value in graph.inputs]
        if arrays and (missing := sorted(set(inputs) - arrays.keys())):
            raise fail(f"data: expected arrays {', '.join(sorted(inputs))}, got none for {', '.join(missing)}")
        make: Any = lathe.quantize_weights if weights else lathe.quantize
        try:
            small = make(graph, arrays or (), batch=batch, threads=threads, **(codes if weights else ranges))
        except LatheError as problem:
            raise fail(str(problem)) from None
        written = lathe.export(small)
        rows = {name: arrays[name][:batch] for name in inputs} if arrays else {}
        errors = _errors(graph, written, rows, threads) if rows else {}
    path.write_bytes(written)
    before, after = model.stat().st_size, len(written)
    console.print(f"{path}: {format_bytes(after)} instead of {format_bytes(before)}", soft_wrap=True)
    if not errors:
        return
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
