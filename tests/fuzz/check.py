"""The property of all inputs: any bytes are refused with a `ModelError`, or load as a graph that works."""

from __future__ import annotations

import math
import zlib
from typing import Any, TypeAlias

import numpy as np

import lathe
from lathe.core.errors import FeedError, LatheError, ModelError
from lathe.core.frontends.onnx import load
from lathe.core.ir.graph import Graph
from lathe.core.ir.text import Weights, parse_graph, print_graph
from lathe.core.ir.types import TensorType
from lathe.core.ir.verify import verify
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_graph

Feeds: TypeAlias = dict[str, Any]

_INTERPRETED = 4  # one in this many loaded models is run ...
_COMPILED = 40  # ... and one in this many is compiled
_MOST_BYTES = 1 << 24  # of the values of a model that is run


class Wrong(Exception):
    """A loaded model gives wrong results."""


def check(data: bytes) -> str:
    """The outcome of a model: "refused", "loaded" or "ran". Any exception is a bug."""
    try:
        graph = load(data)
    except ModelError as error:
        if isinstance(error.__cause__, MemoryError | RecursionError):
            raise Wrong(f"refused only after {error.__cause__!r}: {error}") from error
        return "refused"
    verify(graph)
    _round_trip(graph)
    draw = zlib.crc32(data)
    feeds = _feeds(graph) if draw % _INTERPRETED == 0 or draw % _COMPILED == 1 else None
    expected = _outcome(lambda: lathe.interpret(graph, feeds)) if feeds is not None else None
    if draw % _COMPILED == 1:
        _compile(graph, feeds, expected)
    return "loaded" if feeds is None else "ran"


def _round_trip(graph: Graph) -> None:
    """Check that the graph survives printing and parsing, as the server passes models between processes."""
    weights = Weights()
    text = print_graph(graph, weights)
    again = parse_graph(text, weights.tobytes())
    infer_graph(again)
    verify(again)
    if print_graph(again, Weights()) != text:
        raise Wrong("the text of the graph reads back as another graph")


def _outcome(run: Any) -> dict[str, Any] | LatheError:
    try:
        result: dict[str, Any] = run()
    except (ModelError, FeedError) as error:
        return error
    return result


def _compile(graph: Graph, feeds: Feeds | None, expected: Any) -> None:
    """Check that compiling succeeds or raises ModelError, and that a run gives the results of the interpreter."""
    try:
        session = lathe.compile(graph, threads=1, max_batch=2, tune="off")
    except ModelError:
        return
    with session:
        got = _outcome(lambda: session.run(feeds)) if feeds is not None else None
    if isinstance(expected, dict) and isinstance(got, dict) and _is_pure(graph):
        _compare(got, expected)


def _feeds(graph: Graph) -> Feeds | None:
    """Small arrays for the inputs, with 2 for symbols; None if the types are unknown or large."""
    if not _is_small(graph):
        return None
    rng, feeds = np.random.default_rng(0), {}
    for value in graph.inputs:
        type_ = value.type
        if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype.numpy.kind == "O":
            return None
        feeds[value.name] = rng.integers(0, 3, _shape(type_)).astype(type_.dtype.numpy)
    return feeds


def _is_small(graph: Graph) -> bool:
    tensors = [value.type for value in graph.values() if isinstance(value.type, TensorType)]
    sizes = [math.prod(_shape(type_)) * type_.dtype.itemsize for type_ in tensors if type_.shape is not None]
    inner = [body for node in graph.nodes for body in node.subgraphs]
    return sum(sizes) <= _MOST_BYTES and min(sizes, default=0) >= 0 and all(map(_is_small, inner))


def _shape(type_: TensorType) -> tuple[int, ...]:
    return type_.evaluate(dict.fromkeys(type_.symbols, 2))


def _is_pure(graph: Graph) -> bool:
    """True if the graph has no random operator."""
    return all(registry.get(node.op).pure and all(map(_is_pure, node.subgraphs)) for node in graph.nodes)


def _compare(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, want in expected.items():
        mine = got[name]
        if isinstance(want, np.ndarray) and want.dtype.kind == "f":
            np.testing.assert_allclose(mine, want, rtol=1e-3, atol=1e-3, err_msg=name)
        elif isinstance(want, np.ndarray):
            np.testing.assert_array_equal(mine.shape, want.shape, err_msg=name)
