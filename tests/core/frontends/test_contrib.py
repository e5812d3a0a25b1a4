"""Contributed operators against ONNX Runtime, which has them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from core.errors import UnsupportedError
from core.frontends.onnx import load
from tests.core.frontends.models import assert_agree, floats, model


def contributed(op: str, inputs: list[str], outputs: list[str], **attrs: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, domain="com.microsoft", **attrs)


NODES = [
    contributed("Gelu", ["x"], ["y"]),
    contributed("BiasGelu", ["x", "a"], ["y"]),
    contributed("FastGelu", ["x", "a"], ["y"]),
    contributed("FastGelu", ["x"], ["y"]),
    contributed("QuickGelu", ["x"], ["y"], alpha=1.5),
    contributed("SkipLayerNormalization", ["x", "s", "a", "b"], ["y"], epsilon=1e-5),
    contributed("SkipLayerNormalization", ["x", "s", "a", "b", "c"], ["y", "", "", "z"]),
    contributed("SkipSimplifiedLayerNormalization", ["x", "s", "a", "b"], ["y", "", "", "z"], epsilon=1e-5),
    contributed("FusedMatMul", ["x", "s"], ["y"], transB=1, alpha=0.5),
    contributed("FusedMatMul", ["x", "s"], ["y"], transA=1),
]


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.op_type)
def test_like_onnx_runtime(node: onnx.NodeProto) -> None:
    constants = {"s": floats(2, 3, 8, seed=1), **{name: floats(8, seed=i) for i, name in enumerate("abc", start=2)}}
    outputs = [name for name in node.output if name]
    proto = model([node], {"x": [2, 3, 8]}, outputs, constants=constants, domains={"com.microsoft": 1})
    assert_agree(proto, {"x": floats(2, 3, 8)}, 1e-4)


def test_others_are_refused_by_name() -> None:
    node = contributed("NhwcMaxPool", ["x"], ["y"], kernel_shape=[2])
    with pytest.raises(UnsupportedError, match=r"operator NhwcMaxPool of domain 'com\.microsoft', opset 1 is not"):
        load(model([node], {"x": [1, 2, 2, 1]}, domains={"com.microsoft": 1}).SerializeToString())
    transposed = contributed("FusedMatMul", ["x", "c"], ["y"], transBatchA=1)
    constants = {"c": np.ones((2, 2, 2), np.float32)}
    with pytest.raises(UnsupportedError, match="transposes its batch axes"):
        load(
            model([transposed], {"x": [2, 2, 2]}, constants=constants, domains={"com.microsoft": 1}).SerializeToString()
        )
