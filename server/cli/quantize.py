"""`lathe quantize`: makes an ONNX file whose products are of int8, or whose weights have few bits, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lathe.core.byte_sizes import format_bytes
from lathe.server.cli.arrays import read_named_arrays
from lathe.server.cli.model import OnnxFile, Threads, model_errors
from lathe.server.cli.terminal import console, fail, make_table, parse_percentage

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
    weights: Annotated[
        str | None,
        typer.Option(
            help="Store only weights in few bits, and compute with float32 inputs. Round them by: nearest, gptq or awq."
        ),
    ] = None,
    dynamic: Annotated[
        bool,
        typer.Option("--dynamic", help="Find the range of each activation in each run, without data."),
    ] = False,
    bits: Annotated[int, typer.Option(help="With --weights: use 2, 4 or 8 bits.")] = 4,
    block: Annotated[
        int, typer.Option(help="With --weights: use a scale for this many rows of a column; 0: for all rows.")
    ] = 32,
    rounding: Annotated[
        str,
        typer.Option(
            help="Round weights by: nearest, stochastic, floor, ceil, or adaround, which learns it from the data. "
            "Not with --weights gptq."
        ),
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
    smoothing: Annotated[
        float,
        typer.Option(help="Move outliers of activations into the weights by SmoothQuant, with this strength; 0: off."),
    ] = 0.0,
    correct_bias: Annotated[
        bool, typer.Option("--correct-bias", help="Take the mean error of rounded weights out of the results.")
    ] = False,
    equalize: Annotated[
        bool,
        typer.Option("--equalize", help="Give the channels between two products equal ranges in the weights of both."),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Use int8 only for products that are faster so on this machine, as many as keep the error of each "
            "output below this part of its root mean square.",
            metavar="PERCENT",
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Leave the node of this name as it is. Repeat the option.", metavar="NODE"),
    ] = None,
    batch: Annotated[int, typer.Option(help="Run this many rows at a time.", min=1)] = 32,
    threads: Threads = None,
) -> None:
    """Write a model with int8 products, or with weights of few bits; other ONNX runtimes run it, too.

    With --data it measures the error of each output on the first rows.

    \b
    Examples:
      lathe quantize model.onnx --data calibration.npz -o small.onnx
      lathe quantize model.onnx --data calibration.npz --budget 1%
      lathe quantize model.onnx --dynamic
      lathe quantize model.onnx --data calibration.npz --rounding adaround
      lathe quantize model.onnx --weights nearest -o small.onnx
      lathe quantize model.onnx --weights gptq --bits 4 --data calibration.npz
    """
    import lathe
    from lathe.core.compress.weight_only import METHODS
    from lathe.core.errors import LatheError

    if weights not in (None, *METHODS):
        raise fail(f"--weights: expected one of {', '.join(METHODS)}, got {weights!r}")
    if dynamic and (weights is not None or budget is not None):
        raise fail("--dynamic: expected neither --weights nor --budget")
    if data is None and not dynamic and (weights != "nearest" or rounding == "adaround"):
        raise fail("--data: expected a .npz file; only --dynamic and --weights nearest without adaround need none")
    limit = parse_percentage("--budget", budget) if budget is not None else None
    if limit is not None and weights is not None:
        raise fail("--budget: expected int8 products, got --weights")
    path = output or model.with_suffix(f".int{bits if weights else 8}.onnx")
    arrays = read_named_arrays("--data", data) if data is not None else {}
    ranges: dict[str, Any] = {"calibration": calibration, "percentile": percentile, "activations": activations}
    ranges |= {"symmetric": symmetric, "per_channel": not per_tensor, "skip": skip or ()}
    ranges |= {"smoothing": smoothing, "corrects_bias": correct_bias, "rounding": rounding, "equalizes": equalize}
    codes: dict[str, Any] = {"bits": bits, "block": block, "method": weights, "rounding": rounding}
    codes |= {"symmetric": symmetric, "skip": skip or ()}
    choices: list[LayerChoice] = []
    with model_errors(), console.status("calibrating"):
        graph = lathe.load(model)
        inputs = [value.name for value in graph.inputs]
        if arrays and (missing := sorted(set(inputs) - arrays.keys())):
            raise fail(f"data: expected arrays {', '.join(sorted(inputs))}, got none for {', '.join(missing)}")
        try:
            if dynamic:
                small = lathe.quantize_dynamic(graph, not per_tensor, rounding, skip=skip or ())  # type: ignore[arg-type]
            elif weights is not None:
                small = lathe.quantize_weights(graph, arrays or (), batch=batch, threads=threads, **codes)
            elif limit is None:
                small = lathe.quantize(graph, arrays, batch=batch, threads=threads, **ranges)
            else:
                small, choices = _within(graph, arrays, limit, ranges, batch, threads)
        except LatheError as problem:
            raise fail(str(problem)) from None
        written = lathe.export(small)
        rows = {name: arrays[name][:batch] for name in inputs} if arrays else {}
        errors = _errors(graph, written, rows, threads) if rows else {}
    path.write_bytes(written)
    before, after = model.stat().st_size, len(written)
    console.print(f"{path}: {format_bytes(after)} instead of {format_bytes(before)}", soft_wrap=True)
    if choices:
        _show(choices)
    if errors:
        table = make_table("output", "root mean square error", "of the largest")
        for name, (error, largest) in errors.items():
            table.add_row(name, f"{error:.3g}", f"{error / largest:.2%}")
        console.print(table)


def _within(
    graph: Graph, arrays: dict[str, Any], budget: float, ranges: dict[str, Any], batch: int, threads: int | None
) -> tuple[Graph, list[LayerChoice]]:
    from lathe.core.compress.mixed import quantize_within
    from lathe.core.compress.quantize import batches_of
    from lathe.core.compress.static import StaticQuantization, activation_type

    ranges = {**ranges, "activations": activation_type(ranges["activations"]), "skip": frozenset(ranges["skip"])}
    batches = list(batches_of(graph, arrays, batch))
    small, choices, _ = quantize_within(graph, batches, budget, StaticQuantization(**ranges), threads)
    return small, choices


def _show(choices: list[LayerChoice]) -> None:
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
