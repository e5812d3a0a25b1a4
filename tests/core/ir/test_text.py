"""The textual form: a printed graph reads back equal, and errors in malformed text name the line."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import lathe.core.ops  # noqa: F401 (builders infer types by it)
from lathe.core.errors import ModelError
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph, Node, State, Value
from lathe.core.ir.text import Weights, parse_graph, print_graph
from lathe.core.ir.types import DType, OptionalType, SequenceType, TensorType, parse_type
from lathe.core.ir.verify import verify

MLP = """\
graph @mlp {
  input %x : float32[n,4]
  const %w : float32[4,2] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
  state %count : int64[] = [0] -> %count.next
  const %one : int64[] = [1]
  %count.next : int64[] = Add(%count, %one) "count.next"
  %y : float32[n,2] = MatMul(%x, %w) "layer 1"
  %z : float32[n,2] = Clip(%y, _, %limit) {min = 0.5}
  output %z
}
"""


def round_trip(graph: Graph) -> Graph:
    weights = Weights()
    text = print_graph(graph, weights)
    again = parse_graph(text, weights.tobytes())
    repeated = Weights()
    assert print_graph(again, repeated) == text
    assert repeated.tobytes() == weights.tobytes()
    return again


def test_text_reads_back_with_everything_in_it() -> None:
    graph = parse_graph(MLP.replace("  state", "  const %limit : float32[] = [6.0]\n  state"))
    verify(graph)
    again = round_trip(graph)
    assert [value.name for value in again.inputs] == ["x"]
    assert again.nodes[2].inputs[1] is None
    assert again.nodes[2].attrs == {"min": 0.5}
    assert again.states[0].update is again.nodes[0].output
    assert again.nodes[1].name == "layer 1"
    assert again.inputs[0].shape == (symbol("n"), 4)


@pytest.mark.parametrize(
    "array",
    [
        np.array([0.1, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38], np.float32),
        np.array([0.1, 1e300], np.float64),
        np.array([1.5, 65504], np.float16),
        np.array([1.5, -3e38], ml_dtypes.bfloat16),
        np.array([-(2**63), 2**63 - 1]),
        np.array([True, False]),
        np.array([1 + 2j, -0.5j], np.complex64),
        np.array(["a", 'quote " and \n line', b"\x00\xff"], object),
        np.zeros((2, 0, 3), np.float32),
        np.arange(600, dtype=np.float32).reshape(20, 30),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_constants_of_every_kind_keep_their_bits(array: np.ndarray) -> None:
    graph = Graph("g")
    graph.outputs = [graph.add_constant(array.copy(), "c")]
    (again,) = round_trip(graph).constants.values()
    assert again.dtype == array.dtype
    assert again.shape == array.shape
    assert again.tolist() == array.tolist() if array.dtype == object else again.tobytes() == array.tobytes()
    assert not again.flags.writeable


def test_attributes_of_every_kind() -> None:
    graph, n = Graph("g"), symbol("n")
    x = Value("x", TensorType(DType.FLOAT32, (n, 3)))
    body = Graph("body", inputs=[Value("b", TensorType(DType.FLOAT32, ()))])
    body.outputs = [Builder(body)("Relu", body.inputs[0])]
    attrs = {
        "a": 1, "b": -1.5, "c": "text", "d": b"\x01", "e": True, "f": None, "g": (1, n * 2 + 1, -1), "h": DType.INT8,
        "i": TensorType(DType.FLOAT16, (n,)), "j": body, "k": np.arange(3), "l": (), "m": float("inf"), "o": ("x", "y"),
    }  # fmt: skip
    node = Node("Anything", [x], [], attrs, "node")
    node.outputs = [Value("y", x.type, node)]
    graph.inputs, graph.nodes, graph.outputs = [x], [node], [node.output]
    again = round_trip(graph).nodes[0].attrs
    plain = [key for key in attrs if key not in ("j", "k")]
    assert {key: again[key] for key in plain} == {key: attrs[key] for key in plain}
    assert [type(again[key]) for key in plain] == [type(attrs[key]) for key in plain]
    assert np.array_equal(again["k"], attrs["k"])
    assert str(again["j"]) == str(body)


def test_names_of_any_characters() -> None:
    graph = Graph("odd name")
    x = Value('in put/"1":0', TensorType(DType.FLOAT32, (2,)))
    graph.inputs = [x]
    graph.outputs = [Builder(graph)("Relu", x, name="/layer1/Relu_output_0")]
    assert round_trip(graph).inputs[0].name == x.name


def test_state_reads_back() -> None:
    graph = Graph("counter")
    count = Value("count", TensorType(DType.INT64, ()))
    build = Builder(graph)
    graph.states = [State(count, count, np.array(3))]
    graph.states[0].update = build("Add", count, build.constant(np.array(1)))
    assert round_trip(graph).states[0].initial == 3


@pytest.mark.parametrize("text", ["float32[n,(H - 1)//2,3]", "int64[]", "seq(float32[*])", "optional(seq(bool[2]))"])
def test_types_read_back(text: str) -> None:
    type_ = parse_type(text)
    assert parse_type(str(type_)) == type_


def test_types_print_their_nesting() -> None:
    assert str(OptionalType(SequenceType(TensorType(DType.BOOL, (2,))))) == "optional(seq(bool[2]))"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("%x, %w", "%x, %nothing", "line 7: value %nothing is not defined"),
        ("float32[n,4]", "float99[n,4]", "unknown element type 'float99'"),
        ("%y : float32[n,2] =", "%x : float32[n,2] =", "value %x is defined twice"),
        ("[1.0, 2.0", "@64 [1.0, 2.0", "reaches past the 0 bytes"),
        ("output", "§", "unexpected character '§'"),
        ("graph @mlp {", "graph mlp {", "expected '@', got 'mlp'"),
        ("  output %z\n}\n", "  output %z\n", "expected"),
    ],
)
def test_malformed_text_names_the_line_and_the_reason(old: str, new: str, message: str) -> None:
    with pytest.raises(ModelError) as error:
        parse_graph(MLP.replace("_, %limit", "_").replace(old, new))
    assert message in str(error.value)
    assert "IR text line" in str(error.value)


def test_graphs_nested_without_end_are_refused() -> None:
    deep = "graph @g {\n %y : float32[] = Op() {a = " * 100
    with pytest.raises(ModelError, match="nested deeper than 64"):
        parse_graph(deep)


@pytest.mark.parametrize("name", ["1", "1.c", "/a.b/c", ".x", "//", "2_d0", "1e5", "inf", "_", "a\nb", "é", "12ab/3.4"])
def test_any_name_reads_back(name: str) -> None:
    graph = Graph("names")
    build = Builder(graph)
    x = build.input(name, TensorType(DType.FLOAT32, (2,)))
    graph.outputs = [build("Relu", x, name=f"{name}.y")]
    again = parse_graph(print_graph(graph))
    assert [value.name for value in again.values()] == [name, f"{name}.y"]
