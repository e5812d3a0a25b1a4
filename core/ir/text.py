"""The textual form of graphs: `print_graph` writes it, and `parse_graph` reads a graph of the same text.

    graph @mlp {
      input %x : float32[n,4]
      const %w : float32[4,2] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
      const %big : float32[512,512] = @4096
      default %w : float32[k,2]
      state %count : int64[] = [0] -> %count.next
      %y : float32[n,2] = MatMul(%x, %w) "layer1"
      %z : float32[n,2] = Elementwise(%y) {body = graph @relu { ... }}
      %u : float32[n,2] = Exp(%x) "layer2" on "cuda:1" after %y, %z
      output %z
    }

`default` names a constant that a run may replace, and the type that the replacement may have.

`on` names the device that must run a node, and `after` the values of its control edges.

An absent optional input prints as `_`. A large array, that is one of more than `INLINE_LIMIT` elements that are not
strings, prints as an offset into a separate block of bytes (row-major, little-endian), which `Weights` collects. This
holds for constants, initial states and attributes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import ModelError
from lathe.core.ir.dim import SymDim, parse_dim
from lathe.core.ir.graph import Array, Attr, Graph, Node, State, Value
from lathe.core.ir.types import DType, MapType, OptionalType, SequenceType, TensorType, ValueType, parse_type

INLINE_LIMIT = 32
_ALIGNMENT = 64
_MAX_DEPTH = 64
_MAX_ELEMENTS = 1 << 48  # beyond the address space of today's machines; NumPy needs sizes of less than 64 bits
_PLAIN_NAME = re.compile(r"\d+|/?(?!inf|nan)[A-Za-z_][A-Za-z0-9_.$/]*")  # other names are quoted


@dataclass
class Weights:
    """The bytes of a graph's large arrays, one after the other, each aligned to 64 bytes."""

    chunks: list[bytes | memoryview] = field(default_factory=list)  # views: `tobytes` makes the only copy
    size: int = 0

    def add(self, array: Array) -> int:
        """Append an array, of which a view is kept if it is contiguous, and return its offset in bytes."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        offset = self.size
        padding = -len(data) % _ALIGNMENT
        self.chunks += [data, b"\0" * padding]
        self.size += len(data) + padding
        return offset

    def tobytes(self) -> bytes:
        return b"".join(self.chunks)


def print_graph(graph: Graph, weights: Weights | None = None) -> str:
    """The graph as text. Large arrays are appended to `weights`; if it is None, they print as `...`.

    `parse_graph` refuses text with `...`. TypeError for an attribute that has no textual form.
    """
    return "\n".join(_graph_lines(graph, weights, "")) + "\n"


def parse_graph(text: str, weights: bytes | memoryview | NDArray[np.uint8] = b"") -> Graph:
    """Parse the text of `print_graph`. ModelError with the number of the line if the text is malformed.

    `weights` are the bytes that `Weights` collected. Large arrays are read-only views of `weights`, not copies.
    """
    return _Parser(text, weights).parse()


def _graph_lines(graph: Graph, weights: Weights | None, indent: str) -> Iterator[str]:
    inner = indent + "  "
    yield f"{indent}graph @{_quote_name(graph.name)} {{"
    for value in graph.inputs:
        yield f"{inner}input {_define(value)}"
    for value, array in graph.constants.items():
        yield f"{inner}const {_define(value)} = {_literal(array, weights)}"
    for value, type_ in graph.defaults.items():
        yield f"{inner}default {_use(value)} : {type_}"
    for state in graph.states:
        yield f"{inner}state {_define(state.value)} = {_literal(state.initial, weights)} -> {_use(state.update)}"
    for node in graph.nodes:
        yield inner + _node_text(node, weights, inner)
    if graph.outputs:
        yield f"{inner}output {', '.join(map(_use, graph.outputs))}"
    yield f"{indent}}}"


def _node_text(node: Node, weights: Weights | None, indent: str) -> str:
    outputs = ", ".join(map(_define, node.outputs))
    inputs = ", ".join("_" if value is None else _use(value) for value in node.inputs)
    attrs = ", ".join(f"{key} = {_attr(node.attrs[key], weights, indent)}" for key in sorted(node.attrs))
    label = f" {json.dumps(node.name)}" if node.name else ""
    place = f" on {json.dumps(node.device)}" if node.device else ""
    after = f" after {', '.join(map(_use, node.after))}" if node.after else ""
    return f"{outputs} = {node.op}({inputs})" + (f" {{{attrs}}}" if attrs else "") + label + place + after


def _define(value: Value) -> str:
    return f"{_use(value)} : {value.type}"


def _use(value: Value) -> str:
    return f"%{_quote_name(value.name)}"


def _quote_name(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(name)


def _attr(attr: Attr, weights: Weights | None, indent: str) -> str:
    match attr:
        case bool():
            return "true" if attr else "false"
        case int() | SymDim():
            return str(attr)
        case float():
            return _float_text(attr)
        case str():
            return json.dumps(attr)
        case bytes():
            return f"b{json.dumps(attr.hex())}"
        case None:
            return "none"
        case DType():
            return f"type {attr}"
        case TensorType() | SequenceType() | OptionalType() | MapType():
            return f"type {attr}"
        case Graph():
            return "\n".join(_graph_lines(attr, weights, indent)).lstrip()
        case np.ndarray():
            return f"tensor {DType.from_numpy(attr.dtype)}[{','.join(map(str, attr.shape))}] {_literal(attr, weights)}"
        case tuple() | list():
            return "[" + ", ".join(_attr(item, weights, indent) for item in attr) + "]"
    raise TypeError(f"attribute of type {type(attr).__name__} has no textual form")


def _float_text(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def _literal(array: Array, weights: Weights | None) -> str:
    if array.dtype == object:
        return "[" + ", ".join(_string_text(item) for item in array.ravel().tolist()) + "]"
    if array.size > INLINE_LIMIT:
        return f"@{weights.add(array)}" if weights is not None else "..."
    if array.dtype.kind in "fV" and array.dtype.itemsize <= 8:
        return "[" + ", ".join(_float_text(float(item)) for item in array.ravel()) + "]"
    if array.dtype.kind == "c":
        return "[" + ", ".join(f"{_float_text(z.real)}, {_float_text(z.imag)}" for z in array.ravel().tolist()) + "]"
    return "[" + ", ".join(str(int(item)) for item in array.ravel()) + "]"


def _string_text(item: Any) -> str:
    return f"b{json.dumps(item.hex())}" if isinstance(item, bytes) else json.dumps(str(item))


_TOKEN = re.compile(
    r"""(?P<space>[ \t]+)|(?P<newline>\n)|(?P<string>b?"(?:[^"\\\n]|\\.)*")|(?P<arrow>->)
    |(?P<number>-?(?:inf\b|nan\b|\d+(?:\.\d+)?(?:e[+-]?\d+)?))
    |(?P<word>[A-Za-z_][A-Za-z0-9_.$/]*)|(?P<punct>[%@{}()\[\]=:,+*/|\-]|//)""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int
    start: int
    end: int


class _Parser:
    """A recursive-descent parser. `scopes` has the values by name of each enclosing graph, the innermost last."""

    def __init__(self, text: str, weights: Any) -> None:
        self.text = text
        self.weights = weights
        self.tokens = list(self._tokenize(text))
        self.at = 0
        self.depth = 0  # of graphs and lists
        self.scopes: list[dict[str, Value]] = []

    def _tokenize(self, text: str) -> Iterator[_Token]:
        line, at = 1, 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ModelError(f"unexpected character {text[at]!r}", where=f"IR text line {line}")
            kind = match.lastgroup or ""
            if kind not in ("space", "newline"):
                yield _Token(kind, match.group(), line, match.start(), match.end())
            line += kind == "newline"
            at = match.end()
        yield _Token("end", "", line, at, at)

    def parse(self) -> Graph:
        try:
            graph = self._graph()
        except ValueError as error:
            line = self.tokens[max(self.at - 1, 0)].line
            raise ModelError(str(error), where=f"IR text line {line}") from error
        self._expect_kind("end")
        return graph

    @property
    def _next(self) -> _Token:
        return self.tokens[self.at]

    def _fail(self, message: str) -> Any:
        raise ModelError(message, where=f"IR text line {self._next.line}")

    def _take(self) -> _Token:
        """Take the next token. The token of the end stays the next one, so there always is a next token."""
        token = self._next
        self.at += token.kind != "end"
        return token

    def _accept(self, text: str) -> bool:
        if self._next.text == text and self._next.kind != "string":
            self.at += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            self._fail(f"expected {text!r}, got {self._next.text!r}")

    def _expect_kind(self, kind: str) -> _Token:
        if self._next.kind != kind:
            self._fail(f"expected a {kind}, got {self._next.text!r}")
        return self._take()

    def _name(self) -> str:
        if self._next.kind == "string":
            return str(json.loads(self._take().text))
        first = self._next
        if not re.match(r"[A-Za-z0-9_/]", first.text):
            self._fail(f"expected a name, got {first.text!r}")
        end = self._take().end
        while self._next.start == end and re.fullmatch(r"[A-Za-z0-9_.$/]+", self._next.text):
            end = self._take().end
        return self.text[first.start : end]

    def _type_text(self, *stops: str) -> str:
        """Take the tokens up to one of `stops` outside brackets, a closing bracket or the end; return their text."""
        start, depth = self._next.start, 0
        while self._next.kind != "end" and not (depth == 0 and self._next.text in stops):
            depth += (self._next.text in "([") - (self._next.text in ")]") if self._next.text else 0
            if depth < 0:
                break
            self._take()
        return self.text[start : self.tokens[self.at - 1].end]

    def _graph(self) -> Graph:
        self._enter()
        self._expect("graph")
        self._expect("@")
        graph = Graph(self._name())
        self.scopes.append({})
        self._expect("{")
        pending: list[tuple[Value, str, Array]] = []
        while not self._accept("}"):
            self._line(graph, pending)
        graph.states = [State(value, self._lookup(update), initial) for value, update, initial in pending]
        self.scopes.pop()
        self.depth -= 1
        return graph

    def _enter(self) -> None:
        """Count a graph or list that begins inside another one. ModelError beyond `_MAX_DEPTH`."""
        if self.depth >= _MAX_DEPTH:
            self._fail(f"graphs and lists are nested deeper than {_MAX_DEPTH}")
        self.depth += 1

    def _line(self, graph: Graph, pending: list[tuple[Value, str, Array]]) -> None:
        if self._accept("input"):
            graph.inputs.append(self._definition(*_LINES))
        elif self._accept("const"):
            value = self._definition("=")
            self._expect("=")
            graph.constants[value] = self._array(value.type)
        elif self._accept("default"):
            self._default(graph)
        elif self._accept("state"):
            value = self._definition("=")
            self._expect("=")
            initial = self._array(value.type)
            self._expect("->")
            self._expect("%")
            pending.append((value, self._name(), initial))
        elif self._accept("output"):
            graph.outputs = list(self._uses())
        else:
            graph.nodes.append(self._node())

    def _default(self, graph: Graph) -> None:
        value = self._use()
        self._expect(":")
        given = parse_type(self._type_text(*_LINES))
        if value not in graph.constants or not isinstance(given, TensorType):
            self._fail(f"default %{value.name} : {given}, expected a constant of this graph and a tensor type")
        else:
            graph.defaults[value] = given

    def _definition(self, *stops: str) -> Value:
        self._expect("%")
        name = self._name()
        self._expect(":")
        value = Value(name, parse_type(self._type_text(*stops)))
        if name in self.scopes[-1]:
            self._fail(f"value %{name} is defined twice")
        self.scopes[-1][name] = value
        return value

    def _use(self) -> Value:
        self._expect("%")
        return self._lookup(self._name())

    def _uses(self) -> Iterator[Value]:
        yield self._use()
        while self._accept(","):
            yield self._use()

    def _lookup(self, name: str) -> Value:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return self._fail(f"value %{name} is not defined")

    def _node(self) -> Node:
        outputs = [self._definition(",", "=")]
        while self._accept(","):
            outputs.append(self._definition(",", "="))
        self._expect("=")
        node = Node(self._expect_kind("word").text, [], outputs)
        self._expect("(")
        while not self._accept(")"):
            node.inputs.append(None if self._accept("_") else self._use())
            if self._next.text != ")":
                self._expect(",")
        if self._accept("{"):
            node.attrs = dict(self._attr_items())
        if self._next.kind == "string":
            node.name = str(json.loads(self._take().text))
        if self._accept("on"):
            node.device = str(json.loads(self._expect_kind("string").text))
        if self._accept("after"):
            node.after = tuple(self._uses())
        for output in outputs:
            output.producer = node
        return node

    def _attr_items(self) -> Iterator[tuple[str, Attr]]:
        while not self._accept("}"):
            key = self._expect_kind("word").text
            self._expect("=")
            yield key, self._attr_value(",", "}")
            if self._next.text != "}":
                self._expect(",")

    def _attr_value(self, *stops: str) -> Attr:
        token = self._next
        if token.kind == "string":
            return self._string(self._take().text)
        if token.text in _KEYWORDS:
            self._take()
            return _KEYWORDS[token.text]
        if token.text == "graph":
            return self._graph()
        if token.text == "type":
            self._take()
            text = self._type_text(*stops)
            return parse_type(text) if "[" in text else DType.parse(text)
        if token.text == "tensor":
            self._take()
            start = self._take().start
            self._expect("[")
            while not self._accept("]"):
                if self._take().kind == "end":
                    self._fail("expected ']', got the end")
            return self._array(parse_type(self.text[start : self.tokens[self.at - 1].end]))
        if self._accept("["):
            return tuple(self._list_items())
        return _number(self._type_text(*stops))

    def _list_items(self) -> Iterator[Attr]:
        """Yield the items of a list after its opening bracket."""
        self._enter()
        while not self._accept("]"):
            yield self._attr_value(",", "]")
            if self._next.text != "]":
                self._expect(",")
        self.depth -= 1

    def _string(self, text: str) -> str | bytes:
        return bytes.fromhex(json.loads(text[1:])) if text.startswith("b") else str(json.loads(text))

    def _array(self, type_: ValueType) -> Array:
        if not isinstance(type_, TensorType) or not type_.is_static:
            raise ValueError(f"constant of type {type_}, expected a tensor of known shape")
        dtype, shape = type_.dtype, type_.evaluate({})
        if min(shape, default=0) < 0 or math.prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
            raise ValueError(f"constant of type {type_}, expected sizes from 0, and at most {_MAX_ELEMENTS} elements")
        if self._accept("@"):
            return self._stored_constant(int(self._expect_kind("number").text), dtype, shape)
        self._expect("[")
        items: list[Any] = list(self._list_items())
        expected = str | bytes if dtype is DType.STRING else int | float
        wrong = [item for item in items if isinstance(item, bool) or not isinstance(item, expected)]
        if wrong:
            raise ValueError(f"constant of type {type_} has the element {wrong[0]!r}")
        try:
            if dtype in (DType.COMPLEX64, DType.COMPLEX128):
                items = [complex(re, im) for re, im in zip(items[::2], items[1::2], strict=True)]
            array = np.empty(len(items), dtype=dtype.numpy)
            with np.errstate(over="raise"):
                array[:] = items
        except (TypeError, OverflowError, FloatingPointError) as error:
            raise ValueError(f"constant of type {type_}: {error}") from error
        if (dtype.is_integer or dtype is DType.BOOL) and [int(item) for item in array] != items:
            raise ValueError(f"constant of type {type_} has elements that are no {dtype}")
        array = array.reshape(shape)
        array.setflags(write=False)
        return array

    def _stored_constant(self, offset: int, dtype: DType, shape: tuple[int, ...]) -> Array:
        count = math.prod(shape)
        if offset < 0 or offset + count * dtype.itemsize > len(self.weights):
            self._fail(f"constant at offset {offset} reaches past the {len(self.weights)} bytes of weights")
        array = np.frombuffer(self.weights, dtype.numpy, count, offset).reshape(shape)
        array.setflags(write=False)
        return array


_LINES = ("const", "default", "input", "state", "output", "%", "}")  # the tokens that can begin a line of a graph
_KEYWORDS: dict[str, Attr] = {"true": True, "false": False, "none": None}


def _number(text: str) -> int | float | SymDim:
    if re.fullmatch(r"-?(?:inf|nan|\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+)", text):
        return float(text)
    return parse_dim(text)
