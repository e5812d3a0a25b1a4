"""Text that is compared with constants: one node makes it integers, and ONNX Runtime gives the same results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from skl2onnx import to_onnx
from skl2onnx.common.data_types import StringTensorType
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import RandomForestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder

import lathe
from lathe.core.passes.lowering.coded_text import _MOVED
from tests.core.ops.small_models import agree, ml, model

WORDS = np.array([["pear", "fig", ""], ["lime", "pear", "größe"]], object)
ENCODER: dict[str, Any] = {"keys_strings": ["pear", "", "fig"], "values_int64s": [3, 4, 5], "default_int64": -7}


def references(data: bytes) -> list[str]:
    """The operators of a compiled model that run on their references."""
    with lathe.compile(data, threads=1, tune="off") as session:
        return [line.split()[0] for line in session.explain().splitlines() if "FALLBACK" in line]


LOOKUPS = {
    "LabelEncoder to integers": ml("LabelEncoder", "x", **ENCODER),
    "LabelEncoder to floats": ml("LabelEncoder", "x", keys_strings=["fig"], values_floats=[0.5], default_float=-1.5),
    "OneHotEncoder": ml("OneHotEncoder", "x", cats_strings=["größe", "pear", "plum"]),
    "CategoryMapper": ml("CategoryMapper", "x", cats_strings=["fig", "pear"], cats_int64s=[8, 0], default_int64=6),
}


@pytest.mark.parametrize("node", LOOKUPS.values(), ids=LOOKUPS)
def test_a_lookup_compares_integers(node: onnx.NodeProto) -> None:
    agree([node], {"x": WORDS}, "y")
    assert references(model([node], {"x": WORDS}, ["y"])) == ["TextCodes"]


@pytest.mark.parametrize("swapped", [False, True])
def test_equal_compares_integers(swapped: bool) -> None:
    constant = helper.make_node("Constant", [], ["c"], value_strings=["fig", "plum", ""])
    names = ["c", "x"] if swapped else ["x", "c"]
    nodes = [constant, helper.make_node("Equal", names, ["y"])]
    agree(nodes, {"x": WORDS}, "y")
    assert references(model(nodes, {"x": WORDS}, ["y"])) == ["TextCodes"]


def ints(*numbers: int, shape: Sequence[int] | None = None) -> onnx.TensorProto:
    return helper.make_tensor("t", onnx.TensorProto.INT64, shape or [len(numbers)], numbers)


def moving(op: str, *inputs: Any, outputs: int = 1, domain: str = "", **attrs: Any) -> list[onnx.NodeProto]:
    """Nodes that move the text x to an encoder; inputs other than names become constants."""
    nodes, names = [], []
    for index, given in enumerate(inputs):
        names.append(given if isinstance(given, str) else f"i{index}")
        if not isinstance(given, str):
            nodes.append(helper.make_node("Constant", [], [f"i{index}"], value=given))
    results = [f"m{index}" for index in range(outputs)]
    return [*nodes, helper.make_node(op, names, results, domain=domain, **attrs)]


MOVES = {
    "ArrayFeatureExtractor": moving("ArrayFeatureExtractor", "x", ints(2, 0), domain="ai.onnx.ml"),
    "Compress": moving("Compress", "x", helper.make_tensor("t", onnx.TensorProto.BOOL, [3], [1, 0, 1]), axis=1),
    "Concat": moving("Concat", "x", "x", axis=1),
    "Expand": moving("Expand", "x", ints(2, 2, 3)),
    "Flatten": moving("Flatten", "x", axis=0),
    "Gather": moving("Gather", "x", ints(1, -1), axis=1),
    "GatherElements": moving("GatherElements", "x", ints(2, 0, shape=[2, 1]), axis=1),
    "GatherND": moving("GatherND", "x", ints(1, 2, 0, 1, shape=[2, 2])),
    "Identity": moving("Identity", "x"),
    "Reshape": moving("Reshape", "x", ints(3, -1)),
    "Slice": moving("Slice", "x", ints(1), ints(3), ints(1)),
    "Split": moving("Split", "x", ints(1, 2), outputs=2, axis=1),
    "Squeeze": [*moving("Unsqueeze", "x", ints(0)), helper.make_node("Squeeze", ["m0", "i1"], ["s"])],
    "Tile": moving("Tile", "x", ints(1, 2)),
    "Transpose": moving("Transpose", "x", perm=[1, 0]),
    "Unsqueeze": moving("Unsqueeze", "x", ints(1)),
    "Where": moving("Where", helper.make_tensor("t", onnx.TensorProto.BOOL, [3], [1, 0, 1]), "x", "x"),
}  # fmt: skip


def test_each_moving_operator_has_a_case() -> None:
    assert MOVES.keys() == _MOVED.keys()


@pytest.mark.parametrize("nodes", MOVES.values(), ids=MOVES)
def test_text_that_moves_to_a_lookup_moves_as_integers(nodes: list[onnx.NodeProto]) -> None:
    """Compiled and interpreted. ONNX Runtime has no text in some of these operators, ONNX's definition in all."""
    moved = nodes[-1].output[-1]
    data = model([*nodes, ml("LabelEncoder", moved, **ENCODER)], {"x": WORDS}, ["y"])
    expected = lathe.interpret(lathe.load(data), {"x": WORDS})["y"]
    with lathe.compile(data, threads=1, tune="off") as session:
        np.testing.assert_array_equal(session.run({"x": WORDS})["y"], expected)
    assert "LabelEncoder" not in references(data)
    try:
        theirs = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    except ort.capi.onnxruntime_pybind11_state.NotImplemented:
        return
    np.testing.assert_array_equal(expected, theirs.run(["y"], {"x": WORDS})[0])


