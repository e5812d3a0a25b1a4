"""Nodes that fit only some batch sizes: their kernels run if the sizes are equal, otherwise code for one size runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import lathe
from lathe.core.compiler.compile import compile_to
from lathe.core.compiler.options import make_options
from lathe.core.errors import FeedError, LatheError
from tests.core.small_models import assert_like_onnx_runtime, model, normal

SUM = model("float[n,4] x, float[2,m,4] t => float[2,k,4] y", "s = Add(x, t) y = Tanh(s)")


def _layer() -> bytes:
    """One step of an LSTM, whose states have a batch dimension of their own, as silero-vad has it."""
    w, r = (helper.make_tensor(name, TensorProto.FLOAT, shape, normal(*shape).ravel(), raw=False)
            for name, shape in (("w", (1, 12, 4)), ("r", (1, 12, 3))))  # fmt: skip
    zero = helper.make_tensor("zero", TensorProto.INT64, [1], [0])
    nodes = [
        helper.make_node("Unsqueeze", ["x", "zero"], ["step"]),
        helper.make_node("LSTM", ["step", "w", "r", "", "", "h", "c"], ["", "y", "cell"], hidden_size=3),
    ]
    inputs = [_tensor("x", ["n", 4]), _tensor("h", [1, "m", 3]), _tensor("c", [1, "m", 3])]
    outputs = [_tensor("y", [1, "k", 3]), _tensor("cell", [1, "k", 3])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [w, r, zero])
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()
    )


def _tensor(name: str, shape: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _states(n: int) -> dict[str, Any]:
    return {"x": normal(n, 4), "h": normal(1, n, 3), "c": normal(1, n, 3)}


def test_a_layer_with_a_separate_state_batch_runs_on_its_kernel() -> None:
    data = _layer()
    assert_like_onnx_runtime(data, *map(_states, (3, 1, 4)))
    with lathe.compile(data, tune="off", new_shapes="wait") as session:
        session.run(_states(3))
        assert "FALLBACK" not in session.explain()
        assert "dynamic-shape code serves" in session.explain()
        with pytest.raises(FeedError, match=r"\(LSTM\)|\(RecurrentSteps\)"):
            session.run({**_states(3), "x": normal(2, 4)})
        session.run(_states(3))


def test_sizes_that_broadcast_and_sizes_that_do_not() -> None:
    with lathe.compile(SUM, tune="off", new_shapes="wait") as session:
        for n, m in ((3, 3), (1, 3), (2, 1), (3, 3)):
            x, t = normal(n, 4), normal(2, m, 4)
            np.testing.assert_allclose(session.run({"x": x, "t": t})["y"], np.tanh(x + t), 1e-5, 1e-6)
        assert "FALLBACK" not in session.explain()
        with pytest.raises(FeedError, match=r"\(Add\)"):
            session.run({"x": normal(2, 4), "t": normal(2, 3, 4)})


def test_the_first_run_waits_for_its_code() -> None:
    """The first run waits as for any model, because the code for all batch sizes does not fit."""
    with lathe.compile(SUM, tune="off") as session:
        session.run({"x": normal(3, 4), "t": normal(2, 3, 4)})
        assert "n=3" in session.explain()
        assert "reference runner" not in session.explain()


@pytest.mark.slow
def test_from_an_artifact(tmp_path: Path) -> None:
    path = tmp_path / "model.lathe"
    fixed = model("float[n,4] x => float[2,3,4] y", "y = Add(x, t)", "float[2,3,4] t = {" + ", ".join("1" * 24) + "}")
    compile_to(path, lathe.load(fixed), make_options(cache_dir=tmp_path, tune="off"))
    with lathe.load_compiled(path, cache_dir=tmp_path) as session:
        for n in (3, 1):
            want = np.broadcast_to(normal(n, 4) + np.float32(1), (2, 3, 4))
            np.testing.assert_array_equal(session.run({"x": normal(n, 4)})["y"], want)
        with pytest.raises(FeedError, match=r"\(Add\)"):
            session.run({"x": normal(2, 4)})
        assert "FALLBACK" not in session.explain()


def test_a_branch_that_never_fits_has_no_influence() -> None:
    """Only the other branch counts: one code serves all batch sizes."""
    wrong = "else_branch = g () => (float[n,k] r) { r = MatMul(x, v) }"
    right = "then_branch = h () => (float[n,j] r) { r = MatMul(x, w) }"
    numbers = "float[4,1] w = {1, 2, 3, 4}, float[3,1] v = {1, 2, 3}"
    data = model("float[n,c] x, bool p => float[n,m] y", f"y = If(p) <{right}, {wrong}>", numbers)
    with lathe.compile(data, tune="off") as session:
        for n in (2, 5):
            session.run({"x": normal(n, 4), "p": np.array(True)})
        assert "every batch size" not in session.explain()


def test_a_slice_that_is_too_short_for_some_batches() -> None:
    """For nine rows and more the extent 8 - n would be below 0: Expand refuses it, here as in ONNX Runtime."""
    shape = "s = Size (x)  d = Sub (eight, s)  t = Concat <axis = 0> (d, one)"
    body = f"{shape}  e = Expand (x, t)  y = Slice (e, zero, one, zero)"
    constants = "int64[1] eight = {8}, int64[1] one = {1}, int64[1] zero = {0}"
    data = model("float[n] x => float[a,b] y", body, constants)
    assert_like_onnx_runtime(data, {"x": normal(7)}, {"x": normal(1)})
    with lathe.compile(data, tune="off") as session, pytest.raises(LatheError, match="Expand"):
        session.run({"x": normal(9)})
