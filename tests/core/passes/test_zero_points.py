"""Products of integers with zero points of every kind are exact, and compiled: against ONNX's reference evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import lathe
from tests.random_numbers import RNG

BYTES = {np.dtype(np.uint8): TensorProto.UINT8, np.dtype(np.int8): TensorProto.INT8}
LEFT = pytest.mark.parametrize("left", [np.uint8, np.int8])
RIGHT = pytest.mark.parametrize("right", [np.uint8, np.int8])


def whole_range(dtype: Any, *shape: int) -> Any:
    """Random bytes, both ends of the range among them."""
    limits = np.iinfo(dtype)
    values = RNG.integers(limits.min, limits.max + 1, shape).astype(dtype)
    values.flat[:2] = limits.min, limits.max
    return values


def random_zero_point(kind: str, dtype: Any, channels: int) -> Any:
    """No zero point, the least or the greatest number, or one for each channel."""
    limits = np.iinfo(dtype)
    kinds = {"none": None, "least": limits.min, "greatest": limits.max, "each": whole_range(dtype, channels)}
    return None if kinds[kind] is None else np.array(kinds[kind], dtype)


def model(op: str, fed: Mapping[str, Any], constants: Mapping[str, Any], **attrs: Any) -> onnx.ModelProto:
    """One product of x and w with the zero points among these."""
    names = [name if name in {**fed, **constants} else "" for name in ("x", "w", "zero", "point")]
    inputs = [
        helper.make_tensor_value_info(name, BYTES[each.dtype], ["n", *each.shape[1:]] if each.ndim else [])
        for name, each in fed.items()
    ]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], **attrs)],
        "g",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.INT32, None)],
        [numpy_helper.from_array(each, name) for name, each in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def check(op: str, x: Any, zero: Any, weight: Any, point: Any, known: bool, **attrs: Any) -> None:
    """The compiled operator and its reference give what ONNX's gives, for zero points that are constants or fed."""
    fed, constants = {"x": x}, {"w": weight, **({"point": point} if point is not None else {})}
    (constants if known else fed)["zero"] = zero
    proto = model(op, fed, constants, **attrs)
    (want,) = ReferenceEvaluator(proto).run(None, fed)
    np.testing.assert_array_equal(lathe.interpret(lathe.load(proto.SerializeToString()), fed)["y"], want)
    np.testing.assert_array_equal(compiled(proto, fed), want)


def compiled(proto: onnx.ModelProto, feeds: Mapping[str, Any]) -> Any:
    with lathe.compile(proto.SerializeToString(), threads=1, tune="off") as session:
        got = session.run(feeds)["y"]
        assert " 0 on the reference" in session.explain()
        return got


@pytest.mark.sample(7)
@LEFT
@RIGHT
@pytest.mark.parametrize("point", ["none", "least", "greatest", "each"])
@pytest.mark.parametrize("depth", [16, 19])
@pytest.mark.parametrize("known", [True, False])
def test_products(left: Any, right: Any, point: str, depth: int, known: bool) -> None:
    x, weight = whole_range(left, 5, 3, depth), whole_range(right, depth, 9)
    check("MatMulInteger", x, whole_range(left, 2)[1], weight, random_zero_point(point, right, 9), known)


@RIGHT
def test_a_batch_of_weights(right: Any) -> None:
    x, weight = whole_range(np.uint8, 2, 3, 4, 8), whole_range(right, 3, 8, 5)
    check("MatMulInteger", x, np.array(99, np.uint8), weight, whole_range(right, 3, 1, 5), known=False)


@pytest.mark.sample(4)
@LEFT
@RIGHT
@pytest.mark.parametrize("point", ["none", "least", "greatest"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("channels", "attrs"),
    [
        (3, {"pads": [1, 2, 0, 1], "strides": [2, 1]}),
        (8, {}),
        (8, {"auto_pad": "SAME_LOWER", "dilations": [2, 1]}),
        (16, {"group": 2, "pads": [1] * 4}),
        (6, {"group": 6, "pads": [1] * 4}),
    ],
)
def test_convolutions(left: Any, right: Any, point: str, known: bool, channels: int, attrs: dict[str, Any]) -> None:
    group = attrs.get("group", 1)
    x, weight = whole_range(left, 2, channels, 9, 8), whole_range(right, max(group, 4), channels // group, 3, 3)
    check("ConvInteger", x, whole_range(left, 2)[1], weight, random_zero_point(point, right, 1), known, **attrs)


@RIGHT
def test_a_zero_point_for_each_output_channel(right: Any) -> None:
    """ONNX's reference takes one alone, so each channel is a convolution of its own there."""
    x, weight, points = whole_range(np.uint8, 2, 8, 6, 6), whole_range(right, 3, 8, 3, 3), whole_range(right, 3)
    feeds = {"x": x, "zero": np.array(77, np.uint8)}
    got = compiled(model("ConvInteger", feeds, {"w": weight, "point": points}), feeds)
    for channel, point in enumerate(points):
        alone = model("ConvInteger", feeds, {"w": weight[channel : channel + 1], "point": np.array(point)})
        np.testing.assert_array_equal(got[:, channel : channel + 1], ReferenceEvaluator(alone).run(None, feeds)[0])
