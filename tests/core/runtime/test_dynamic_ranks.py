"""Inputs of undeclared rank: the first run of each rank compiles for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import lathe
from lathe.core.errors import FeedError
from tests.core.onnx_writer import OnnxWriter
from tests.core.small_models import normal
from tests.onnx_runtime import plain_session

FLOAT = TensorProto.FLOAT


def products() -> onnx.ModelProto:
    """Two products over the last axis of an input without a declared shape."""
    w = OnnxWriter(2)
    hidden = w.op("Relu", w.op("MatMul", "x", w.weight(16, 8)))
    w.op("MatMul", hidden, w.weight(8, 4), name="y")
    return finished(w)


def pictures() -> onnx.ModelProto:
    w = OnnxWriter(3)
    w.op("GlobalAveragePool", w.op("Relu", w.op("Conv", "x", w.weight(4, 3, 3, 3), pads=[1] * 4)), name="y")
    return finished(w)


def finished(w: OnnxWriter) -> onnx.ModelProto:
    ports = [helper.make_tensor_value_info(name, FLOAT, None) for name in "xy"]
    graph = helper.make_graph(w.nodes, "ranks", ports[:1], ports[1:], w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def agree(model: onnx.ModelProto, session: lathe.Session, x: np.ndarray) -> None:
    [want] = plain_session(model.SerializeToString()).run(None, {"x": x})
    got = session.run({"x": x})["y"]
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5)


def test_each_rank_is_compiled(tmp_path: Path) -> None:
    model = products()
    for _ in range(2):
        with lathe.compile(model.SerializeToString(), threads=1, tune="off", cache_dir=tmp_path) as session:
            for shape in [(3, 16), (2, 3, 16), (1, 16), (16,), (2, 1, 5, 16), (7, 3, 16)]:
                agree(model, session, normal(*shape))
            assert session.settle(60)
            text = session.explain()
            for rank in (1, 2, 3, 4):
                assert "FALLBACK" not in text.split(f"for x of rank {rank}:")[1].split("for x of rank")[0]


def test_more_ranks_than_the_cache_holds() -> None:
    model = products()
    with lathe.compile(lathe.load(model.SerializeToString()), threads=1, tune="off") as session:
        for rank in (2, 3, 4, 5, 6, 7, 2):
            agree(model, session, normal(*[2] * (rank - 1), 16))
        assert session.explain().count("for x of rank") == 4


@pytest.mark.parametrize("shape", [(), (3, 16), (2, 3, 8)])
def test_an_invalid_rank_is_refused_each_time(shape: tuple[int, ...]) -> None:
    model = pictures()
    with lathe.compile(lathe.load(model.SerializeToString()), threads=1, tune="off") as session:
        for _ in range(2):
            with pytest.raises(FeedError):
                session.run({"x": normal(*shape)})
        agree(model, session, normal(2, 3, 8, 8))
        agree(model, session, normal(1, 3, 5, 9))
        with pytest.raises(FeedError):
            session.run({"x": normal(1, 4, 5, 9)})
        with pytest.raises(FeedError, match="'x' is missing"):
            session.run({})
