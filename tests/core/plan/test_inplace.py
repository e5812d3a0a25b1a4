"""A result reuses the memory of an operand only if the kernel reads nothing else from that memory."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from lathe.core.ir.graph import Graph, Node, State, Value
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out
from lathe.core.ops.opdef.terms import Writer
from lathe.core.plan.kernel_choice import KernelChoice
from tests.core.small_models import assert_like_onnx_runtime, model, normal

N = symbol("n")
MATRIX = TensorType(DType.FLOAT32, (4, 8))
CONSTANTS = """
    int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] four = {4}, int64[1] five = {5},
    int64[1] six = {6}, int64[1] minus = {-1}, int64[1] least = {-9223372036854775807}, int64 trips = {3},
    float[8] scale = {1, 1, 1, 1, 1, 1, 1, 1}, float[8] bias = {-1, 0, 1, 2, 3, 4, 5, 6}
"""

# Nodes that combine a tensor h [N, 6, 8] with a part of itself.
PATTERNS = {
    "add the first token": "f = Slice(h, zero, one, one) r = Add(h, f)",
    "subtract from the last token": "f = Slice(h, five, six, one) r = Sub(f, h)",
    "subtract a gathered token": """
        i = Constant <value_int = 0> () f = Gather <axis = 1> (h, i) u = Unsqueeze(f, one) r = Sub(h, u)""",
    "subtract the flipped tensor": "f = Slice(h, minus, least, one, minus) r = Sub(h, f)",
    "choose": "f = Slice(h, zero, one, one) c = Greater(h, f) r = Where(c, h, f)",
    "scale a normalization": """
        f = Slice(h, zero, one, zero) g = Slice(f, zero, one, one) q = Squeeze(g)
        r = LayerNormalization <axis = -1> (h, q, bias)""",
}


def tokens(body: str) -> bytes:
    return model("float[N,6,8] x => float[N,6,8] y", body, CONSTANTS)


def batches(*sizes: int) -> list[dict[str, np.ndarray]]:
    return [{"x": normal(n, 6, 8)} for n in sizes]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("body", PATTERNS.values(), ids=PATTERNS)
def test_a_tensor_combined_with_a_part_of_itself(body: str, threads: int) -> None:
    """`h` lies in the arena, and so does `r`: something follows."""
    before, after = "h = LayerNormalization <axis = -1> (x, scale, bias)", "y = Softmax <axis = -1> (r)"
    assert_like_onnx_runtime(tokens(f"{before} {body} {after}"), *batches(1, 2, 7), threads=threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_product_of_a_part_and_the_residual(threads: int) -> None:
    """Every column of the result needs the first half of its row."""
    graph = Graph("g")
    writer = Writer(graph)
    x = writer.input("x", TensorType(DType.FLOAT32, (N, 96)))
    hidden = x.exp().sum((1,)) + x
    product = hidden.slice(1, 0, 48) @ writer.array(normal(48, 96))
    graph.outputs = [(product + hidden).op("Softmax", axis=1).value]
    with lathe.compile(graph, threads=threads, tune="off") as session:
        for rows in (1, 5, 40):
            feeds = {"x": normal(rows, 96)}
            for name, want in lathe.interpret(graph, feeds).items():
                np.testing.assert_allclose(session.run(feeds)[name], want, 1e-4, 1e-4)


def test_a_part_inside_the_body_of_a_loop() -> None:
    body = "e = Exp(s) f = Slice(e, zero, one, one) d = Sub(e, f) t = Tanh(d) k = Identity(c)"
    loop = f"v = Loop(trips, , h) <body = b (int64 i, bool c, float[N,6,8] s) => (bool k, float[N,6,8] t) {{{body}}}>"
    assert_like_onnx_runtime(tokens(f"h = Tanh(x) {loop} y = Neg(v)"), *batches(1, 3))


def test_a_part_that_the_body_of_a_loop_captures() -> None:
    body = "f = Slice(h, zero, one, one) d = Sub(s, f) k = Identity(c)"
    loop = f"v = Loop(trips, , h) <body = b (int64 i, bool c, float[N,6,8] s) => (bool k, float[N,6,8] d) {{{body}}}>"
    assert_like_onnx_runtime(tokens(f"h = Tanh(x) {loop} y = Neg(v)"), *batches(1, 3))


def test_a_part_inside_a_branch() -> None:
    then = "e = Exp(h) f = Slice(e, zero, one, one) d = Sub(e, f) r = Tanh(d)"
    other = "f = Slice(h, zero, one, one) r = Sub(h, f)"
    graphs = ", ".join(
        f"{name} = {name} () => (float[N,6,8] r) {{{body}}}"
        for name, body in (("then_branch", then), ("else_branch", other))
    )
    test = "t = ReduceSum <keepdims = 0> (h) z = Sub(t, t) c = Greater(t, z)"
    data = tokens(f"h = Tanh(x) {test} v = If(c) <{graphs}> y = Neg(v)")
    assert_like_onnx_runtime(data, {"x": normal(2, 6, 8)}, {"x": abs(normal(2, 6, 8))}, {"x": -abs(normal(2, 6, 8))})


@pytest.mark.parametrize("reduction", ["none", "add"])
@pytest.mark.parametrize(
    ("op", "shape"), [("ScatterND", (4, 1)), ("ScatterElements <axis = 0>", (4, 8))], ids=["rows", "elements"]
)
def test_a_tensor_scattered_into_itself(op: str, shape: tuple[int, int], reduction: str) -> None:
    """The updates are the tensor that they are written into, in the opposite order."""
    places = [3 - i // shape[1] for i in range(shape[0] * shape[1])]
    constants = f"int64[{shape[0]},{shape[1]}] places = {{{', '.join(map(str, places))}}}"
    name, _, axis = op.partition(" <")
    attributes = f'<reduction = "{reduction}"{", " + axis if axis else ">"}'
    body = f"h = Exp(x) r = {name} {attributes} (h, places, h) y = Neg(r)"
    data = model("float[4,8] x => float[4,8] y", body, constants)
    assert_like_onnx_runtime(data, {"x": normal(4, 8)})


def test_a_state_and_a_part_of_it() -> None:
    """The next value of a state does not overwrite the old one while the kernel reads the old one in another order."""
    graph = Graph("g")
    writer = Writer(graph)
    x = writer.input("x", MATRIX)
    value = Value("s", MATRIX)
    graph.states = [State(value, value, np.arange(32, dtype=np.float32).reshape(4, 8))]
    state = writer.term(value)
    sums = state.sum((1,))  # runs before the update, which reads it
    graph.states[0].update = (state - state.slice(0, -1, -5, -1) + x * sums).value
    graph.outputs = [sums.value]
    expected = np.arange(32, dtype=np.float32).reshape(4, 8)
    with lathe.compile(graph, threads=1, tune="off") as session:
        for seed in range(3):
            given = normal(4, 8, seed=seed)
            (found,) = session.run({"x": given}).values()
            wanted = expected.sum(1, keepdims=True)
            np.testing.assert_allclose(found, wanted, 1e-4, 1e-4)
            expected = expected - expected[::-1] + given * wanted


def custom_reader(views: bool, pointwise: bool, *indices: int) -> tuple[KernelChoice, Node]:
    """A node that reads, by index: a value, the same value, a view of it if `views`, another value."""
    value, view, other = Value("a", MATRIX), Value("v", MATRIX), Value("b", MATRIX)
    look = Node("Identity", [value], [view])
    view.producer = look
    given = [value, value, view if views else other, other]
    node = Node("Anything", [given[index] for index in indices], [])
    node.outputs = [Value("y", MATRIX, node)]
    operands = (*(In(i) for i in range(len(indices))), Out())
    call = KernelCall(KernelSpec(), operands, inplace=(0, 1), pointwise=pointwise)
    return KernelChoice([look, node], {node: call}), node


@pytest.mark.parametrize("pointwise", [True, False])
def test_other_operands_of_the_kernel(pointwise: bool) -> None:
    assert [KernelChoice.may_overwrite(*custom_reader(True, pointwise, 0, 3), index) for index in (0, 1, 2)] == [
        True,
        True,
        False,
    ]
    assert KernelChoice.may_overwrite(*custom_reader(True, pointwise, 0, 1), 0) == pointwise
    assert not KernelChoice.may_overwrite(*custom_reader(True, pointwise, 0, 2), 0)
    assert not KernelChoice.may_overwrite(*custom_reader(True, pointwise, 2, 0), 0)
