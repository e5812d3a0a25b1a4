"""Checks gradients against central differences in float64, the oracle of all autodiff tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lathe.core.autodiff import gradients
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import TensorType
from lathe.core.ops.opdef.terms import Writer
from lathe.core.reference import interpret

EPSILON = 1e-6


def scalar_head(graph: Graph, seed: int = 0) -> tuple[Graph, str]:
    """A graph whose only output is a weighted sum of all real outputs, and that output's name.

    The weights are random, so that permuted elements change the result.
    """
    copy = graph.clone()
    writer, rng = Writer(copy), np.random.default_rng(seed)
    total = None
    for value in copy.outputs:
        if isinstance(value.type, TensorType) and value.dtype.is_float:
            term = writer.term(value)
            wave = term * float(rng.uniform(0.5, 1.5)) + (term * float(rng.uniform(0.5, 1.5))).op("Sin")
            part = wave.sum(keepdims=False)
            total = part if total is None else total + part
    assert total is not None, "the graph has no real output"
    copy.outputs = [total.value]
    return copy, total.value.name


def differences(graph: Graph, output: str, name: str, feeds: Mapping[str, Any]) -> Any:
    """The central differences of a scalar output with respect to one input."""
    x = feeds[name]
    found = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[at] += sign * EPSILON
            ends.append(interpret(graph, {**feeds, name: moved})[output])
        found[at] = (ends[0] - ends[1]) / (2 * EPSILON)
    return found


def assert_gradients(
    graph: Graph, feeds: Mapping[str, Any], wanted: Sequence[str] | None = None, tolerance: float = 2e-6
) -> Graph:
    """Check the gradients with respect to all real inputs (or those named); returns the graph that computes them."""
    head, output = scalar_head(graph)
    real = [v.name for v in graph.inputs if isinstance(v.type, TensorType) and v.dtype.is_float]
    names = list(wanted) if wanted is not None else real
    back = gradients(head, of=output, with_respect_to=names)
    results = interpret(back, feeds)
    for name, value in zip(names, back.outputs[1:], strict=True):
        found, expected = results[value.name], differences(head, output, name, feeds)
        scale = max(1.0, float(np.abs(expected).max(initial=0)))
        np.testing.assert_allclose(found, expected, tolerance, tolerance * scale, err_msg=f"gradient of {name}")
    return back
