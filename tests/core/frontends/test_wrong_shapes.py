"""A wrongly declared shape that inference cannot detect gives an error or the right result."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx.parser
import pytest

import lathe
from lathe.core.errors import FeedError
from lathe.core.reference import interpret
from tests.core.small_models import model, normal, theirs

# Nodes that compute y, [3,2], whose rank inference does not know.
_PREPARED = "s = Compress <axis = 0> (sizes, c) r = Reshape(x, s)"
MADE = {
    "Reshape": "s = Compress <axis = 0> (sizes, c) y = Reshape(x, s)",
    "Squeeze": f"{_PREPARED} y = Squeeze(r)",
    "SequenceAt": f"{_PREPARED} q = SequenceConstruct(x, r) y = SequenceAt(q, one)",
    "Expand": "s = Compress <axis = 0> (wide, c) t = Slice(x, zero, ones) y = Expand(t, s)",
}
CONSTANTS = """
    int64[3] sizes = {3, 2, 1}, int64[3] wide = {3, 2, 4}, int64 one = {1}, int64[1] zero = {0}, int64[1] ones = {1}"""
FEEDS = {"x": normal(6), "c": np.array([True, True, False])}
WRONG = ["[77,2]", "[3,77]", "[77]", "[2,3,1]", "[6]", "[2,3]"]


def declaring(made: str, shape: str, reader: str = "z = Neg(y)") -> bytes:
    """A model that declares the shape of y, but not of the output z."""
    proto = onnx.load_from_string(model("float[n] x, bool[3] c => float z", f"{MADE[made]} {reader}", CONSTANTS))
    proto.graph.output[0].ClearField("type")
    declared = onnx.parser.parse_graph(f"g (float{shape} y) => (float r) {{ r = Neg(y) }}").input[0]
    proto.graph.value_info.append(declared)
    return bytes(proto.SerializeToString())


@pytest.mark.sample(5)
@pytest.mark.parametrize("shape", WRONG)
@pytest.mark.parametrize("made", MADE)
def test_a_value_of_another_shape_than_declared_is_refused(made: str, shape: str) -> None:
    data = declaring(made, shape)
    message = rf"\({made}\): its output 'y' has shape \[3, 2\], expected float32{re.escape(shape)}"
    assert theirs(data, FEEDS)["z"].shape == (3, 2)  # ONNX Runtime ignores declared shapes
    for new_shapes in ("wait", "background"):
        with lathe.compile(data, tune="off", new_shapes=new_shapes) as session, pytest.raises(FeedError, match=message):
            session.run(FEEDS)
    with pytest.raises(FeedError, match=message):
        interpret(lathe.load(data), FEEDS)


@pytest.mark.parametrize("shape", ["[3,2]", "[a,b]", "[a,2]"])
@pytest.mark.parametrize("made", MADE)
def test_a_value_of_the_declared_shape_is_computed(made: str, shape: str) -> None:
    data = declaring(made, shape)
    with lathe.compile(data, tune="off") as session:
        np.testing.assert_array_equal(session.run(FEEDS)["z"], theirs(data, FEEDS)["z"])


READERS = {
    "Shape": "z = Shape(y)",
    "Size": "z = Size(y)",
    "Shape of what follows": "n1 = Neg(y) n2 = Abs(n1) z = Shape(n2)",
    "Expand": "t = Shape(y) f = Slice(x, zero, ones) z = Expand(f, t)",
    "ConstantOfShape": "t = Shape(y) z = ConstantOfShape(t)",
    "in a branch": """
        b = ReduceMax <keepdims = 0> (sizes) b0 = Cast <to = 9> (b) t = Not(b0)
        z = If(t) <
            then_branch = g1 () => (int64[2] r) { r = Identity(two) },
            else_branch = g2 () => (int64[k] r) { r = Shape(y) }>""",
}


@pytest.mark.parametrize("shape", ["[77,2]", "[3,77]", "[n,2]", "[2,3]", "[6,1]"])
@pytest.mark.parametrize("reader", READERS)
def test_a_value_read_only_for_its_shape_has_its_computed_shape(reader: str, shape: str) -> None:
    """If passes believed the declared shape, no node would compute the value and detect the error."""
    proto = onnx.load_from_string(declaring("Reshape", shape, READERS[reader]))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 1]), "two"))
    data = bytes(proto.SerializeToString())
    want = theirs(data, FEEDS)["z"]
    with lathe.compile(data, tune="off") as session:
        np.testing.assert_array_equal(session.run(FEEDS)["z"], want)
    np.testing.assert_array_equal(interpret(lathe.load(data), FEEDS)["z"], want)


@pytest.mark.parametrize("made", ["Reshape", "Expand"])
def test_no_node_is_removed_because_of_its_declared_output_shape(made: str) -> None:
    """A Reshape to the input's own shape, and an Expand before a sum that broadcasts by itself, must stay.

    If the fed shape differs from the declared one, the result is ONNX Runtime's."""
    body = "r = Neg(w) y = Reshape(r, s) z = Neg(y)" if made == "Reshape" else "y = Expand(w, s) z = Add(y, w)"
    data = model("float[3,2] w, int64[k] s => float z", body)
    proto = onnx.load_from_string(data)
    proto.graph.output[0].ClearField("type")
    proto.graph.input[1].type.tensor_type.ClearField("shape")
    proto.graph.value_info.append(onnx.parser.parse_graph("g (float[3,2] y) => (float r) { r = Neg(y) }").input[0])
    fits, other = ({"w": normal(3, 2), "s": np.array(s)} for s in ([3, 2], [2, 3] if made == "Reshape" else [4, 1, 1]))
    with lathe.compile(proto.SerializeToString(), tune="off") as session:
        for feeds in (fits, other):
            np.testing.assert_array_equal(session.run(feeds)["z"], theirs(proto.SerializeToString(), feeds)["z"])


@pytest.mark.parametrize("declared", ["[77,1]", "[2,1]", "[n,1]"])
def test_a_wrong_declared_extent_changes_no_result_if_the_rank_is_known(declared: str) -> None:
    data = model(f"float[n] x => int64{declared} y", "k = NonZero(x) y = Transpose(k)")
    x = np.float32([1, 0, 2, 3])
    with lathe.compile(data, tune="off") as session:
        np.testing.assert_array_equal(session.run({"x": x})["y"], theirs(data, {"x": x})["y"])


@pytest.mark.parametrize("shape", ["[77,2]", "[n,2]", "[2,3]"])
@pytest.mark.parametrize("made", MADE)
def test_an_output_has_the_shape_its_node_computes(made: str, shape: str) -> None:
    """For example AECMOS, which declares one score per row and computes several."""
    proto = onnx.load_from_string(declaring(made, shape, "z = Neg(x)"))
    proto.graph.output[0].CopyFrom(proto.graph.value_info.pop())
    data = proto.SerializeToString()
    want = theirs(data, FEEDS)["y"]
    with lathe.compile(data, tune="off") as session:
        np.testing.assert_array_equal(session.run(FEEDS)["y"], want)
    np.testing.assert_array_equal(interpret(lathe.load(data), FEEDS)["y"], want)
