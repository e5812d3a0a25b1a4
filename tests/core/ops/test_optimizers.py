"""Training steps against ONNX's own reference, over several updates of two parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import lathe
from lathe.core.errors import ModelError

DOMAIN = "ai.onnx.preview.training"
STATES = {"Adagrad": 1, "Momentum": 1, "Adam": 2}
MOMENTUM = {"alpha": 0.9, "beta": 0.8, "norm_coefficient": 0.01}


def model(op: str, attrs: dict[str, Any], count: int = 2) -> onnx.ModelProto:
    names = [f"{kind}{i}" for kind in ("x", "g", "s", "t")[: 2 + STATES[op]] for i in range(count)]
    results = [f"new_{name}" for name in names if not name.startswith("g")]
    infos = [
        helper.make_tensor_value_info("R", TensorProto.FLOAT, []),
        helper.make_tensor_value_info("T", TensorProto.INT64, []),
        *(helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in names),
    ]
    node = helper.make_node(op, ["R", "T", *names], results, domain=DOMAIN, **attrs)
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in results]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(helper.make_graph([node], "step", infos, outputs), opset_imports=imports, ir_version=8)


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("Adagrad", {"decay_factor": 0.1, "epsilon": 1e-3, "norm_coefficient": 0.05}),
        ("Adam", {"alpha": 0.9, "beta": 0.99, "epsilon": 1e-4, "norm_coefficient": 0.1, "norm_coefficient_post": 0.02}),
        ("Momentum", {**MOMENTUM, "mode": "standard"}),
        ("Momentum", {**MOMENTUM, "mode": "nesterov"}),
    ],
)
def test_steps(op: str, attrs: dict[str, Any], count: int) -> None:
    proto, rng = model(op, attrs), np.random.default_rng(1)
    feeds = {info.name: rng.uniform(0.1, 1, 3).astype(np.float32) for info in proto.graph.input[2:]}
    feeds |= {"R": np.array(0.1, np.float32), "T": np.array(count)}
    ours = lathe.interpret(lathe.load(proto.SerializeToString()), feeds)
    for value, expected in zip(ours.values(), ReferenceEvaluator(proto).run(None, feeds), strict=True):
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, expected, 1e-5)


def test_refuses_an_incomplete_group() -> None:
    proto = model("Adam", {})
    proto.graph.node[0].input.pop()
    with pytest.raises(ModelError, match="expected a multiple of 4"):
        lathe.load(proto.SerializeToString())
