"""Old operator forms keep their meaning. ONNX Runtime runs opset 7 and up; for older ones NumPy is the oracle."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.frontends.onnx import load
from lathe.core.frontends.opsets import adapter_versions
from lathe.core.ops.opdef import registry
from tests.core.frontends.models import assert_agree, floats, model, ours

N = helper.make_node
X = floats(2, 3, 4, 5)
NONE = np.zeros(0, np.float32)

# opset, nodes, constants
WITH_ONNX_RUNTIME: dict[str, tuple[int, list[onnx.NodeProto], dict[str, Any]]] = {
    "Squeeze-1": (11, [N("Squeeze", ["c"], ["s"], axes=[0]), N("Add", ["x", "s"], ["y"])], {"c": floats(1, 4, 5)}),
    "Unsqueeze-1": (11, [N("Unsqueeze", ["x"], ["y"], axes=[0, 4])], {}),
    "ReduceSum-1": (11, [N("ReduceSum", ["x"], ["y"], axes=[1, -1], keepdims=0)], {}),
    "ReduceMean-13": (13, [N("ReduceMean", ["x"], ["y"], axes=[2])], {}),
    "ReduceMax-11 over all": (11, [N("ReduceMax", ["x"], ["y"])], {}),
    "ReduceL2-13": (17, [N("ReduceL2", ["x"], ["y"], axes=[-2])], {}),
    "Clip-6": (10, [N("Clip", ["x"], ["y"], min=-0.5, max=0.25)], {}),
    "Clip-6 above only": (6, [N("Clip", ["x"], ["y"], max=0.25)], {}),
    "Softmax-1": (9, [N("Softmax", ["x"], ["y"])], {}),
    "Softmax-11 axis 2": (11, [N("Softmax", ["x"], ["y"], axis=2)], {}),
    "Softmax-11 last axis": (11, [N("Softmax", ["x"], ["y"], axis=-1)], {}),
    "LogSoftmax-11": (12, [N("LogSoftmax", ["x"], ["y"], axis=0)], {}),
    "Hardmax-11": (11, [N("Hardmax", ["x"], ["y"], axis=2)], {}),
    "Dropout-7": (9, [N("Dropout", ["x"], ["y"], ratio=0.7)], {}),
    "BatchNormalization-7": (8, [N("BatchNormalization", ["x", "a", "a", "a", "v"], ["y"])],
                             {"a": floats(3), "v": np.abs(floats(3)) + 1}),
    "Upsample-7": (8, [N("Upsample", ["x"], ["y"], scales=[1.0, 1.0, 2.0, 1.5])], {}),
    "Upsample-9 linear": (9, [N("Upsample", ["x", "s"], ["y"], mode="linear")], {"s": np.float32([1, 1, 2, 2])}),
    "Resize-10": (10, [N("Resize", ["x", "s"], ["y"])], {"s": np.float32([1, 1, 1.5, 0.5])}),
    "Resize-11": (11, [N("Resize", ["x", "r", "s"], ["y"], mode="linear")],
                  {"r": NONE, "s": np.float32([1, 1, 2, 3])}),
    "Resize-11 for nearest": (11, [N("Resize", ["x", "r", "e", "z"], ["y"], nearest_mode="floor",
                                     coordinate_transformation_mode="tf_half_pixel_for_nn")],
                              {"r": NONE, "e": NONE, "z": np.int64([2, 3, 7, 9])}),
    "Pad-2": (10, [N("Pad", ["x"], ["y"], pads=[0, 1, 0, 2, 0, 0, 3, 0], value=1.5)], {}),
    "Pad-2 reflecting": (10, [N("Pad", ["x"], ["y"], pads=[0, 0, 1, 2, 0, 0, 3, 0], mode="reflect")], {}),
    "Slice-1": (9, [N("Slice", ["x"], ["y"], starts=[1, -3], ends=[9, 5], axes=[2, 3])], {}),
    "Slice-1 first axes": (9, [N("Slice", ["x"], ["y"], starts=[0, 1], ends=[1, 3])], {}),
    "Split-2": (11, [N("Split", ["x"], ["y", "z"], axis=3, split=[2, 3])], {}),
    "Split-2 evenly": (11, [N("Split", ["x"], ["y", "z"], axis=2)], {}),
    "Split-13 evenly": (13, [N("Split", ["x"], ["y", "z", "w"], axis=1)], {}),
    "TopK-1": (9, [N("TopK", ["x"], ["y", "z"], k=2)], {}),
    "TopK-10": (10, [N("TopK", ["x", "k"], ["y", "z"], axis=2)], {"k": np.int64([3])}),
    "Scatter-9": (10, [N("Scatter", ["x", "i", "u"], ["y"], axis=1)],
                  {"i": np.int64([[[[2]]], [[[0]]]]), "u": floats(2, 1, 1, 1)}),
    "Gemm-7": (7, [N("Flatten", ["x"], ["f"], axis=1), N("Gemm", ["f", "w", "b"], ["y"], transB=1)],
               {"w": floats(6, 60), "b": floats(6)}),
    "GroupNormalization-18 of x": (18, [N("GroupNormalization", ["x", "a", "a"], ["y"], num_groups=3)],
                                   {"a": floats(3)}),
    "GroupNormalization-18": (18, [N("GroupNormalization", ["c", "a", "a"], ["g"], num_groups=2),
                                   N("ReduceSum", ["x"], ["s"], keepdims=0), N("Mul", ["g", "s"], ["y"])],
                              {"c": floats(2, 4, 3), "a": floats(2)}),
    "MeanVarianceNormalization-9": (12, [N("MeanVarianceNormalization", ["x"], ["y"])], {}),
    "Cast-9": (9, [N("Cast", ["x"], ["y"], to=7)], {}),
    "CastLike-19": (19, [N("CastLike", ["x", "c"], ["y"])], {"c": floats(7).astype("f8")}),
}  # fmt: skip


SHAPES = pytest.mark.parametrize("shape", [X.shape, None], ids=["shape", "no rank"])


@SHAPES
@pytest.mark.parametrize("name", WITH_ONNX_RUNTIME)
def test_old_forms_agree_with_onnx_runtime(name: str, shape: tuple[int, ...] | None) -> None:
    opset, nodes, constants = WITH_ONNX_RUNTIME[name]
    outputs = [output for output in nodes[-1].output if output]
    assert_agree(model(nodes, {"x": shape}, outputs, constants=constants, opset=opset), {"x": X}, 1e-4)


@pytest.mark.parametrize("shape", [(1, 1, 0), None])
def test_an_old_softmax_of_nothing(shape: tuple[int, ...] | None) -> None:
    proto = model([N("Softmax", ["x"], ["y"])], {"x": shape}, opset=9)
    assert_agree(proto, {"x": np.zeros((1, 1, 0), np.float32)})


def flat_softmax(x: Any) -> Any:
    powers = np.exp(x.reshape(x.shape[0], -1))
    return (powers / powers.sum(1, keepdims=True)).reshape(x.shape)


per, last = floats(3), floats(4, 5)
BY_HAND: dict[str, tuple[int, list[onnx.NodeProto], dict[str, Any], Any]] = {
    "Add-6 from an axis": (6, [N("Add", ["x", "c"], ["y"], broadcast=1, axis=1)], {"c": per}, X + per[:, None, None]),
    "Mul-1 from axis -3": (1, [N("Mul", ["x", "c"], ["y"], broadcast=1, axis=-3)], {"c": per}, X * per[:, None, None]),
    "Sub-6 at the end": (6, [N("Sub", ["x", "c"], ["y"], broadcast=1)], {"c": last}, X - last),
    "Div-6 with a hint": (5, [N("Div", ["x", "x"], ["y"], consumed_inputs=[0, 1])], {}, X / X),
    "Greater-1": (6, [N("Greater", ["x", "c"], ["y"], broadcast=1, axis=1)], {"c": per}, per[:, None, None] < X),
    "PRelu-6 by channel": (6, [N("PRelu", ["x", "c"], ["y"])], {"c": per}, np.where(X < 0, per[:, None, None] * X, X)),
    "Reshape-1": (1, [N("Reshape", ["x"], ["y"], shape=[0, -1])], {}, X.reshape(2, -1)),
    "Concat-1": (1, [N("Concat", ["x", "x"], ["y"])], {}, np.concatenate([X, X], 1)),
    "Pad-1": (1, [N("Pad", ["x"], ["y"], paddings=[0, 0, 0, 1, 0, 0, 0, 0])], {}, np.pad(X, [(0, 0)] * 3 + [(1, 0)])),
    "Split-1": (1, [N("Split", ["x"], ["y", "z"], split=[1, 1])], {}, X[:1]),
    "Tile-1": (1, [N("Tile", ["x", "t", "a"], ["y"])], {"t": np.int64(3), "a": np.int64(2)}, np.tile(X, (1, 1, 3, 1))),
    "Cast-1": (1, [N("Cast", ["x"], ["y"], to="INT32")], {}, X.astype(np.int32)),
    "Selu-1": (1, [N("Selu", ["x"], ["y"])], {}, np.where(X > 0, 1.0507 * X, 1.0507 * 1.6732 * (np.exp(X) - 1))),
    "Dropout-1": (1, [N("Dropout", ["x"], ["y"], is_test=1, ratio=0.5)], {}, X),
    "Softmax-1": (1, [N("Softmax", ["x"], ["y"])], {}, flat_softmax(X)),
    "Upsample-1": (1, [N("Upsample", ["x"], ["y"], height_scale=2.0, width_scale=1.0)], {}, X.repeat(2, 2)),
    "GlobalLpPool-1": (1, [N("GlobalLpPool", ["x"], ["y"], p=2.0)], {}, np.sqrt((X**2).sum((2, 3), keepdims=True))),
    "BatchNormalization-1": (
        1, [N("BatchNormalization", ["x", "c", "c", "c", "v"], ["y"], is_test=1, epsilon=0.0, consumed_inputs=[0, 0])],
        {"c": per, "v": per * per}, (X - per[:, None, None]) * np.sign(per)[:, None, None] + per[:, None, None],
    ),
}  # fmt: skip


@SHAPES
@pytest.mark.parametrize("name", BY_HAND)
def test_before_onnx_runtime(name: str, shape: tuple[int, ...] | None) -> None:
    opset, nodes, constants, expected = BY_HAND[name]
    outputs = [output for output in nodes[-1].output if output]
    result = ours(model(nodes, {"x": shape}, outputs, constants=constants, opset=opset), {"x": X})["y"]
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, 1e-4, 1e-5)


@pytest.mark.parametrize("known", ["x", "c", None])
@pytest.mark.parametrize(
    "name", ["Add-6 from an axis", "Mul-1 from axis -3", "Sub-6 at the end", "Greater-1", "PRelu-6 by channel"]
)
def test_an_old_broadcast_of_unknown_ranks(name: str, known: str | None) -> None:
    opset, nodes, constants, expected = BY_HAND[name]
    given = {"x": X, **constants}
    shapes = {each: array.shape if each == known else None for each, array in given.items()}
    np.testing.assert_allclose(ours(model(nodes, shapes, opset=opset), given)["y"], expected, 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("slopes", "rank"), [*itertools.product([(), (1,), (3,)], [1, 2, 3]), ((3, 1), 2), ((3, 1), 3), ((3, 1, 1), 3)]
)
def test_an_old_prelu_takes_slopes_of_any_rank(slopes: tuple[int, ...], rank: int) -> None:
    x, slope = floats(*(3,) * rank), floats(*slopes)
    known, hidden = (
        ours(model([N("PRelu", ["x", "s"], ["y"])], shapes, opset=6), {"x": x, "s": slope})["y"]
        for shapes in ({"x": x.shape, "s": slopes}, {"x": None, "s": None})
    )
    np.testing.assert_array_equal(hidden, known, strict=True)


@pytest.mark.parametrize(("opset", "dtype"), [(9, np.float32), (10, np.bool_)])
def test_the_mask_of_an_old_dropout_keeps_everything(opset: int, dtype: Any) -> None:
    proto = model([N("Dropout", ["x"], ["y", "m"], ratio=0.5)], {"x": X.shape}, ["y", "m"], opset=opset)
    result = ours(proto, {"x": X})
    np.testing.assert_array_equal(result["y"], X)
    np.testing.assert_array_equal(result["m"], np.ones(X.shape))
    assert result["m"].dtype == dtype


@pytest.mark.parametrize(
    ("opset", "node", "message"),
    [
        (8, N("BatchNormalization", ["x", "c", "c", "c", "c"], ["y"], spatial=0), "spatial is 0"),
        (9, N("BatchNormalization", ["x", "c", "c", "c", "c"], ["y", "m"]), "statistics of an old training form"),
        (9, N("TopK", ["x"], ["y"]), "attribute 'k' is required"),
        (5, N("Cast", ["x"], ["y"], to="REAL"), "'to' is 'REAL', expected the name of an element type"),
        (9, N("Softmax", ["x"], ["y"], axis=5), "axis 5 is out of range for rank 4"),
        (5, N("Tile", ["x", "x", "x"], ["y"]), "tiles and axis must be known numbers"),
        (1, N("LpPool", ["x"], ["y"], p=2.5, kernel_shape=[2, 2]), "p is 2.5, expected a whole number"),
    ],
)
def test_old_forms_that_are_refused(opset: int, node: onnx.NodeProto, message: str) -> None:
    proto = model([node], {"x": X.shape}, constants={"c": per}, opset=opset)
    with pytest.raises(ModelError, match=message) as caught:
        load(proto.SerializeToString())
    assert f"({node.op_type}, opset {opset})" in caught.value.where


def test_opsets_are_checked() -> None:
    newest = onnx.defs.onnx_opset_version()
    node = N("Relu", ["x"], ["y"])
    load(model([node], {"x": [1]}, opset=newest).SerializeToString())
    for opset in (0, -1, newest + 1):
        with pytest.raises(UnsupportedError, match=f"opset is {opset}, expected 1 to {newest}"):
            load(model([node], {"x": [1]}, opset=opset).SerializeToString())
    twice = model([node], {"x": [1]}, domains={"ai.onnx": 13})
    with pytest.raises(ModelError, match="opset '' is imported as 21 and 13"):
        load(twice.SerializeToString())
    twice.ir_version = 10_000
    with pytest.raises(UnsupportedError, match="ir_version is 10000"):
        load(twice.SerializeToString())


def schema_changes() -> list[tuple[str, int]]:
    """(operator, version) for each version of one of Lathe's operators that drops attributes or inputs."""
    versions: dict[str, list[Any]] = {}
    for schema in sorted(onnx.defs.get_all_schemas_with_history(), key=lambda schema: schema.since_version):
        if schema.domain == "" and registry.find(schema.name) is not None:
            versions.setdefault(schema.name, []).append(schema)
    steps = [step for schemas in versions.values() for step in itertools.pairwise(schemas)]
    return [
        (newer.name, newer.since_version)
        for older, newer in steps
        if set(older.attributes) - set(newer.attributes) or len(older.inputs) > len(newer.inputs)
    ]