def test_text_that_is_an_output_or_an_encoded_text_stays_text() -> None:
    nodes = [
        *moving("Transpose", "x", perm=[1, 0]),
        ml("LabelEncoder", "m0", keys_strings=["fig", "pear"], values_strings=["pear", "fig"], default_string="fig"),
        helper.make_node("LabelEncoder", ["y"], ["z"], domain="ai.onnx.ml", **ENCODER),
    ]
    agree(nodes, {"x": WORDS}, "m0", "y", "z")


def test_an_unknown_category_is_refused_on_request() -> None:
    node = ml("OneHotEncoder", "x", cats_strings=["pear", "fig"], zeros=0)
    known = np.array(["fig", "pear"], object)
    agree([node], {"x": known}, "y")
    session = lathe.compile(model([node], {"x": known}, ["y"]), threads=1, tune="off")
    with session, pytest.raises(lathe.errors.FeedError, match="out of range"):
        session.run({"x": np.array(["fig", "plum"], object)})


@pytest.mark.parametrize("dtype", [object, "U"])
def test_a_pipeline_of_scikit_learn(dtype: Any) -> None:
    columns = np.random.default_rng(0).choice(["a", "b", "c", "dd"], (60, 3))
    labels = (columns[:, 0] == columns[:, 1]).astype(int) + (columns[:, 2] == "dd")
    encoders = ColumnTransformer([("o", OneHotEncoder(), [0, 2]), ("n", OrdinalEncoder(), [1])])
    pipeline = make_pipeline(encoders, RandomForestClassifier(10, random_state=0)).fit(columns, labels)
    exported = to_onnx(pipeline, initial_types=[("x", StringTensorType([None, 3]))], options={"zipmap": False})
    data = exported.SerializeToString()
    feeds = {"x": columns.astype(dtype)}
    expected = ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"x": columns.astype(object)})
    with lathe.compile(data, threads=1, tune="off") as session:
        for _ in range(3):  # the second run of a shape takes the cached call
            got = session.run(feeds)
            for (name, array), right in zip(got.items(), expected, strict=True):
                np.testing.assert_allclose(array, right, rtol=1e-5, err_msg=name)
    assert references(data) == ["TextCodes"]
