"""Invalid files raise ModelError; none crashes, hangs or allocates much memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from lathe.core.errors import ModelError
from lathe.core.frontends.onnx import load
from tests.core.frontends.models import floats, model

N = helper.make_node


def good() -> onnx.ModelProto:
    """A valid model with tensors in all kinds of places: initializers, attributes, bodies, functions."""
    then = helper.make_graph([N("Constant", [], ["t"], value=numpy_helper.from_array(floats(4)))], "then", [],
                             [onnx.ValueInfoProto(name="t")])  # fmt: skip
    nodes = [
        N("Gemm", ["x", "w", "b"], ["h"], transB=1),
        N("Scale", ["h"], ["s"], domain="local"),
        N("Reshape", ["s", "shape"], ["y"]),
    ]
    inner = [N("Constant", [], ["two"], value=numpy_helper.from_array(np.float32(2))), N("Mul", ["a", "two"], ["o"])]
    function = helper.make_function("local", "Scale", ["a"], ["o"], inner, [helper.make_opsetid("", 17)])
    constants = {"w": floats(4, 4), "b": floats(4), "shape": np.int64([-1, 2, 2])}
    proto = model(nodes, {"x": ["n", 4]}, constants=constants, functions=[function], domains={"local": 1})
    proto.graph.node.append(N("If", ["cond"], ["unused"], then_branch=then, else_branch=then))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "cond"))
    return proto


def external(tensor: TensorProto) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/passwd")


PLACES: dict[str, Callable[[onnx.ModelProto], Any]] = {
    "initializer": lambda m: m.graph.initializer[0],
    "attribute": lambda m: m.functions[0].node[0].attribute[0].t,
    "subgraph": lambda m: m.graph.node[3].attribute[0].g.node[0].attribute[0].t,
    "list of tensors": lambda m: m.graph.node[0].attribute.add(name="more").tensors.add(),
    "sparse values": lambda m: m.graph.sparse_initializer.add().values,
    "sparse indices": lambda m: m.graph.sparse_initializer.add().indices,
    "sparse attribute": lambda m: m.graph.node[0].attribute.add(name="s").sparse_tensor.values,
    "function nobody calls": lambda m: m.functions.add(name="f").node.add().attribute.add(name="t").t,
    "default of a function": lambda m: m.functions[0].attribute_proto.add(name="t").t,
    "training": lambda m: m.training_info.add().initialization.initializer.add(),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_external_data_is_refused_in_every_tensor(place: str) -> None:
    proto = good()
    external(PLACES[place](proto))
    with pytest.raises(ModelError, match="has external data, expected its data inside the file") as caught:
        load(proto.SerializeToString())
    assert "passwd" not in str(caught.value)


def changed(edit: Callable[[onnx.ModelProto], Any]) -> bytes:
    proto = good()
    edit(proto)
    return bytes(proto.SerializeToString())


def dimension(value: int) -> Callable[[onnx.ModelProto], Any]:
    return lambda m: m.graph.input[0].type.tensor_type.shape.dim.add(dim_value=value)


def dimensions(*sizes: int) -> Callable[[onnx.ModelProto], Any]:
    return lambda m: m.graph.input.append(helper.make_tensor_value_info("e", TensorProto.FLOAT, sizes))


def copy_of(items: Any, index: int = 0) -> Any:
    return items.add().CopyFrom(items[index])


EDITS: dict[str, tuple[Callable[[onnx.ModelProto], Any], str]] = {
    "duplicate inputs": (lambda m: copy_of(m.graph.input), "input 'x' is given twice"),
    "duplicate outputs": (lambda m: copy_of(m.graph.output), "output 'y' is given twice"),
    "duplicate initializers": (lambda m: copy_of(m.graph.initializer), "value 'w': is defined twice"),
    "duplicate results": (lambda m: copy_of(m.graph.node), "'h' is an output of 'h' and of 'h'"),
    "a result named as an input": (lambda m: m.graph.node.append(N("Neg", ["w"], ["x"])), "'x': is defined twice"),
    "duplicate attributes": (lambda m: copy_of(m.graph.node[0].attribute), "attribute 'transB' is given twice"),
    "duplicate functions": (lambda m: copy_of(m.functions), "function 'Scale' of domain 'local' is defined twice"),
    "a cycle": (lambda m: m.graph.node[0].input.__setitem__(2, "y"), r"node 'h' \(Gemm\): is part of a cycle"),
    "a node that reads itself": (lambda m: m.graph.node.append(N("Add", ["x", "z"], ["z"])), "is part of a cycle"),
    "no outputs": (lambda m: m.graph.ClearField("output"), "has no outputs"),
    "an output that nothing makes": (lambda m: m.graph.output.add(name="q"), "output: reads 'q', which"),
    "an input without a name": (lambda m: m.graph.input.add(), "input: has no name"),
    "an input without a type": (lambda m: m.graph.input.add(name="z"), "value 'z': has no declared type"),
    "a sparse input": (lambda m: m.graph.input.add(name="z").type.sparse_tensor_type.SetInParent(),
                       "has a sparse_tensor_type, expected a tensor"),
    "a map of nothing": (lambda m: m.graph.input.add(name="z").type.map_type.SetInParent(), "element type 0"),
    "a negative size": (dimension(-7), "value 'x': has a dimension of -7, expected at least 0"),
    "a huge size": (dimension(2**62), "has 7378697.* bytes, expected at most"),
    "a rank of 70": (lambda m: [dimension(1)(m) for _ in range(68)], "rank is 70, expected at most 64"),
    "a computed rank of 65": (
        lambda m: (m.graph.input.append(helper.make_tensor_value_info("q", TensorProto.INT64, [65])),
                   m.graph.node.append(N("Reshape", ["x", "q"], ["r"]))),
        "gives a tensor of rank 65, expected at most 64"),
    "a constant of text where a tensor belongs": (
        lambda m: m.graph.node.append(N("Constant", [], ["c"], value="cubic")), "'value' is 'cubic', expected TENSOR"),
    "a constant number given as text": (
        lambda m: m.graph.node.append(N("Constant", [], ["c"], value_int="x")), "'value_int' is 'x', expected INT"),
    "an unknown type": (lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 77), "element type 77"),
    "nothing, but of a huge shape": (dimensions(0, 2**62, 2**62), "has 85070591730234615.* bytes, expected at most"),
    "weights of a shape that no array can have": (
        lambda m: m.graph.initializer.append(TensorProto(name="e", data_type=1, dims=[0, 2**62, 2**62], raw_data=b"")),
        "shape is .0, 4611686018427387904, 4611686018427387904., which no array can have"),
    "no opset": (lambda m: m.ClearField("opset_import"), "imports no opset"),
    "an opset of another domain below 1": (
        lambda m: m.opset_import.append(helper.make_opsetid("ai.onnx.preview", -(2**63))),
        "opset 'ai.onnx.preview' is of version -9223372036854775808, expected 1 to 2147483647"),
    "an old Scan that does not say what it scans": (
        lambda m: (setattr(m.opset_import[0], "version", 8),
                   m.graph.node.append(N("Scan", ["", "x"], ["scanned"], num_scan_inputs="x", body=m.graph))),
        "num_scan_inputs is 'x', expected 1 to 1"),
    "no IR version": (lambda m: m.ClearField("ir_version"), "ir_version is 0"),
    "no graph": (lambda m: m.ClearField("graph"), "hold no ONNX graph"),
    "weights that do not fit": (lambda m: m.graph.initializer[0].dims.__setitem__(0, 5), "has 64 bytes .* expected 80"),
    "an attribute of no kind": (lambda m: setattr(m.graph.node[0].attribute[0], "type", 0), "is of kind UNDEFINED"),
    "a reference outside functions": (
        lambda m: setattr(m.graph.node[0].attribute[0], "ref_attr_name", "q"), "refers to a function's, outside"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_malformed_files(name: str) -> None:
    edit, message = EDITS[name]
    with pytest.raises(ModelError, match=message):
        load(changed(edit))


def test_text_that_is_not_utf8() -> None:
    data = changed(lambda m: setattr(m.graph.node[0], "name", "NAMENAME"))
    with pytest.raises(ModelError, match="field 'name' of a NodeProto is not UTF-8 text"):
        load(data.replace(b"NAMENAME", b"NAME\xff\xfe\xfdE"))


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"not a model at all", b"PK\x03\x04zip", b"\x80\x04\x95pickle", b"\xff" * 1000]
)
def test_bytes_that_are_no_model_are_refused(data: bytes) -> None:
    with pytest.raises(ModelError, match=f"the {len(data)} bytes"):
        load(data)


def test_truncated_files() -> None:
    """At least 90% of the truncated files are refused; one that ends between two fields may be a valid model."""
    data = good().SerializeToString()
    refused = sum(outcome(data[:length]) == "refused" for length in range(0, len(data), 3))
    assert refused > len(data) / 3 * 0.9


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def nested(depth: int) -> bytes:
    """A ModelProto, byte by byte from the inside out: `depth` messages, each the only field of the one around it."""
    graph, node, attribute, body = b"\x3a", b"\x0a", b"\x2a", b"\x32"  # field numbers with the wire type of messages
    parts: list[bytes] = []
    size = 0
    for level in reversed(range(depth)):
        parts.append((graph if level == 0 else (node, attribute, body)[(level - 1) % 3]) + varint(size))
        size += len(parts[-1])
    return b"".join(reversed(parts))


def test_nesting_ten_thousand_deep() -> None:
    assert onnx.ModelProto.FromString(nested(5)).graph.node[0].attribute[0].g.node
    with pytest.raises(ModelError, match="are not an ONNX model"):
        load(nested(10_000))


def test_squaring_dimensions_again_and_again() -> None:
    """Forty squarings of a symbol would be a polynomial of degree 2**40."""
    nodes = [N("Shape", ["x"], ["s0"])] + [N("Mul", [f"s{i}", f"s{i}"], [f"s{i + 1}"]) for i in range(40)]
    load(model([*nodes, N("ConstantOfShape", ["s40"], ["y"])], {"x": ["n", "m"]}).SerializeToString())


def test_division_upon_division() -> None:
    nodes = [N("Shape", ["x"], ["s0"])]
    for i in range(60):
        nodes += [N("Add", [f"s{i}", "one"], [f"a{i}"]), N("Div", [f"a{i}", "two"], [f"b{i}"]),
                  N("Div", [f"s{i}", "three"], [f"c{i}"]), N("Add", [f"b{i}", f"c{i}"], [f"s{i + 1}"])]  # fmt: skip
    constants = {"one": np.int64([1]), "two": np.int64([2]), "three": np.int64([3])}
    load(model([*nodes, N("ConstantOfShape", ["s60"], ["y"])], {"x": ["n"]}, constants=constants).SerializeToString())


@pytest.mark.parametrize(
    "node",
    [
        N("ConstantOfShape", ["big"], ["y"]),
        N("Expand", ["x", "big"], ["y"]),
        N("Tile", ["x", "big"], ["y"]),
        N("Pad", ["x", "pads"], ["y"]),
        N("Resize", ["x", "", "", "big"], ["y"]),
        N("OneHot", ["big", "depth", "values"], ["y"]),
        N("Range", ["zero", "depth", "step"], ["y"]),
        N("EyeLike", ["x"], ["y"], k=2**62),
        N("Conv", ["x", "x"], ["y"], dilations=[2**60]),
    ],
    ids=lambda node: node.op_type,
)
def test_huge_results_are_never_allocated(node: onnx.NodeProto) -> None:
    """Importing them allocates almost no memory, whether they are refused or accepted."""
    constants = {
        "big": np.int64([2**40, 2**40]), "pads": np.int64([0, 2**61, 0, 2**61]), "depth": np.int64(2**45),
        "zero": np.int64(0), "step": np.int64(1), "values": floats(2),
    }  # fmt: skip
    data = model([node], {"x": [1, 1]}, constants=constants).SerializeToString()
    outcome(data)
    tracemalloc.start()
    outcome(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def outcome(data: bytes) -> str:
    """The outcome: "refused" or "imported"; any error except ModelError fails the test."""
    try:
        load(data)
    except ModelError:
        return "refused"
    return "imported"


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes(seed: int) -> None:
    rng, data = random.Random(seed), good().SerializeToString()
    seen = set()
    for _ in range(150):
        mutated = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        seen.add(outcome(bytes(mutated)))
    assert seen == {"refused", "imported"}


AXES = [-9, 2**63 - 1, -(2**63), [1, 2], 1.5, "a"]
SIZES = [0, -1, 2**63 - 1, 4]
OPERATORS = ["Conv", "Concat", "Loop", "Slice", "TopK", "Split", "Squeeze", "Resize", "Pad", "If", "Softmax"]


def mutate(rng: random.Random, node: onnx.NodeProto, tensor: TensorProto) -> None:
    """One change that keeps the file well-formed."""
    match rng.randrange(7):
        case 0:
            node.op_type = rng.choice(OPERATORS)
        case 1:
            node.input.insert(0, rng.choice(["x", "w", "shape", "y", "cond", ""]))
        case 2:
            node.output.append(rng.choice(["x", "z", ""]))
        case 3:
            node.attribute.append(helper.make_attribute(rng.choice(["axis", "axes", "to", "mode"]), rng.choice(AXES)))
        case 4:
            tensor.dims.append(rng.choice(SIZES))
        case 5:
            tensor.data_type = rng.randrange(30)
        case 6:
            tensor.ClearField("dims")


@pytest.mark.parametrize("seed", range(4))
def test_well_formed_mutations(seed: int) -> None:
    """Mutations that stay well-formed reach deeper: other sizes, names, kinds, operators and opsets."""
    rng = random.Random(seed)
    for _ in range(80):
        proto = good()
        proto.opset_import[0].version = rng.choice([1, 6, 9, 11, 13, 21])
        for _ in range(rng.randint(1, 3)):
            nodes = [*proto.graph.node, *proto.functions[0].node]
            mutate(rng, rng.choice(nodes), rng.choice(proto.graph.initializer))
        outcome(proto.SerializeToString())
