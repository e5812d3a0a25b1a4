"""Which computations of selected rows are extended to all rows, and which stay as they are."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from lathe.core.frontends.onnx import load
from lathe.core.ir.graph import Graph
from lathe.core.passes.lowering.masked_rows import SelectedRows
from lathe.core.passes.pipeline import Options, required_passes, run_passes
from tests.core.small_models import model, theirs, untyped

SIGNATURE = "float[b,s,4] x, int64[b] group => float[b,s,4] y"
CONSTANTS = (
    "int64 one = {1}, int64[1] first = {0}, float half = {0.5}, float zero = {0}, float[4,4] w = "
    "{0.5, -1, 2, 0.25, 1, 0.5, -0.5, 1, -1, 0.25, 1, 2, 0.75, 1, -2, 0.5}, float[4] bias = {0.5, 1, -1, 2}"
)
SELECT = (
    "m = Equal(group, one) n = NonZero(m) i = Transpose<perm = [1, 0]>(n) r = GatherND(x, i) "
    "shape = Shape(x) zeros = Expand(zero, shape)"
)
WRITE = 'y = ScatterND<reduction = "%s">(%s, i, f)'
LINEAR = "p = MatMul(r, w) f = Add(p, bias)"


def written(function: str, base: str = "zeros", reduction: str = "none") -> bytes:
    return untyped(model(SIGNATURE, f"{SELECT} {function} {WRITE % (reduction, base)}", CONSTANTS))


def rewritten(data: bytes, step: SelectedRows) -> Graph:
    """The model after the passes: computations of selected rows are extended to all rows where that is allowed."""
    return run_passes(load(data), [*required_passes(Options()), step])[0]


def given(rows: int, length: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(rows).standard_normal((rows, length, 4)).astype(np.float32)
    return {"x": x, "group": np.arange(rows) % 3}


@pytest.mark.parametrize("reduction", ["none", "add"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_other_rows_hold_has_no_effect(reduction: str, value: float) -> None:
    data = written(LINEAR, reduction=reduction)
    with lathe.compile(lathe.load(data), tune="off", threads=1) as session:
        feeds = given(5, 3)
        feeds["x"][feeds["group"] != 1] = value
        np.testing.assert_allclose(session.run(feeds)["y"], theirs(data, feeds)["y"], 1e-5, 1e-5)
        assert "FALLBACK" not in session.explain()


@pytest.mark.parametrize(
    "function",
    [
        "f = Softmax<axis = 0>(r)",
        "mean = ReduceMean(r, first) f = Sub(r, mean)",
        "h = Cast<to = 1>(i) q = Mul(h, half) j = Cast<to = 7>(q) f = GatherND(x, j)",  # rows at computed positions
        "a = Abs(r) c = Cast<to = 7>(a) e = Gather(bias, c) f = Mul(e, r)",  # index is out of range for other rows
    ],
)
def test_what_mixes_rows_or_may_refuse_them_is_left(function: str) -> None:
    data = written(function, "x")
    assert any(node.op == "NonZero" for node in rewritten(data, SelectedRows()).nodes)
    feeds = given(4, 3)
    feeds["x"] = np.clip(feeds["x"], -1, 1)
    feeds["x"][feeds["group"] != 1] *= 100
    with lathe.compile(lathe.load(data), tune="off", threads=1) as session:
        np.testing.assert_allclose(session.run(feeds)["y"], theirs(data, feeds)["y"], 1e-5, 1e-5)


def test_many_functions_that_take_long_are_left() -> None:
    groups = [
        f"m{k} = Equal(group, n{k}) z{k} = NonZero(m{k}) i{k} = Transpose<perm = [1, 0]>(z{k}) "
        f"r{k} = GatherND(x, i{k}) f{k} = MatMul(r{k}, w) y{k} = ScatterND({f'y{k - 1}' if k else 'x'}, i{k}, f{k})"
        for k in range(3)
    ]
    numbers = ", ".join(f"int64 n{k} = {{{k}}}" for k in range(3))
    data = untyped(model(SIGNATURE, f"{' '.join(groups)} y = Identity(y2)", f"{CONSTANTS}, {numbers}"))
    for most, left in ((48, 0), (47, 3)):  # 16 multiplications each
        found = rewritten(data, SelectedRows(most_work=most))
        assert sum(node.op == "NonZero" for node in found.nodes) == left


def test_a_row_that_is_written_at_several_places_keeps_the_last_one() -> None:
    body = (
        "m = Equal(choice, one) n = NonZero(m) i = Transpose<perm = [1, 0]>(n) t = Slice(i, first, second, second) "
        "r = GatherND(x, t) e = GatherND(weight, i) ones = Unsqueeze(e, second) f = Mul(r, ones) y = ScatterND(x, t, f)"
    )
    signature = "float[b,4] x, int64[b,3] choice, float[b,3] weight => float[b,4] y"
    data = untyped(model(signature, body, "int64 one = {1}, int64[1] first = {0}, int64[1] second = {1}"))
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal((6, 4)).astype(np.float32),
        "choice": rng.integers(0, 3, (6, 3)),
        "weight": rng.standard_normal((6, 3)).astype(np.float32),
    }
    assert (feeds["choice"] == 1).sum(1).max() > 1
    with lathe.compile(lathe.load(data), tune="off", threads=1) as session:
        np.testing.assert_allclose(session.run(feeds)["y"], theirs(data, feeds)["y"], 1e-6, 1e-6)
        assert session.description.batching.batchable and "FALLBACK" not in session.explain()
