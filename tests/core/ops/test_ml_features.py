"""Features, categories, maps and tokens of ai.onnx.ml and com.microsoft against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import lathe
from lathe.core.errors import FeedError, ModelError
from lathe.core.frontends.export import export
from tests.core.ops.small_models import agree, ml, model
from tests.core.ops.test_ml import floats

NAN = float("nan")
WORDS = np.array([["a", "b"], ["d", "c"]], object)


def run(node: onnx.NodeProto, x: Any) -> Any:
    return lathe.interpret(lathe.load(model([node], {"x": x}, ["y"])), {"x": x})["y"]


@pytest.mark.parametrize("x", [floats(3, 4), floats(4), np.int64([[1, 2, 3, 4]])])
@pytest.mark.parametrize("size", [1, 4])
def test_scaler(x: Any, size: int) -> None:
    attrs = {"offset": [1.0, 2.0, -3.0, 0.5][:size], "scale": [2.0, 0.5, 1.0, -1.0][:size]}
    agree([ml("Scaler", "x", **attrs)], {"x": x}, "y")


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
@pytest.mark.parametrize("x", [floats(3, 4), floats(4), np.float32([[-3, -1, -2], [0, 0, 0]]), np.int64([[3, -4]])])
def test_normalizer(norm: str, x: Any) -> None:
    agree([ml("Normalizer", "x", norm=norm)], {"x": x}, "y")


@pytest.mark.parametrize(
    ("x", "attrs"),
    [
        (np.float32([[1, NAN], [NAN, 2]]), {"imputed_value_floats": [9.0, 8.0], "replaced_value_float": NAN}),
        (np.float32([[1, 5], [5, 2]]), {"imputed_value_floats": [9.0], "replaced_value_float": 5.0}),
        (np.int64([[1, 5], [5, 2]]), {"imputed_value_int64s": [9, 8], "replaced_value_int64": 5}),
    ],
)
def test_imputer(x: Any, attrs: dict[str, Any]) -> None:
    agree([ml("Imputer", "x", **attrs)], {"x": x}, "y")


@pytest.mark.parametrize("sizes", [[3, 2], [2, 4], [1, 1]])
def test_feature_vectorizer_cuts_and_fills(sizes: list[int]) -> None:
    agree([ml("FeatureVectorizer", "x", "z", inputdimensions=sizes)], {"x": floats(2, 3), "z": floats(2, 2)}, "y")


@pytest.mark.parametrize(
    ("x", "attrs"),
    [
        (np.float32([[1.7, 5], [0, 2]]), {"cats_int64s": [1, 2]}),
        (np.int64([2, 5]), {"cats_int64s": [1, 2]}),
        (WORDS, {"cats_strings": ["a", "c"]}),
        (np.int64([2, 1]), {"cats_int64s": [1, 2], "zeros": 0}),
    ],
)
def test_one_hot(x: Any, attrs: dict[str, Any]) -> None:
    agree([ml("OneHotEncoder", "x", **attrs)], {"x": x}, "y")


def test_one_hot_refuses_unknown_categories_on_request() -> None:
    with pytest.raises(FeedError, match="of no category"):
        run(ml("OneHotEncoder", "x", cats_int64s=[1, 2], zeros=0), np.int64([3]))


@pytest.mark.parametrize("x", [np.float32([1.9, 2, 3]), np.int64([2, -(2**63)]), np.int64([1, 2**63 - 1])])
def test_compiled_one_hot_refuses_unknown_categories(x: Any) -> None:
    data = model([ml("OneHotEncoder", "x", cats_int64s=[2, 1], zeros=0)], {"x": x}, ["y"])
    with lathe.compile(data, threads=1, tune="off") as session:
        assert session.run({"x": x * 0 + 2})["y"].tolist() == [[1, 0]] * len(x)
        with pytest.raises(FeedError, match="out of range"):
            session.run({"x": x})


@pytest.mark.parametrize("x", [WORDS, np.int64([4, 9])])
def test_category_mapper(x: Any) -> None:
    attrs = {"cats_strings": ["a", "c"], "cats_int64s": [4, 5], "default_int64": 7, "default_string": "none"}
    agree([ml("CategoryMapper", "x", **attrs)], {"x": x}, "y")


@pytest.mark.parametrize("x", [WORDS, np.int64([1, 4])])
def test_label_encoder_of_the_first_opset(x: Any) -> None:
    node = ml("LabelEncoder", "x", classes_strings=["a", "c"], default_int64=-5, default_string="?")
    agree([node], {"x": x}, "y", ml=1)


@pytest.mark.parametrize("labels", [{"classlabels_int64s": [5, 3]}, {"classlabels_strings": ["yes", "no"]}])
@pytest.mark.parametrize("x", [floats(3, 2), floats(2)])
def test_zip_map(labels: dict[str, Any], x: Any) -> None:
    agree([ml("ZipMap", "x", **labels)], {"x": x}, "y")


@pytest.mark.parametrize(
    ("x", "vocabulary"),
    [
        ({"a": 1.5, "z": 2.0}, {"string_vocabulary": ["z", "b", "a"]}),
        ({1: 2.5, 3: 1.0}, {"int64_vocabulary": [3, 2, 1]}),
    ],
)
def test_dict_vectorizer(x: Any, vocabulary: dict[str, Any]) -> None:
    agree([ml("DictVectorizer", "x", **vocabulary)], {"x": x}, "y")


@pytest.mark.parametrize(
    ("x", "attrs"),
    [
        ({3: 1.5, 1: 2.0}, {}),
        ({3: 1.5, 1: 2.0}, {"map_form": "SPARSE", "max_map": 5}),
        ({3: 1.5, 1: 2.0}, {"cast_to": "TO_INT64"}),
    ],
)
def test_cast_map(x: Any, attrs: dict[str, Any]) -> None:
    agree([ml("CastMap", "x", **attrs)], {"x": x}, "y")


@pytest.mark.parametrize(
    ("node", "x", "expected"),
    [
        (ml("DictVectorizer", "x", int64_vocabulary=[2, 1]), {1: "one"}, [["", "one"]]),
        (ml("DictVectorizer", "x", string_vocabulary=["a", "b"]), {"a": 4}, [[4, 0]]),
        (ml("CastMap", "x", cast_to="TO_FLOAT"), {2: "1.25", 0: "3"}, [[3.0, 1.25]]),
        (ml("CastMap", "x", cast_to="TO_STRING"), {2: "x", 0: "y"}, [["y", "x"]]),
    ],
)
def test_maps_that_onnx_runtime_does_not_take_from_python(node: onnx.NodeProto, x: Any, expected: Any) -> None:
    assert run(node, x).tolist() == expected


@pytest.mark.parametrize(
    ("node", "x"),
    [
        (ml("ZipMap", "x", classlabels_strings=["yes", "no"]), floats(3, 2)),
        (ml("CastMap", "x"), {1: 2.0}),
        (ml("DictVectorizer", "x", string_vocabulary=["a"]), {"a": 4}),
    ],
)
def test_maps_survive_a_round_trip(node: onnx.NodeProto, x: Any) -> None:
    graph = lathe.load(model([node], {"x": x}, ["y"]))
    exported = export(graph)
    onnx.checker.check_model(exported)
    assert str(lathe.load(exported)) == str(graph)


def test_a_sparse_map_has_no_key_beyond_its_size() -> None:
    with pytest.raises(FeedError, match="the map has key 7, expected 0 to 4"):
        run(ml("CastMap", "x", map_form="SPARSE", max_map=5), {7: 1.0})


def tokenizer(**attrs: Any) -> onnx.NodeProto:
    given = {"mark": 0, "mincharnum": 1, "pad_value": "#", **attrs}
    return helper.make_node("Tokenizer", ["x"], ["y"], domain="com.microsoft", **given)


@pytest.mark.parametrize(
    "attrs",
    [
        {"tokenexp": "[a-z]+"},
        {"tokenexp": r"\b\w\w+\b", "mark": 1},
        {"separators": [" "], "mincharnum": 2},
        {"separators": [",", ";"]},
        {"separators": [""]},
        {"tokenexp": "."},
        {"tokenexp": "a|ab|[a-z]"},  # the longest match counts
    ],
)
@pytest.mark.parametrize("x", [["one two", "a,b;c de"], [["one  two", "three"], ["x", "yes; no"]]])
def test_tokenizer(attrs: dict[str, Any], x: Any) -> None:
    agree([tokenizer(**attrs)], {"x": np.array(x, object)}, "y")


@pytest.mark.parametrize(
    ("node", "x", "message"),
    [
        (ml("Scaler", "x", scale=[1.0, 2.0]), floats(2, 3), "scale has 2 numbers, expected 1 or the 3 features"),
        (ml("Normalizer", "x", norm="L3"), floats(2, 3), "norm is 'L3', expected one of MAX, L1, L2"),
        (ml("Normalizer", "x"), floats(2, 3, 4), "expected \\[N,C\\] or \\[C\\]"),
        (ml("Imputer", "x"), floats(2, 3), "has no imputed_value_floats"),
        (ml("FeatureVectorizer", "x"), floats(2, 3), "expected a size for each of the 1 inputs"),
        (ml("OneHotEncoder", "x", cats_int64s=[1]), WORDS, "has no cats_strings"),
        (ml("ZipMap", "x", classlabels_int64s=[1]), floats(2, 3), "a column for each of the 1 labels"),
        (ml("CategoryMapper", "x", cats_strings=["a"]), WORDS, "1 cats_strings and 0 cats_int64s"),
        (ml("DictVectorizer", "x", string_vocabulary=["a"]), {1: 1.0}, "no vocabulary of int64 keys"),
        (ml("CastMap", "x"), floats(2), "expected a map"),
        (tokenizer(), WORDS, "both or neither of tokenexp and separators"),
        (tokenizer(tokenexp="("), WORDS, "is not a regular expression"),
    ],
)
def test_invalid_attributes_are_refused_at_load(node: onnx.NodeProto, x: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        lathe.load(model([node], {"x": x}, ["y"]))


def test_rows_are_independent() -> None:
    """Scaled, imputed and encoded rows may share a batch; tokens may not, since they are padded to the longest row."""
    batch = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3])
    nodes = [
        helper.make_node("Scaler", ["x"], ["s"], domain="ai.onnx.ml", scale=[2.0], offset=[0.0]),
        helper.make_node("Normalizer", ["s"], ["t"], domain="ai.onnx.ml"),
        helper.make_node("Imputer", ["t"], ["u"], domain="ai.onnx.ml", imputed_value_floats=[1.0]),
        helper.make_node("OneHotEncoder", ["u"], ["y"], domain="ai.onnx.ml", cats_int64s=[1, 2]),
    ]
    graph = helper.make_graph(nodes, "g", [batch], [onnx.ValueInfoProto(name="y")])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 5)]
    data = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    with lathe.compile(data, threads=1) as session:
        assert session.batching.batchable, session.batching.reason
        with pytest.raises(FeedError):
            session.run({"x": floats(2, 4)})
