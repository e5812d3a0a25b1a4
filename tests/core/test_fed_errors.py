"""Invalid feeds raise FeedError; failures for every feed are errors of the model.

ONNX Runtime refuses each of these runs, too.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError, ModelError
from lathe.core.reference import interpret
from tests.core.small_models import model, theirs
from tests.onnx_runtime import REFUSALS


class Run(NamedTuple):
    """A model as text, and feeds that do not fit it."""

    signature: str
    body: str
    message: str
    fed: dict[str, Any]
    constants: str = ""


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def whole(*values: int) -> Any:
    return np.array(values, np.int64)


def one(value: int) -> Any:
    return np.array(value, np.int64)


_BOUNDS = "int64[1] zero = {0}, int64[1] one = {1}"
RUNS = {
    "Reshape to a shape that is fed": Run(
        "float[n] x, int64[2] s => float[a,b] y", "y = Reshape(x, s)", "cannot give", {"x": ones(6), "s": whole(4, 2)}
    ),
    "Reshape to a shape of the model": Run(
        "float[n] x => float[a,4] y", "y = Reshape(x, s)", "cannot give", {"x": ones(6)}, "int64[2] s = {-1, 4}"
    ),
    "Reshape to a shape that is computed": Run(
        "float[n,m] x => float[a,b] y",
        "s = Shape(x) h = Div(s, two) y = Reshape(x, h)",
        "cannot give",
        {"x": ones(3, 5)},
        "int64 two = {2}",
    ),
    "CumSum": Run("float[n,3] x, int64 a => float[n,3] y", "y = CumSum(x, a)", "axis", {"x": ones(2, 3), "a": one(5)}),
    "Expand": Run(
        "float[3] x, int64[2] s => float[a,b] y",
        "y = Expand(x, s)",
        "do not broadcast",
        {"x": ones(3), "s": whole(4, 2)},
    ),
    "Tile": Run("float[3] x, int64[1] s => float[a] y", "y = Tile(x, s)", "repeats is", {"x": ones(3), "s": whole(-1)}),
    "Slice": Run(
        "float[n,3] x, int64[1] s => float[b,c] y",
        "y = Slice(x, zero, one, zero, s)",
        "a step is 0",
        {"x": ones(2, 3), "s": whole(0)},
        _BOUNDS,
    ),
    "ReduceSum": Run(
        "float[n,3] x, int64[1] a => float[b] y",
        "y = ReduceSum <keepdims = 0> (x, a)",
        "axis 4",
        {"x": ones(2, 3), "a": whole(4)},
    ),
    "Squeeze": Run(
        "float[n,3] x, int64[1] a => float[b] y",
        "y = Squeeze(x, a)",
        "its extent is 3",
        {"x": ones(2, 3), "a": whole(1)},
    ),
    "TopK": Run(
        "float[n,3] x, int64[1] k => float[b,c] y, int64[b,c] i",
        "y, i = TopK(x, k)",
        "K is 5",
        {"x": ones(2, 3), "k": whole(5)},
    ),
    "OneHot": Run(
        "int64[n] x, int64 d => float[n,b] y",
        "y = OneHot(x, d, v)",
        "depth is -3",
        {"x": whole(1, 2), "d": one(-3)},
        "float[2] v = {0, 1}",
    ),
    "Resize to sizes": Run(
        "float[1,1,n,3] x, int64[4] s => float[1,1,b,c] y",
        "y = Resize(x, , , s)",
        "output would have shape",
        {"x": ones(1, 1, 2, 3), "s": whole(1, 1, -4, 4)},
    ),
    "Resize by scales": Run(
        "float[1,1,n,3] x, float[4] s => float[1,1,b,c] y",
        "y = Resize(x, , s)",
        "scale is -1",
        {"x": ones(1, 1, 2, 3), "s": np.float32([1, 1, -1, 2])},
    ),
    "MatMul": Run(
        "float[n,m] x, float[k,3] w => float[n,3] y",
        "y = MatMul(x, w)",
        "inner extents 4 and 5",
        {"x": ones(2, 4), "w": ones(5, 3)},
    ),
    "Add": Run(
        "float[n,m] x, float[k] w => float[n,q] y", "y = Add(x, w)", "not broadcast", {"x": ones(2, 4), "w": ones(5)}
    ),
    "Conv": Run(
        "float[1,c,n,m] x, float[2,3,1,1] w => float[1,2,n,m] y",
        "y = Conv(x, w)",
        "X has 2 channels",
        {"x": ones(1, 2, 4, 4), "w": ones(2, 3, 1, 1)},
    ),
    "in a branch": Run(
        "bool c, float[n] x => float[m] y",
        """y = If(c) <
            then_branch = a () => (float[m] r) { r = Identity(x) },
            else_branch = b () => (float[m] r) { r = Reshape(x, s) }>""",
        "cannot give",
        {"c": np.array(False), "x": ones(5)},
        "int64[2] s = {-1, 2}",
    ),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("new_shapes", ["wait", "background"])
@pytest.mark.parametrize("name", RUNS)
def test_invalid_feeds_raise_feed_error(name: str, new_shapes: str) -> None:
    run = RUNS[name]
    data = model(run.signature, run.body, run.constants)
    with pytest.raises(REFUSALS):
        theirs(data, run.fed)
    with lathe.compile(data, tune="off", new_shapes=new_shapes) as session, pytest.raises(FeedError, match=run.message):
        session.run(run.fed)


@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("MatMul", "Add", "Conv")])
def test_the_reference_raises_feed_error_too(name: str) -> None:
    run = RUNS[name]
    with pytest.raises(FeedError, match=run.message):
        interpret(lathe.load(model(run.signature, run.body, run.constants)), run.fed)


def test_a_block_of_size_zero_is_refused_as_a_feed() -> None:
    """ONNX Runtime does not run this model here: it would divide by zero."""
    data = model("float[1,4,4] x, int64[2] s, int64[2] b => float[1,c,h,w] y", "y = Col2Im(x, s, b)")
    with lathe.compile(data, tune="off") as session, pytest.raises(FeedError, match=r"block_shape is \[0, 2\]"):
        session.run({"x": ones(1, 4, 4), "s": whole(3, 3), "b": whole(0, 2)})


def test_a_failing_node_of_constants_is_an_error_of_the_model() -> None:
    """The branch with the node may never be taken, so compiling accepts the model."""
    body = """y = If(c) <
        then_branch = a () => (float[n] r) { r = Identity(x) },
        else_branch = b () => (float[n] r) {
            p = Constant <value = float[2,2] {1, 2, 3, 4}> () i = Constant <value = int64[1,2] {9, 9}> ()
            g = GatherND(p, i) r = Add(x, g) }>"""
    graph = lathe.load(model("bool c, float[n] x => float[n] y", body))
    np.testing.assert_array_equal(interpret(graph, {"c": np.array(True), "x": ones(2)})["y"], ones(2))
    with pytest.raises(ModelError, match=r"GatherND.*index 9 is out of range"):
        interpret(graph, {"c": np.array(False), "x": ones(2)})


@pytest.mark.parametrize("fed", [np.ones((1, 2), np.float32), [np.ones((1, 2), np.float32)], None, "x", 3])
def test_feeds_that_are_no_mapping_are_refused_with_the_expected_form(fed: Any) -> None:
    """ONNX Runtime refuses them as well, by an error of its bindings."""
    graph = lathe.load(model("float[n, 2] x => float[n, 2] y", "y = Add(x, x)"))
    expected = rf"expected a mapping from names to arrays, {{'x': array}}, got {type(fed).__name__}"
    with lathe.compile(graph, threads=1, tune="off") as session:
        for run in (session.run, partial(interpret, graph)):
            with pytest.raises(FeedError, match=expected):
                run(fed)
