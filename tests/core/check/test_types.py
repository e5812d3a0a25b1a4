"""Type inference over a rewritten graph keeps all shapes that the passes knew."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from lathe.core.check.types import check_types
from lathe.core.errors import VerifyError
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph
from lathe.core.ops.tensor.creation import Iota
from lathe.core.passes.pipeline import optimize
from tests.core.small_models import assert_like_onnx_runtime, model, normal

# The shape of v is known only at run time; in its computed target shape the batch size becomes an Iota.
PRODUCT = model(
    "float[N,3,6,6] x, int64[4] shape => float[] y",
    "m = Expand (one, shape)  n = Shape <start = 0, end = 1> (x)  d = Shape <start = 3> (m)"
    "  s = Concat <axis = 0> (n, k, d)  v = Reshape (m, s)  y = MatMul (x, v)",
    "float[1,1,1,1] one = {1}, int64[2] k = {3, 6}",
)
FEEDS = {"x": normal(2, 3, 6, 6), "shape": np.array([2, 3, 6, 5])}


def test_a_shape_from_the_batch_size_is_known_after_the_passes() -> None:
    assert_like_onnx_runtime(PRODUCT, FEEDS)


# The bounds are sums of an extent that only a run shows; fused into one node they are still known to lie within it.
BOUNDS = model(
    "float[N,6] x, int64[1] last, int64[2] v => int64[] y",
    "p = Slice (x, six, last, one)  s = Shape (p)  n = Gather <axis = 0> (s, zero)  a = Add (n, two)  b = Mul (a, two)"
    "  f = Shape (v)  y = Slice (v, f, b, zero)",
    "int64[1] six = {6}, int64[1] one = {1}, int64[1] zero = {0}, int64[1] two = {2}",
)
# The start of the slice is data dependent; the other axes are still known.
BESIDE = model(
    "float[N,4,6] x, int64[1] first => float[a,b,c] y",
    "s = Shape <start = 0, end = 1> (x)  m = Mul (first, two)  e = Sub (s, m)  c = Slice (x, e, s, zero)  y = Relu (c)",
    "int64[1] two = {2}, int64[1] zero = {0}",
)


def test_fused_shape_arithmetic_is_known_after_the_passes() -> None:
    feeds = {"x": normal(3, 6), "last": np.array([6]), "v": np.array([4, 5])}
    assert_like_onnx_runtime(BOUNDS, feeds, {**feeds, "x": normal(1, 6), "last": np.array([0])})


def test_a_slice_with_data_dependent_bounds_keeps_other_extents() -> None:
    (cut,) = [node for node in lathe.load(BESIDE).nodes if node.op == "Slice"]
    assert str(cut.output.type).endswith(",4,6]")
    assert_like_onnx_runtime(BESIDE, {"x": normal(5, 4, 6), "first": np.array([2])})


def test_the_rewritten_graph_keeps_its_types() -> None:
    graph = rewritten()
    before = types(graph)
    check_types(graph)
    assert types(graph) == before


def test_a_pass_that_hides_a_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = rewritten()
    monkeypatch.setattr(Iota, "known", lambda op, view: None)
    with pytest.raises(VerifyError, match=r"inference refuses the rewritten graph: .* cannot multiply"):
        check_types(graph)


def test_a_lost_extent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = rewritten()
    graph.nodes.pop()  # without the product, whose operator would refuse the shape
    graph.outputs = [graph.nodes[-1].output]
    monkeypatch.setattr(Iota, "known", lambda op, view: None)
    with pytest.raises(VerifyError, match=r"'v' \(Reshape\) is float32\[n,3,6,_m_d3\], and inference says float32"):
        check_types(graph)


def rewritten() -> Graph:
    return optimize(lathe.load(PRODUCT).clone({"N": symbol("n")}))[0]


def types(graph: Graph) -> list[str]:
    return [str(value.type) for node in graph.nodes for value in node.outputs]
