"""Gradients through control flow: branches, loops with a length known only at run time, scans in both directions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.ops.opdef.terms import Writer
from tests.core.autodiff.cases import real
from tests.core.autodiff.harness import assert_gradients, scalar_head


def vector(size: Any = 3) -> TensorType:
    return TensorType(DType.FLOAT64, (size,))


NUMBER, TRUTH = TensorType(DType.INT64, ()), TensorType(DType.BOOL, ())


def branches() -> Graph:
    """x * y if c, else exp(x), with y captured by one branch only."""
    graph = Graph("branches")
    writer = Writer(graph)
    x, y, c = writer.input("x", vector()), writer.input("y", vector()), writer.input("c", TRUTH)
    then, other = Graph("then"), Graph("else")
    then.outputs = [(writer.nested(then).term(x.value) * y).value]
    other.outputs = [writer.nested(other).term(x.value).exp().value]
    graph.outputs = writer.emit("If", [c.value], {"then_branch": then, "else_branch": other})
    return graph


def loop() -> Graph:
    """v <- k * v + sin(v), m times; every v * v is scanned; k is captured."""
    graph = Graph("loop")
    writer = Writer(graph)
    x, k, m = writer.input("x", vector()), writer.input("k", vector()), writer.input("m", NUMBER)
    body = Graph("body")
    inner = writer.nested(body)
    inner.input("i", NUMBER)
    going, v = inner.input("going", TRUTH), inner.input("v", vector())
    following = v * inner.term(k.value) + v.op("Sin")
    body.outputs = [going.op("Identity").value, following.value, (following * v).value]
    graph.outputs = writer.emit("Loop", [m.value, None, x.value], {"body": body}, 2)
    return graph


def scan(reading: int, storing: int) -> Graph:
    graph = Graph("scan")
    writer = Writer(graph)
    x, k = writer.input("x", vector()), writer.input("k", vector())
    s = writer.input("s", TensorType(DType.FLOAT64, (3, symbol("t"))))
    body = Graph("body")
    inner = writer.nested(body)
    state, piece = inner.input("state", vector()), inner.input("piece", vector())
    following = state * piece + inner.term(k.value)
    body.outputs = [following.value, (following * piece).value]
    attrs: dict[str, Any] = {
        "body": body, "num_scan_inputs": 1, "scan_input_axes": (1,), "scan_output_axes": (1,),
        "scan_input_directions": (reading,), "scan_output_directions": (storing,),
    }  # fmt: skip
    graph.outputs = writer.emit("Scan", [x.value, s.value], attrs, 2)
    return graph


@pytest.mark.parametrize("chosen", [True, False])
def test_if(chosen: bool) -> None:
    assert_gradients(branches(), {"x": real(3), "y": real(3) + 4, "c": np.array(chosen)})


@pytest.mark.parametrize("trips", [0, 1, 4])
def test_loop(trips: int) -> None:
    assert_gradients(loop(), {"x": real(3), "k": real(3) / 2, "m": np.array(trips)})


@pytest.mark.parametrize("reading", [0, 1])
@pytest.mark.parametrize("storing", [0, 1])
def test_scan(reading: int, storing: int) -> None:
    assert_gradients(scan(reading, storing), {"x": real(3), "k": real(3) / 2, "s": real(3, 4)})


@pytest.mark.parametrize(("graph", "feeds"), [(loop(), {"m": np.array(3)}), (scan(0, 1), {"s": real(3, 4)})])
def test_second_order(graph: Graph, feeds: dict[str, Any]) -> None:
    feeds = {**feeds, "x": real(3), "k": real(3) / 2}
    head, output = scalar_head(graph)
    back = lathe.gradients(head, of=output, with_respect_to=["x"])
    back.outputs = back.outputs[1:]
    assert_gradients(back, feeds, tolerance=2e-5)


def test_a_loop_that_changes_a_shape_is_refused() -> None:
    graph = Graph("growing")
    writer = Writer(graph)
    x, m = writer.input("x", vector()), writer.input("m", NUMBER)
    body = Graph("body")
    inner = writer.nested(body)
    inner.input("i", NUMBER)
    going, v = inner.input("going", TRUTH), inner.input("v", vector(symbol("grown")))
    body.outputs = [going.op("Identity").value, v.op("Concat", v, axis=0).value]
    graph.outputs = writer.emit("Loop", [m.value, None, x.value], {"body": body})
    with pytest.raises(UnsupportedError, match="changes its type"):
        lathe.gradients(graph, of=graph.outputs[0].name, with_respect_to=["x"])