@pytest.mark.parametrize(("op", "version"), schema_changes())
def test_every_change_of_a_schema_has_an_adapter(op: str, version: int) -> None:
    """Adapters must cover every change in the history of the ONNX schemas."""
    assert max(adapter_versions(op)) >= version  # an adapter may cover several steps at once


CURRENT = [op for op in registry.names() if registry.get(op).domain == "" and not onnx.defs.get_schema(op).deprecated]


@pytest.mark.parametrize("op", CURRENT)
def test_operators_are_those_of_their_newest_schema(op: str) -> None:
    """Attributes exist in ONNX, except `layout` and parameters that became inputs; the numbers of inputs are equal."""
    definition, schema = registry.get(op), onnx.defs.get_schema(op)
    assert {*definition.attrs} - {*definition.params} <= {*schema.attributes, "layout"}
    variadic = schema.max_input > 1000
    assert definition.arity[1] == (None if variadic else schema.max_input)
    assert variadic or definition.arity[0] == schema.min_input


def test_cast_like_needs_the_element_type_alone() -> None:
    """The shape of its second input is free, so it is no operand of an elementwise operator."""
    proto = model([N("CastLike", ["x", "z"], ["y"])], {"x": (2, 4, 16), "z": (2, 4, 1, 4)}, opset=19)
    graph = load(proto.SerializeToString())
    assert [(node.op, len(node.inputs)) for node in graph.nodes] == [("Cast", 1)]
