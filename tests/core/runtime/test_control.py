"""Loops and branches in native code agree with the interpreter; explain() shows those that run on references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import lathe
import lathe.core.compiler.options
from lathe.core.errors import FeedError
from lathe.core.ir.build import Builder
from lathe.core.ir.closure import close_body, restore_captures
from lathe.core.ir.graph import Graph, Value, captures
from lathe.core.ir.types import DType, TensorType
from lathe.core.ir.verify import verify
from tests.core.frontends.models import floats, theirs

RECURRENT = """
    h, ys = Loop (M, go, h0) <body = b (int64 i, bool c, float[n,4] hin) => (bool again, float[n,4] hout, float[n,4] y)
    {
        p = MatMul(hin, W)
        q = Add(p, x)
        hout = Tanh(q)
        y = Mul(hout, hin)
        CONDITION
    }>
"""
KEEP = "again = Identity(c)"
STOP = "last = Constant <value_int = 2> ()\nagain = Less(i, last)"


def model(body: str, inputs: str, outputs: str, weights: str = "") -> bytes:
    text = f'<ir_version: 8, opset_import: ["" : 17]>\ng ({inputs}) => ({outputs})\n<{weights}>\n{{{body}}}'
    return bytes(onnx.parser.parse_model(text).SerializeToString())


W = f"float[4,4] W = {{{', '.join(str(x) for x in np.linspace(-0.5, 0.5, 16).round(3))}}}"


def recurrent(condition: str, limit: str, outputs: str = "float[n,4] h, float[m,n,4] ys") -> bytes:
    constants = f"{W}, int64 M = {{{limit}}}, bool go = {{1}}"
    return model(RECURRENT.replace("CONDITION", condition), "float[n,4] x, float[n,4] h0", outputs, constants)


def check(data: bytes, feeds: dict[str, Any], threads: int = 1, native: bool = True) -> dict[str, Any]:
    """The compiled model agrees with the interpreter; `native`: without a single node on the reference."""
    graph = lathe.load(data)
    with lathe.compile(graph, threads=threads) as session:
        assert (" 0 on the reference" in session.explain()) == native, session.explain()
        got, want = session.run(feeds), lathe.interpret(graph, feeds)
    for name, array in want.items():
        assert (got[name].shape, got[name].dtype) == (array.shape, array.dtype)
        np.testing.assert_allclose(got[name], array, 1e-5, 1e-6)
    return want


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 7, 0])
def test_a_loop_with_a_carried_value_and_a_scan_output(rows: int, threads: int) -> None:
    feeds = {"x": floats(rows, 4), "h0": floats(rows, 4, seed=1)}
    check(recurrent(KEEP, "5"), feeds, threads)


def test_requests_share_a_batch_if_the_body_keeps_rows_independent() -> None:
    data, x, h0 = recurrent(KEEP, "5", "float[n,4] h"), floats(3000, 4), floats(3000, 4, seed=1)
    with lathe.compile(data, threads=2) as session:
        assert session.batching.batchable, session.batching.reason
        together = session.run({"x": x, "h0": h0})["h"]
        apart = [session.run({"x": x[i : i + 1], "h0": h0[i : i + 1]})["h"][0] for i in (0, 7, 2999)]
    np.testing.assert_allclose(together[[0, 7, 2999]], apart, 1e-5, 1e-6)


def test_loops_agree_with_onnx_runtime() -> None:
    data, feeds = recurrent(KEEP, "5"), {"x": floats(3, 4), "h0": floats(3, 4, seed=1)}
    want = check(data, feeds)
    for name, array in theirs(onnx.load_from_string(data), feeds).items():
        np.testing.assert_allclose(want[name], array, 1e-5, 1e-6)


def test_no_iteration_leaves_the_initial_value() -> None:
    h0 = floats(2, 4, seed=1)
    want = check(recurrent(KEEP, "0", "float[n,4] h"), {"x": floats(2, 4), "h0": h0})
    np.testing.assert_array_equal(want["h"], h0)


def test_the_body_may_end_the_loop() -> None:
    """Iterations 0, 1 and 2, though ten are allowed."""
    feeds = {"x": floats(2, 4), "h0": floats(2, 4, seed=1)}
    ended = check(recurrent(STOP, "10", "float[n,4] h"), feeds)
    whole = check(recurrent(KEEP, "3", "float[n,4] h"), feeds)
    np.testing.assert_allclose(ended["h"], whole["h"], 1e-6)


def test_a_limit_and_a_condition_that_the_caller_gives() -> None:
    body = RECURRENT.replace("CONDITION", KEEP).replace("y = Mul(hout, hin)", "").replace(", float[n,4] y)", ")")
    data = model(body.replace("h, ys =", "h ="), "float[n,4] x, float[n,4] h0, int64 M, bool go", "float[n,4] h", W)
    x, h0 = floats(2, 4), floats(2, 4, seed=1)
    results = [check(data, {"x": x, "h0": h0, "M": np.array(m), "go": np.array(go)})["h"]
               for m, go in ((1, True), (4, True), (4, False), (-3, True))]  # fmt: skip
    assert np.abs(results[0] - results[1]).max() > 1e-3
    np.testing.assert_array_equal(results[2], h0)
    np.testing.assert_array_equal(results[3], h0)


def test_scan_outputs_of_an_unknown_number_of_steps_are_not_native() -> None:
    feeds = {"x": floats(2, 4), "h0": floats(2, 4, seed=1)}
    assert check(recurrent(STOP, "10"), feeds, native=False)["ys"].shape == (3, 2, 4)


def test_carried_values_may_swap_or_stay() -> None:
    body = """
        a, b, k, r = Loop (M, , x, y, x) <body = g2 (int64 i, bool c, float[n,3] p, float[n,3] q, float[n,3] s)
            => (bool again, float[n,3] q2, float[n,3] p2, float[n,3] s2, float[n,3] row)
        {
            again = Identity(c)
            q2 = Identity(q)
            p2 = Add(p, s)
            s2 = Identity(s)
            row = Identity(p)
        }>
    """
    outputs = "float[n,3] a, float[n,3] b, float[n,3] k, float[m,n,3] r"
    data = model(body, "float[n,3] x, float[n,3] y", outputs, "int64 M = {3}")
    check(data, {"x": floats(2, 3), "y": floats(2, 3, seed=1)})


@pytest.mark.parametrize("attrs", ["", ", scan_input_directions = [1]", ", scan_output_directions = [1]"])
def test_scan(attrs: str) -> None:
    body = f"""
        last, sums = Scan (s, x) <num_scan_inputs = 1{attrs}, body = b (float[2] old, float[2] next)
            => (float[2] new, float[2] row)
        {{
            new = Add(old, next)
            row = Mul(new, next)
        }}>
    """
    data = model(body, "float[2] s, float[n,2] x", "float[2] last, float[n,2] sums")
    for steps in (1, 5):
        check(data, {"s": floats(2), "x": floats(steps, 2, seed=1)})


@pytest.mark.parametrize("flag", [True, False])
def test_a_branch(flag: bool) -> None:
    body = """
        y, z = If (flag) <then_branch = t () => (float[n,4] a, float[n,4] b) {
            a = MatMul(x, W)
            b = Neg(a)
        }, else_branch = e () => (float[n,4] c, float[n,4] d) {
            c = Relu(x)
            d = Identity(x)
        }>
    """
    data = model(body, "float[n,4] x, bool flag", "float[n,4] y, float[n,4] z", W)
    check(data, {"x": floats(3, 4), "flag": np.array(flag)})


def test_a_branch_inside_a_loop_inside_a_loop() -> None:
    body = """
        y = Loop (M, , x) <body = outer (int64 i, bool c, float[n,4] u) => (bool ca, float[n,4] v) {
            ca = Identity(c)
            w = Loop (M, , u) <body = inner (int64 j, bool d, float[n,4] p) => (bool cb, float[n,4] q) {
                cb = Identity(d)
                odd = Less(j, i)
                q = If (odd) <then_branch = t () => (float[n,4] a) { a = MatMul(p, W) },
                              else_branch = e () => (float[n,4] b) { b = Add(p, x) }>
            }>
            v = Sub(w, u)
        }>
    """
    check(model(body, "float[n,4] x", "float[n,4] y", f"{W}, int64 M = {{3}}"), {"x": floats(2, 4)})


def test_data_that_a_kernel_of_the_body_refuses() -> None:
    body = """
        y = Loop (M, , x) <body = b (int64 i, bool c, float[4] u) => (bool ca, float[4] v) {
            ca = Identity(c)
            row = Gather(table, k)
            v = Add(u, row)
        }>
    """
    table = f"float[3,4] table = {{{', '.join(map(str, range(12)))}}}, int64 M = {{2}}"
    data = model(body, "float[4] x, int64 k", "float[4] y", table)
    check(data, {"x": floats(4), "k": np.array(2)})
    with lathe.compile(data, threads=1) as session, pytest.raises(FeedError, match="index out of range"):
        session.run({"x": floats(4), "k": np.array(3)})


def test_a_body_without_kernels_is_reported_as_fallback() -> None:
    body = """
        y = Loop (M, , x) <body = b (int64 i, bool c, float[4] u) => (bool ca, float[4] v) {
            ca = Identity(c)
            w = Det(square)
            v = Add(u, w)
        }>
    """
    data = model(body, "float[4] x, float[2,2] square", "float[4] y", "int64 M = {2}")
    with lathe.compile(data, threads=1) as session:
        assert "in its body, node 'w' (Det) runs on the reference: no compiled kernel for Det" in session.explain()
    check(data, {"x": floats(4), "square": floats(2, 2)}, native=False)


def test_an_artifact_holds_the_kernels_of_bodies(tmp_path: Path) -> None:
    data, feeds = recurrent(KEEP, "5"), {"x": floats(2, 4), "h0": floats(2, 4, seed=1)}
    graph = lathe.load(data)
    options = lathe.core.compiler.options.make_options("cpu", "float32", 1, 8, True, None)
    lathe.core.compiler.compile.compile_to(tmp_path / "model", graph, options)
    with lathe.load_compiled(tmp_path / "model") as session:
        np.testing.assert_allclose(session.run(feeds)["h"], lathe.interpret(graph, feeds)["h"], 1e-5, 1e-6)


def test_bodies_stand_alone_and_return() -> None:
    graph = lathe.load(recurrent(KEEP, "5"))
    body = graph.nodes[0].attrs["body"]
    assert isinstance(body, Graph)
    text, captured = str(body), captures(body)
    alone, outer = close_body(body, graph.constants)
    assert captures(alone) == [] and [value.name for value in outer] == ["x"]
    assert [array.shape for array in alone.constants.values()] == [(4, 4)]
    again = restore_captures(alone, outer)
    assert captures(again) == [value for value in captured if value not in graph.constants]
    assert str(body) == text


def test_captured_values_of_one_name_become_inputs_of_two_names() -> None:
    """They are values of two graphs around the body. `restore_captures` knows inputs by their place."""
    type_ = TensorType(DType.FLOAT32, (2,))
    first, second, fixed = Value("a", type_), Value("a", type_), Value("a", type_)
    body = Graph("body")
    build = Builder(body)
    body.outputs = [build("Add", build("Add", first, second), fixed)]
    alone, outer = close_body(body, {fixed: np.ones(2, np.float32)})
    verify(alone)
    assert [value.name for value in alone.inputs] == ["a", "a_2"] and outer == (first, second)
    assert captures(restore_captures(alone, outer)) == [first, second]


def test_a_loop_ends_with_the_first_index_that_is_refused() -> None:
    """The number of requested iterations does not matter."""
    body = """h = Loop (m, go, x) <body = b (int64 i, bool c, float[n,4] hin) => (bool again, float[n,4] hout)
    {
        again = Identity(c)
        hout = Gather <axis = 1> (hin, at)
    }>"""
    data = model(body, "int64 m, int64[4] at, float[n,4] x", "float[n,4] h", "bool go = {1}")
    feeds = {"m": np.array(1 << 62), "at": np.array([0, 1, 2, 9]), "x": np.zeros((2, 4), np.float32)}
    with lathe.compile(lathe.load(data), threads=1) as session:
        assert " 0 on the reference" in session.explain()
        with pytest.raises(FeedError, match="index out of range"):
            session.run(feeds)


WHILE = """
    xt = Transpose <perm = [1, 0, 2]> (x)
    xr = ReverseSequence <batch_axis = 1, time_axis = 0> (xt, lengths)
    shape = Shape(xt)
    steps = Gather(shape, first)
    stop = Cast <to = 6> (steps)
    some = Less(start, stop)
    k, h, last, weight, ys = Loop (M, some, start, h0, stop, W) <body = b (int64 i, bool c, int32 t, float[n,4] hin,
        int32 e, float[4,4] w) => (bool again, int32 next, float[n,4] hout, int32 e2, float[4,4] w2, float[n,4] y)
    {
        xi = Gather(xr, t)
        p = MatMul(hin, w)
        q = Add(p, xi)
        hout = Tanh(q)
        next = Add(t, one)
        left = Cast <to = 1> (next)
        right = Cast <to = 1> (e)
        again = Less(left, right)
        e2 = Identity(e)
        w2 = Identity(w)
        y = Identity(hout)
    }>
    z = Transpose <perm = [1, 0, 2]> (ys)
"""


def test_a_while_loop_that_counts_steps_is_native_for_each_number_of_them() -> None:
    """TensorFlow's form of a recurrent layer: weights are carried, and the condition sets the number of steps."""
    lengths = "counts = Shape <start = 1, end = 2> (x)\nrows = Shape <end = 1> (x)\nlengths = Expand(counts, rows)"
    constants = f"{W}, int64 M = {{9223372036854775807}}, int32 start = {{0}}, int32 one = {{1}}, int64 first = {{0}}"
    data = model(lengths + WHILE, "float[n,t,4] x, float[n,4] h0", "float[n,4] h, float[n,k,4] z", constants)
    with lathe.compile(data, threads=1, new_shapes="wait", tune="off") as session:
        for rows, steps in ((2, 3), (1, 5), (3, 1), (5, 3)):
            feeds = {"x": floats(rows, steps, 4), "h0": floats(rows, 4)}
            got = session.run(feeds)
            for name, want in theirs(onnx.load_from_string(data), feeds).items():
                np.testing.assert_allclose(got[name], want, 1e-5, 1e-6)
        assert "FALLBACK" not in session.explain()
