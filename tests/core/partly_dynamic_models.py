"""ONNX models [batch, length, 16] -> y in which some nodes have no dynamic-shape kernel and others have one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.core.onnx_writer import OnnxWriter

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
WIDTH = 16


class Partial(OnnxWriter):
    """Writes one model. Its nodes begin at `x`, and end at `y`."""

    def model(self) -> onnx.ModelProto:
        info = helper.make_tensor_value_info
        ports = [info("x", FLOAT, ["batch", "length", WIDTH])], [info("y", FLOAT, None)]
        graph = helper.make_graph(self.nodes, "partial", *ports, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)

    def linear(self, x: str, width: int = WIDTH, name: str = "") -> str:
        return self.op("MatMul", x, self.weight(WIDTH, width), name=name)

    def several(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> None:
        """A node of several outputs; "" is an unused one."""
        self.nodes.append(helper.make_node(kind, list(inputs), list(outputs), f"{kind}_{len(self.nodes)}", **attrs))

    def extent(self, axis: int, x: str = "x") -> str:
        return self.op("Gather", self.op("Shape", x), self.const(axis, np.int64), axis=0)

    def zeros(self) -> str:
        """[batch, 16]."""
        rows = self.op("Slice", self.op("Shape", "x"), self.ints(0), self.ints(1))
        return self.op("ConstantOfShape", self.op("Concat", rows, self.ints(WIDTH), axis=0))

    def branch(self, name: str, write: Callable[[OnnxWriter], str]) -> onnx.GraphProto:
        """A graph without inputs, whose output is the value that `write` returns."""
        inner = _Branch(name)
        output = write(inner)
        return helper.make_graph(inner.nodes, name, [], [helper.make_tensor_value_info(output, FLOAT, None)])


class _Branch(OnnxWriter):
    """Writes nodes whose names begin with that of the branch."""

    def __init__(self, name: str) -> None:
        super().__init__(0)
        self.name = name

    def op(self, kind: str, *inputs: str, name: str = "", **attrs: Any) -> str:
        return super().op(kind, *inputs, name=name or f"{self.name}_{kind}_{len(self.nodes)}", **attrs)


def lstm() -> onnx.ModelProto:
    w = Partial(1)
    turned = w.op("Transpose", w.linear("x"), perm=[1, 0, 2])
    weights = [w.const(w.rng.standard_normal(shape) * 0.3) for shape in ((1, 64, 16), (1, 64, 16), (1, 128))]
    w.several("LSTM", [turned, *weights], ["states"], hidden_size=16)
    w.linear(w.op("Transpose", w.op("Squeeze", "states", w.ints(1)), perm=[1, 0, 2]), name="y")
    return w.model()


def pooled() -> onnx.ModelProto:
    w = Partial(2)
    shown = w.op("LpPool", w.linear("x", 24), kernel_shape=[3], pads=[1, 1])
    w.op("Softmax", w.op("MatMul", shown, w.weight(24, 16)), axis=1, name="y")
    return w.model()


def non_zero() -> onnx.ModelProto:
    """Tokens whose largest number is above a limit, one after the other."""
    w = Partial(3)
    flat = w.op("Reshape", w.linear("x"), w.ints(-1, WIDTH))
    kept = w.op("Greater", w.op("ReduceMax", flat, w.ints(1), keepdims=0), w.const(0.5))
    rows = w.op("Squeeze", w.op("NonZero", kept), w.ints(0))
    w.op("Relu", w.linear(w.op("Gather", flat, rows, axis=0)), name="y")
    return w.model()


def scanned() -> onnx.ModelProto:
    w = Partial(4)
    turned, weight = w.op("Transpose", w.linear("x"), perm=[1, 0, 2]), w.weight(WIDTH, WIDTH)
    info = helper.make_tensor_value_info
    step = [
        helper.make_node("MatMul", ["before", weight], ["moved"]),
        helper.make_node("Add", ["moved", "slice"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["after"]),
        helper.make_node("Identity", ["after"], ["kept"]),
    ]
    ports = [[info(name, FLOAT, None) for name in names] for names in (["before", "slice"], ["after", "kept"])]
    body = helper.make_graph(step, "step", *ports)
    w.several("Scan", [w.zeros(), turned], ["last", "all"], body=body, num_scan_inputs=1)
    w.linear(w.op("Transpose", "all", perm=[1, 0, 2]), name="y")
    return w.model()


def _loop(w: Partial, limit: str, condition: str, until: float | None) -> onnx.ModelProto:
    """A loop of tanh(state * weights + first token); it ends once no state is above `until`."""
    info, weight, edge = helper.make_tensor_value_info, w.weight(WIDTH, WIDTH), w.const(until or 0)
    first = w.op("Gather", w.linear("x"), w.const(0, np.int64), axis=1)
    step = [
        helper.make_node("MatMul", ["before", weight], ["moved"]),
        helper.make_node("Add", ["moved", first], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["after"]),
        helper.make_node("Identity", ["after"], ["kept"]),
        helper.make_node("ReduceMax", ["after"], ["most"], keepdims=0),
        helper.make_node("Greater", ["most", edge], ["above"]),
        helper.make_node("Identity", ["goes" if until is None else "above"], ["go"]),
    ]
    given = [info("i", INT64, []), info("goes", BOOL, []), info("before", FLOAT, None)]
    made = [info("go", BOOL, []), info("after", FLOAT, None), info("kept", FLOAT, None)]
    w.several("Loop", [limit, condition, w.zeros()], ["last", "all"], body=helper.make_graph(step, "step", given, made))
    w.linear(w.op("Transpose", "all", perm=[1, 0, 2]), name="y")
    return w.model()


def looped() -> onnx.ModelProto:
    """A loop with one iteration per token."""
    w = Partial(5)
    return _loop(w, w.extent(1), w.const(True, bool), None)


def looped_until() -> onnx.ModelProto:
    """A loop that data end, at the latest after one iteration per token."""
    w = Partial(6)
    return _loop(w, w.extent(1), w.const(True, bool), 0.2)


def looped_on() -> onnx.ModelProto:
    """A loop that only data end, and that may therefore run for ever."""
    w = Partial(7)
    return _loop(w, "", w.const(True, bool), 0.2)


def chosen() -> onnx.ModelProto:
    """One of two branches, by the data."""
    w = Partial(8)
    hidden, weight, other = w.linear("x"), w.weight(WIDTH, WIDTH), w.weight(WIDTH, WIDTH)
    large = w.op("Greater", w.op("ReduceMax", "x", keepdims=0), w.const(2.5))
    then = w.branch("large", lambda inner: inner.op("Relu", inner.op("MatMul", hidden, weight)))
    other_one = w.branch("small", lambda inner: inner.op("Softmax", inner.op("MatMul", hidden, other), axis=1))
    w.linear(w.op("If", large, then_branch=then, else_branch=other_one), name="y")
    return w.model()


def shorter() -> onnx.ModelProto:
    """One branch returns half of the tokens, so their number is known only at run time."""
    w = Partial(9)
    hidden, weight = w.linear("x"), w.weight(WIDTH, WIDTH)
    large = w.op("Greater", w.op("ReduceMax", "x", keepdims=0), w.const(2.5))
    bounds = [w.ints(0), w.ints(2**31 - 1), w.ints(1), w.ints(2)]
    then = w.branch("large", lambda inner: inner.op("Slice", inner.op("MatMul", hidden, weight), *bounds))
    other = w.branch("small", lambda inner: inner.op("Sigmoid", hidden))
    w.linear(w.op("If", large, then_branch=then, else_branch=other), name="y")
    return w.model()


def squeezed() -> onnx.ModelProto:
    """Two branches of different ranks, as TorchScript writes `squeeze(1)`."""
    w = Partial(10)
    hidden = w.linear("x")
    one, axis = w.op("Equal", w.extent(1), w.const(1, np.int64)), w.ints(1)
    then = w.branch("one", lambda inner: inner.op("Squeeze", hidden, axis))
    other = w.branch("more", lambda inner: inner.op("Identity", hidden))
    w.linear(w.op("If", one, then_branch=then, else_branch=other), name="y")
    return w.model()


def stretched() -> onnx.ModelProto:
    """A Resize with antialiasing, whose kernel needs known sizes."""
    w = Partial(11)
    longer = w.op("Add", w.op("Slice", w.op("Shape", "x"), w.ints(1), w.ints(2)), w.ints(2))
    sizes = w.op(
        "Concat", w.op("Slice", w.op("Shape", "x"), w.ints(0), w.ints(1)), w.ints(1), longer, w.ints(WIDTH), axis=0
    )
    image = w.op("Unsqueeze", w.linear("x"), w.ints(1))
    resized = w.op("Resize", image, "", "", sizes, mode="linear", antialias=1)
    w.op("Add", w.linear(w.op("Squeeze", resized, w.ints(1))), w.const(1.0), name="y")
    return w.model()


def viewed() -> onnx.ModelProto:
    """A node without a kernel reads a view of a value that other nodes read too."""
    w = Partial(12)
    hidden = w.linear("x")
    flat = w.op("Reshape", hidden, w.ints(-1, WIDTH))
    shown = w.op("LpPool", w.op("Unsqueeze", flat, w.ints(0)), kernel_shape=[3], pads=[1, 1])
    back = w.op("Reshape", w.op("Relu", shown), w.op("Shape", hidden))
    w.op("Add", w.op("Add", back, hidden), w.op("Reshape", flat, w.op("Shape", "x")), name="y")
    return w.model()


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    make.__name__: make
    for make in (
        lstm, pooled, non_zero, scanned, looped, looped_until, looped_on, chosen, shorter, squeezed, stretched, viewed,
    )
}  # fmt: skip


def feeds(rows: int, length: int, largest: float = 2.0) -> dict[str, np.ndarray[Any, Any]]:
    """Random numbers whose maximum is `largest`."""
    x = np.random.default_rng((rows, length)).standard_normal((rows, length, WIDTH)).astype(np.float32)
    x = np.minimum(x, np.float32(largest))
    x[0, -1, 0] = largest
    return {"x": x}
