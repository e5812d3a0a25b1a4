"""`lathe quantize`: makes an ONNX file whose products are of int8, or whose weights have few bits, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lathe.core.byte_sizes import format_bytes
from lathe.server.cli import method_options as options
from lathe.server.cli.arrays import read_named_arrays
from lathe.server.cli.model import OnnxFile, Threads, model_errors
from lathe.server.cli.terminal import console, fail, make_table

if TYPE_CHECKING:
    from lathe import Graph
    from lathe.core.compress.mixed import LayerChoice


def quantize(
    model: OnnxFile,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Calibrate on this .npz file: an array for each input, with some hundred representative rows. "
            "Further arrays, such as labels, are ignored. Not needed with --dynamic, and with --weights nearest "
            "without adaround.",
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
    weights: options.Weights = None,
    dynamic: options.Dynamic = False,
    bits: options.Bits = 4,
    block: options.Block = 32,
    rounding: options.Rounding = "nearest",
    calibration: options.Calibration = "percentile",
    percentile: options.Percentile = 99.99,
    activations: options.Activations = "uint8",
    symmetric: options.Symmetric = False,
    per_tensor: options.PerTensor = False,
    smoothing: options.Smoothing = 0.0,
    correct_bias: options.CorrectBias = False,
    equalize: options.Equalize = False,
    budget: options.Budget = None,
    skip: options.Skip = None,
    batch: Annotated[int, typer.Option(help="Run this many rows at a time.", min=1)] = 32,
    threads: Threads = None,
) -> None:
    """Write a model with int8 products, or with weights of few bits; other ONNX runtimes run it, too.

    With --data it measures the error of each output on the first rows.

    \b
    Examples:
      lathe quantize model.onnx --data calibration.npz -o small.onnx
      lathe quantize model.onnx --data calibration.npz --budget 1%
      lathe quantize model.onnx --dynamic -o small.onnx
      lathe quantize model.onnx --weights nearest -o small.onnx
      lathe quantize model.onnx --weights gptq --bits 4 --data calibration.npz
    """
    import lathe
    from lathe.core.compress.quantize import feeds_of
    from lathe.core.compress.recipe import method_from_values
    from lathe.core.errors import LatheError

    values = options.MethodOptions(
        weights, dynamic, bits, block, rounding, calibration, percentile, activations, symmetric, per_tensor, smoothing,
        correct_bias, equalize, budget, skip,
    ).values()  # fmt: skip
    try:
        method = method_from_values(values)
    except LatheError as problem:
        raise fail(str(problem)) from None
    if data is None and method.needs_data:
        raise fail("--data: expected a .npz file; only --dynamic and --weights nearest without adaround need none")
    path = output or model.with_suffix(f".int{bits if weights else 8}.onnx")
    arrays = read_named_arrays("--data", data) if data is not None else {}
    with model_errors(), console.status("calibrating"):
        graph = lathe.load(model)
        inputs = [value.name for value in graph.inputs]
        if arrays and (missing := sorted(set(inputs) - arrays.keys())):
            raise fail(f"data: expected arrays {', '.join(sorted(inputs))}, got none for {', '.join(missing)}")
        try:
            made = method.compress(graph, list(feeds_of(graph, arrays, batch)) if arrays else (), threads)
        except LatheError as problem:
            raise fail(str(problem)) from None
        written = lathe.export(made.graph)
        rows = {name: arrays[name][:batch] for name in inputs} if arrays else {}
        errors = _errors(graph, written, rows, threads) if rows else {}
    path.write_bytes(written)
    before, after = model.stat().st_size, len(written)
    console.print(f"{path}: {format_bytes(after)} instead of {format_bytes(before)}", soft_wrap=True)
    if made.choices:
        _show(made.choices)
    if errors:
        table = make_table("output", "root mean square error", "of the largest")
        for name, (error, largest) in errors.items():
            table.add_row(name, f"{error:.3g}", f"{error / largest:.2%}")
        console.print(table)


def _show(choices: Sequence[LayerChoice]) -> None:
    """Print each product with its error alone, its times in microseconds, and the choice."""
    table = make_table("product", "weights", "error alone", "float32, us", "int8, us", "type", "reason")
    for choice in choices:
        times = (f"{nanoseconds / 1e3:.1f}" for nanoseconds in (choice.exact_ns, choice.integer_ns))
        kind = "int8" if choice.is_quantized else "float32"
        table.add_row(choice.name, str(choice.weights), f"{choice.error:.3%}", *times, kind, choice.reason)
    console.print(table)


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
