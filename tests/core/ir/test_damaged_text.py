"""Damaged text of a graph gives a graph or ModelError, and damaged text of a type or dimension gives ValueError."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from lathe.core.errors import ModelError
from lathe.core.ir.dim import parse_dim, symbol
from lathe.core.ir.graph import Graph, Node, State, Value
from lathe.core.ir.text import Weights, parse_graph, print_graph
from lathe.core.ir.types import DType, MapType, OptionalType, SequenceType, TensorType, parse_type
from tests.random_numbers import RNG

_TOKEN = re.compile(r'"[^"]*"|[A-Za-z_0-9.]+|\s+|.')
_PARTS = (  # of the text, or foreign to it
    "", "[", "]", "(", ")", "{", "}", "%", "@", ",", ":", "=", "->", "_", "*", "//", "|", "-1", "300", "1.5", "inf",
    "9" * 30, "9" * 400, "1e300", "none", "true", "True", "type", "tensor", "graph", "const", "state", "output", "seq(",
    "map(string,", "n", "float32[", "int8[1]", "float16", "string", "complex64[2]", '"', 'b"', '"x"', 'b"6"', "\\", "é",
    "\0", "\ud800", "4//0", "1if", "[" * 3000, "seq(" * 3000, "(" * 3000, "-" * 10_000, "+1" * 10_000,
)  # fmt: skip


def everything() -> tuple[str, bytes]:
    """The text of a graph with every kind of line, type, attribute and array, and its weights."""
    n = symbol("n")
    x = Value("x", TensorType(DType.FLOAT32, (n, (n - 1) // 2, 3)))
    graph = Graph("odd name", inputs=[x])
    arrays = (
        np.array([0.1, -np.inf, np.nan], np.float32), np.array([1.5], np.float16), np.array([-3], np.int8),
        np.array([True, False]), np.array([1 + 2j], np.complex64), np.array(["a", b"\xff"], object),
        np.array([1.5], ml_dtypes.bfloat16), np.array([-3, 2], ml_dtypes.int4), np.zeros((2, 0), np.int64),
        np.arange(40, dtype=np.float32).reshape(8, 5), np.zeros((0, 40), np.float32),
    )  # fmt: skip
    constants = [graph.add_constant(array, f"c{index}") for index, array in enumerate(arrays)]
    graph.defaults[constants[0]] = TensorType(DType.FLOAT32, (n,))
    count = Value("count", TensorType(DType.INT64, ()))
    graph.states = [State(count, count, np.array(3))]
    inner = Value("inner", OptionalType(SequenceType(TensorType(DType.STRING, None))))
    attrs = {
        "a": 1, "b": -1.5, "c": "text", "d": b"\x01", "e": True, "f": None, "g": (1, n * 2 + 1, (-1, "x")),
        "h": DType.INT8, "i": MapType(DType.INT64, TensorType(DType.FLOAT16, (n,))),
        "j": Graph("body", [inner], [inner]),
        "k": np.arange(3), "l": np.arange(99),
    }  # fmt: skip
    node = Node("Anything", [x, None, constants[1]], [], attrs, "node")
    node.outputs = [Value("y", x.type, node), Value("/z/0", SequenceType(x.type), node)]
    graph.nodes, graph.outputs = [node], [*node.outputs]
    weights = Weights()
    return print_graph(graph, weights), weights.tobytes()


def damaged(text: str) -> str:
    """The text with one to three tokens or characters deleted, repeated, exchanged or replaced."""
    for _ in range(RNG.integers(1, 4)):
        parts = _TOKEN.findall(text) if RNG.random() < 0.7 else list(text)
        at, other = (int(place) for place in RNG.integers(0, len(parts), 2))
        match RNG.integers(0, 6):
            case 0:
                parts[at] = _PARTS[RNG.integers(0, len(_PARTS))]
            case 1:
                parts.insert(at, _PARTS[RNG.integers(0, len(_PARTS))])
            case 2:
                parts[at], parts[other] = parts[other], parts[at]
            case 3:
                parts[at] = parts[other]
            case 4:
                del parts[at : at + int(RNG.integers(1, 5))]
            case 5:
                del parts[at:]
        text = "".join(parts) or " "
    return text


def test_damaged_text_gives_a_graph_or_a_model_error() -> None:
    text, weights = everything()
    assert print_graph(parse_graph(text, weights), Weights()) == text
    read = 0
    for _ in range(1000):
        changed = damaged(text)
        try:
            parse_graph(changed, weights)
            read += 1
        except ModelError:
            pass
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} for {changed[:5000]!r}") from error
    assert 20 < read < 980


@pytest.mark.parametrize("parse", [parse_type, parse_dim])
def test_damaged_types_and_dimensions_give_a_value_error(parse: object) -> None:
    assert callable(parse)
    texts = ["map(int64,seq(float32[n,((n-1)//2)*m+3]))", "(((n)//(4))|(m*7-n))+12"]
    for index in range(2000):
        changed = damaged(texts[index % 2])
        try:
            parse(changed)
        except ValueError:
            pass
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} for {changed[:5000]!r}") from error


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("const %w : float32[n] = [1.0]", r"constant of type float32\[n\], expected a tensor of known shape"),
        ("const %w : float32[4//0] = [1.0]", "expected a tensor of known shape"),
        ("const %w : float32[*] = [1.0]", "expected a tensor of known shape"),
        ("const %w : seq(float32[1]) = [1.0]", r"constant of type seq\(float32\[1\]\), expected a tensor"),
        ("const %w : int8[1] = [300]", r"constant of type int8\[1\]: .*300"),
        ("const %w : int4[1] = [300]", r"constant of type int4\[1\]"),
        ("const %w : int8[1] = [1.5]", r"constant of type int8\[1\] has elements that are no int8"),
        ("const %w : bool[1] = [2]", "has elements that are no bool"),
        ("const %w : float16[1] = [1e300]", "overflow"),
        ("const %w : float32[1] = [none]", "has the element None"),
        ("const %w : float32[1] = [n]", "has the element SymDim"),
        ("const %w : string[1] = [1]", "has the element 1"),
        ("const %w : int8[-1] = [1]", "expected sizes from 0"),
        ("const %w : int8[0,99999999999999999999] = []", "at most 281474976710656 elements"),
        ("const %w : int8[2] = [1]", "reshape"),
        ('%y : float32[] = Op() {a = tensor float32[n] [1.0]}', "expected a tensor of known shape"),
        ("%y : float32[] = Op() {a = " + "[" * 3000, "nested deeper than 64"),
        ("input %y : " + "seq(" * 3000 + "bool[]" + ")" * 3000, "nested deeper than 64"),
        ("input %{ : bool[]", "expected a name, got '{'"),
        ("input %y : float32[1n]", "not a dimension: '1n'"),
    ],
)  # fmt: skip
def test_malformed_constants_and_types_name_the_reason(line: str, message: str) -> None:
    with pytest.raises(ModelError, match=f"IR text line 2: .*{message}"):
        parse_graph(f"graph @g {{\n  {line}\n}}\n")


def test_text_that_ends_early_is_refused_wherever_it_ends() -> None:
    text, weights = everything()
    for end in range(len(text.rstrip()) - 1):
        with pytest.raises(ModelError):
            parse_graph(text[:end], weights)
