"""`quantize`, `quantize_dynamic`, `quantize_weights`: make a smaller graph from a model, and from data if need be."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lathe.core.compress.calibration import Feeds
from lathe.core.compress.dynamic import DynamicQuantization
from lathe.core.compress.dynamic import quantize_dynamic as quantize_dynamic_of
from lathe.core.compress.mixed import quantize_within
from lathe.core.compress.ranges import DEFAULT_PERCENTILE, Method
from lathe.core.compress.rounding import Rounding
from lathe.core.compress.static import StaticQuantization, activation_type, quantize_static
from lathe.core.compress.weight_only import Activations, WeightQuantization
from lathe.core.compress.weight_only import Method as WeightMethod
from lathe.core.compress.weight_only import quantize_weights as quantize_weights_of
from lathe.core.errors import DataError, UnsupportedError
from lathe.core.frontends.onnx import load
from lathe.core.ir.graph import Graph


def quantize(
    model: Graph | str | os.PathLike[str] | bytes,
    data: Mapping[str, NDArray[Any]] | Iterable[Feeds],
    calibration: Method = "percentile",
    percentile: float = DEFAULT_PERCENTILE,
    activations: Literal["uint8", "int8"] = "uint8",
    symmetric: bool = False,
    per_channel: bool = True,
    smoothing: float = 0.0,
    corrects_bias: bool = False,
    rounding: Rounding = "nearest",
    seed: int = 0,
    equalizes: bool = False,
    skip: Collection[str] = (),
    budget: float | None = None,
    batch: int = 32,
    threads: int | None = None,
) -> Graph:
    """A copy of `model` (a graph, a path to an ONNX file, or its bytes) with int8 products, in ONNX's QDQ form.

    `lathe.export` converts the graph to the bytes of an ONNX file, which other runtimes run, too. `data` are
    representative inputs. Either they map the name of each input to an array; the arrays have equal numbers of rows,
    `batch` rows at a time make a run, and further arrays, such as labels, are ignored. Or they are an iterable of the
    feeds of each run. A few hundred rows suffice. Calibration runs on `threads` threads, as in `compile`.

    `calibration` chooses the range of numbers that an activation's integers cover: "min-max", "moving-average",
    "percentile" (`percentile` percent of the numbers), "entropy" or "mse". `activations` is their type; `symmetric`
    ranges have 0 in the middle. Weights are symmetric int8, with a scale for each output channel, or with
    `per_channel=False` for each tensor. The nodes of `skip` stay as they are.

    `smoothing` above 0 (0.5 is usual) divides the channels of activations by factors that multiply the weights, so
    that outliers do not determine the scale of all (SmoothQuant). `corrects_bias` takes the mean error of rounded
    weights out of the results. Weights are rounded by `rounding`: "nearest", "stochastic" with `seed`, "floor", "ceil",
    or "adaround", which learns from the data how to round each weight (AdaRound). With `smoothing`, `corrects_bias` or
    "adaround" all batches are kept in memory. `equalizes` gives the channels between two products equal ranges in both
    (cross-layer equalization).

    With a `budget` only those products are of int8 that are faster so on this machine, as many as keep the relative
    root mean square error of each output, measured on the first batch, below it (0.01: one percent). All batches are
    kept in memory meanwhile. `lathe.core.compress.mixed.quantize_within` also returns the reason for each product.

    ModelError if the model is not valid; OSError if its file cannot be read; UnsupportedError for an unknown choice, a
    `percentile` of at most 50 or above 100, a name in `skip` without a node, a `budget` that is not above 0, a `batch`
    below 1, and a model that computes with integers already or has no product of float32 that integers can compute;
    DataError if there is no data, an input has no array, arrays have different numbers of rows, or a value to quantize
    is not finite; FeedError if inputs do not fit the model.
    """
    graph = graph_of(model)
    choices = StaticQuantization(
        calibration,
        percentile,
        activation_type(activations),
        symmetric,
        per_channel,
        smoothing,
        corrects_bias,
        frozenset(skip),
        rounding,
        seed,
        equalizes,
    )
    feeds = feeds_of(graph, data, batch)
    if budget is not None:
        return quantize_within(graph, list(feeds), budget, choices, threads)[0]
    return quantize_static(graph, feeds, choices, threads)


def quantize_weights(
    model: Graph | str | os.PathLike[str] | bytes,
    data: Mapping[str, NDArray[Any]] | Iterable[Feeds] = (),
    bits: int = 4,
    block: int = 32,
    method: WeightMethod = "nearest",
    symmetric: bool = False,
    rounding: Rounding = "nearest",
    seed: int = 0,
    skip: Collection[str] = (),
    batch: int = 32,
    threads: int | None = None,
    activations: Activations = "float32",
) -> Graph:
    """A copy of `model` (a graph, a path to an ONNX file, or its bytes) whose large weights have 2, 4 or 8 `bits`.

    Weights of MatMul and Gemm of at least 4,096 elements become codes, of which each `block` of rows in a column has a
    scale (0: all rows), and a zero point unless they are `symmetric`. Activations stay float32; with `activations`
    "int8", Lathe rounds those that these weights multiply to int8 in each run, if that is faster. `method` is
    "nearest", "gptq", which corrects the weights that are left for the error so far; or "awq", which rounds the weights
    of large inputs more finely. "nearest" and "awq" round by `rounding` ("nearest", "stochastic" with `seed`, "floor",
    "ceil", or "adaround", which learns it); "gptq" takes only "nearest". "nearest" without "adaround" ignores `data`.
    `data`, `batch`, `skip` and `threads` are as in `quantize`.

    ModelError if the model is not valid; OSError if its file cannot be read; UnsupportedError for an unknown choice, a
    name in `skip` without a node, and a model that computes with integers already or has no large constant weight.
    Methods with data: DataError if there is none, an input has no array, arrays have different numbers of rows, or the
    input of a product is not finite; FeedError if inputs do not fit the model.
    """
    graph = graph_of(model)
    choices = WeightQuantization(
        bits, block, symmetric, method, rounding, seed, skip=frozenset(skip), activations=activations
    )
    feeds = feeds_of(graph, data, batch)
    return quantize_weights_of(graph, choices, feeds, threads)


def quantize_dynamic(
    model: Graph | str | os.PathLike[str] | bytes,
    per_channel: bool = True,
    rounding: Rounding = "nearest",
    seed: int = 0,
    skip: Collection[str] = (),
) -> Graph:
    """A copy of `model` (a graph, a path to an ONNX file, or its bytes) that multiplies bytes, without calibration.

    Each run finds the range of each activation (DynamicQuantizeLinear, MatMulInteger, ConvInteger). Weights are
    symmetric int8, with a scale for each output channel, or with `per_channel=False` for each tensor. They are rounded
    by `rounding` ("nearest", "stochastic" with `seed`, "floor" or "ceil"). The nodes of `skip`, and products with fewer
    than 1,024 weights, stay as they are.

    ModelError if the model is not valid; OSError if its file cannot be read; UnsupportedError for an unknown choice, a
    name in `skip` without a node, and a model that computes with integers already or has no large enough product of
    constant weights.
    """
    choices = DynamicQuantization(per_channel, rounding, seed, skip=frozenset(skip))
    return quantize_dynamic_of(graph_of(model), choices)


def graph_of(model: Graph | str | os.PathLike[str] | bytes) -> Graph:
    """The graph of a model: a graph, a path to an ONNX file, or its bytes. ModelError, OSError."""
    return model if isinstance(model, Graph) else load(model if isinstance(model, bytes) else Path(model))


def feeds_of(graph: Graph, data: Mapping[str, NDArray[Any]] | Iterable[Feeds], batch: int) -> Iterable[Feeds]:
    """The feeds of each run, from arrays by name of an input or from feeds; UnsupportedError for a `batch` below 1."""
    if batch < 1:
        raise UnsupportedError(f"batch: expected 1 row or more, got {batch}")
    return batches_of(graph, data, batch) if isinstance(data, Mapping) else data


def batches_of(graph: Graph, arrays: Mapping[str, NDArray[Any]], size: int) -> Iterator[Feeds]:
    """Yield views of `size` rows of all inputs at a time, the last ones fewer; none if the inputs have no rows.

    An array of rank 0 counts as 0 rows. DataError, at the first batch, unless each input has an array and all of them
    have the same number of rows.
    """
    inputs = [value.name for value in graph.inputs]
    if not arrays.keys() >= set(inputs):
        raise DataError(f"data: expected arrays {_names(inputs)}, got {_names(arrays) or 'none'}")
    rows = {name: len(arrays[name]) if np.ndim(arrays[name]) else 0 for name in inputs}
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise DataError(f"data: expected arrays with the same number of rows, got {counts}")
    for start in range(0, next(iter(rows.values()), 0), size):
        yield {name: arrays[name][start : start + size] for name in inputs}


def _names(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
