"""Which sequence models can be packed, and that packed runs equal runs of each sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.text import parse_graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.passes.proofs.pack import Packed, pack
from lathe.core.plan.plan import Port
from lathe.core.reference import interpret
from lathe.core.runtime.session.packed import Feed, PackedRuns

WIDTH = 4


class Interpreted:
    """Runs a graph on the reference operators, in place of the compiled code that PackedRuns expects."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        ports = [tuple(Port(value.name, value.type, 0) for value in side) for side in (graph.inputs, graph.outputs)]
        self.plan = SimpleNamespace(inputs=ports[0], outputs=ports[1])

    def run(self, n: int, arrays: Sequence[Any]) -> list[Any]:
        feeds = {port.name: array for port, array in zip(self.plan.inputs, arrays, strict=True)}
        return list(interpret(self.graph, feeds).values())


def packed_runs(graph: Graph, packed: Packed, capacity: int) -> PackedRuns:
    rest = packed.sequences.clone({"batch": symbol("n")}) if packed.sequences is not None else None
    parts: Any = [Interpreted(part) if part is not None else None for part in (packed.tokens, rest)]
    return PackedRuns(*parts, [value.name for value in graph.outputs], capacity)


def check(graph: Graph, shapes: Sequence[tuple[int, int]], capacity: int) -> None:
    """AssertionError if a packed run differs from separate runs of each feed (rows and tokens given)."""
    packed = pack(graph)
    assert isinstance(packed, Packed), packed
    rng = np.random.default_rng(len(shapes))
    feeds = [{"x": rng.standard_normal((*shape, WIDTH)).astype(np.float32)} for shape in shapes]
    found = packed_runs(graph, packed, capacity).run([Feed(feed, *feed["x"].shape[:2]) for feed in feeds])
    for feed, outputs in zip(feeds, found, strict=True):
        for name, expected in interpret(graph, feed).items():
            assert outputs[name].shape == expected.shape
            np.testing.assert_allclose(outputs[name], expected, rtol=1e-4, atol=1e-5)


# Programs of steps. Each step computes a value [batch, sequence, 4] from two such values; the last steps (UNSAFE) mix
# tokens in ways that must be detected, whatever comes before and after them.


class Program:
    def __init__(self) -> None:
        self.graph = Graph("program")
        self.b = Builder(self.graph)
        self.rng = np.random.default_rng(0)
        self.x = self.b.input("x", TensorType(DType.FLOAT32, (symbol("batch"), symbol("sequence"), WIDTH)))
        self.length = self.b("Gather", self.b("Shape", self.x), self.b.constant(1), axis=0)

    def weight(self, *shape: int) -> Value:
        return self.b.constant(self.rng.standard_normal(shape).astype(np.float32) / 2)

    def places(self) -> Value:
        return self.b("Range", self.b.constant(0), self.length, self.b.constant(1))

    def axes(self, *axes: int) -> Value:
        return self.b.constant(np.array(axes, np.int64))


def linear(p: Program, x: Value, y: Value) -> Value:
    return p.b("Add", p.b("MatMul", x, p.weight(WIDTH, WIDTH)), y)


def normalized(p: Program, x: Value, y: Value) -> Value:
    return p.b("LayerNormalization", x, p.weight(WIDTH), p.weight(WIDTH), axis=-1)


def gated(p: Program, x: Value, y: Value) -> Value:
    return p.b("Mul", p.b("Tanh", x), p.b("Sigmoid", y))


def attended(p: Program, x: Value, y: Value, bias: Value | None = None) -> Value:
    scores = p.b("MatMul", x, p.b("Transpose", y, perm=(0, 2, 1)))
    scores = scores if bias is None else p.b("Add", scores, bias)
    return p.b("MatMul", p.b("Softmax", scores, axis=-1), p.b("MatMul", y, p.weight(WIDTH, WIDTH)))


def attended_causally(p: Program, x: Value, y: Value) -> Value:
    place = p.places()
    later = p.b("Less", p.b("Unsqueeze", place, p.axes(1)), p.b("Unsqueeze", place, p.axes(0)))
    far, none = (p.b.constant(np.array(value, np.float32)) for value in (-1e9, 0))
    return attended(p, x, y, p.b("Where", later, far, none))


def attended_near(p: Program, x: Value, y: Value) -> Value:
    """Attention by a triangle of values computed from each token."""
    shape = p.b("Concat", *[p.b("Unsqueeze", p.length, p.axes(0))] * 2, axis=0)
    return attended(p, x, y, p.b("Trilu", p.b("ConstantOfShape", shape, value=np.array([3.0], np.float32)), upper=0))


def in_heads(p: Program, x: Value, y: Value) -> Value:
    heads = [p.b("Transpose", p.b("Reshape", v, p.axes(0, 0, 2, 2)), perm=(0, 2, 1, 3)) for v in (x, y)]
    scores = p.b("MatMul", heads[0], p.b("Transpose", heads[1], perm=(0, 1, 3, 2)))
    mixed = p.b("MatMul", p.b("Softmax", scores, axis=-1), heads[0])
    return p.b("Reshape", p.b("Transpose", mixed, perm=(0, 2, 1, 3)), p.axes(0, 0, WIDTH))


def placed(p: Program, x: Value, y: Value) -> Value:
    return p.b("Add", x, p.b("Gather", p.weight(40, WIDTH), p.places(), axis=0))


def from_a_table(p: Program, x: Value, y: Value) -> Value:
    stop = p.b("Unsqueeze", p.length, p.axes(0))
    return p.b("Mul", x, p.b("Slice", p.weight(1, 40, WIDTH), p.axes(0), stop, p.axes(1)))


def counted(p: Program, x: Value, y: Value) -> Value:
    positive = p.b("Cast", p.b("Greater", x, p.b.constant(np.array(0, np.float32))), to=DType.INT64.onnx_code)
    return p.b("Add", y, p.b("Cast", p.b("CumSum", positive, p.b.constant(1)), to=DType.FLOAT32.onnx_code))


def convolved(p: Program, x: Value, y: Value) -> Value:
    """A grouped convolution of three tokens at a distance of two, then one of the token and the three before it."""
    channels = p.b("Transpose", x, perm=(0, 2, 1))
    wide = p.b("Conv", channels, p.weight(6, 2, 3), p.weight(6), group=2, dilations=(2,), pads=(2, 2))
    summed = p.b("Conv", p.b("Tanh", wide), p.weight(WIDTH, 6, 4), pads=(3, 0))
    return p.b("Add", p.b("Transpose", summed, perm=(0, 2, 1)), y)


def convolved_as_images(p: Program, x: Value, y: Value) -> Value:
    """A 2-D convolution over lines that are tokens, with windows that overlap along the columns."""
    picture = p.b("Reshape", x, p.axes(0, 1, -1, WIDTH))
    sums = p.b("Conv", picture, p.weight(2, 1, 5, 3), pads=(2, 1, 2, 0), strides=(1, 2))
    return p.b("Add", p.b("Reshape", p.b("Transpose", sums, perm=(0, 2, 1, 3)), p.axes(0, 0, WIDTH)), y)


def beside_others(p: Program, x: Value, y: Value) -> Value:
    """The next token of x times x, minus the previous token of y."""
    cut = p.b("Slice", x, p.axes(1), p.axes(2**40), p.axes(1))
    after = p.b("Pad", cut, p.axes(0, 0, 0, 0, 1, 0), p.b.constant(np.array(0.5, np.float32)))
    before = p.b("Pad", p.b("Slice", y, p.axes(0), p.axes(-1), p.axes(1)), p.axes(0, 1, 0, 0, 0, 0))
    return p.b("Sub", p.b("Mul", after, x), before)


def moved_far(p: Program, x: Value, y: Value) -> Value:
    """A shift for which a sequence of one token is too short."""
    cut = p.b("Slice", x, p.axes(2), p.axes(2**40), p.axes(1))
    return p.b("Add", p.b("Pad", cut, p.axes(0, 0, 0, 0, 2, 0)), y)


def cleared(p: Program, x: Value, y: Value) -> Value:
    """x with zeros for the first token, plus y."""
    cut = p.b("Slice", x, p.axes(1), p.axes(2**40), p.axes(1))
    return p.b("Add", p.b("Pad", cut, p.axes(0, 1, 0, 0, 0, 0)), y)


def centred(p: Program, x: Value, y: Value) -> Value:
    return p.b("Sub", x, p.b("ReduceMean", x, p.axes(1), keepdims=1))


def weighed(p: Program, x: Value, y: Value) -> Value:
    return p.b("Mul", x, p.b("Softmax", y, axis=1))


def shifted(p: Program, x: Value, y: Value) -> Value:
    first = p.b("Slice", x, p.axes(0), p.axes(1), p.axes(1))
    return p.b("Concat", p.b("Slice", x, p.axes(1), p.axes(2**40), p.axes(1)), first, axis=1)


def correlated(p: Program, x: Value, y: Value) -> Value:
    return p.b("MatMul", x, p.b("MatMul", p.b("Transpose", x, perm=(0, 2, 1)), y))


def unmasked(p: Program, x: Value, y: Value) -> Value:
    """Attention weights that are not zero between sequences: the exponential of a softmax."""
    scores = p.b("MatMul", x, p.b("Transpose", y, perm=(0, 2, 1)))
    return p.b("MatMul", p.b("Exp", p.b("Softmax", scores, axis=-1)), y)


def folded(p: Program, x: Value, y: Value) -> Value:
    return p.b("Reshape", p.b("Transpose", x, perm=(0, 2, 1)), p.b("Shape", x))


def scaled(p: Program, x: Value, y: Value) -> Value:
    return p.b("Div", x, p.b("Cast", p.length, to=DType.FLOAT32.onnx_code))


def backwards(p: Program, x: Value, y: Value) -> Value:
    return p.b("Slice", x, p.axes(-1), p.axes(-(2**40)), p.axes(1), p.axes(-1))


def chosen(p: Program, x: Value, y: Value) -> Value:
    """x plus the row of a table that the length selects."""
    length = p.b("Unsqueeze", p.length, p.axes(0))
    return p.b("Add", x, p.b("Slice", p.weight(40, WIDTH), length, p.b("Add", length, p.axes(1)), p.axes(0)))


def cut(p: Program, x: Value, y: Value) -> Value:
    """x times the lower triangle of a matrix, up to the diagonal that the length selects."""
    return p.b("MatMul", x, p.b("Trilu", p.weight(WIDTH, WIDTH), p.length, upper=0))


SAFE: list[Callable[..., Value]] = [
    linear, normalized, gated, attended, attended_causally, attended_near, in_heads, placed, from_a_table, counted,
    convolved, convolved_as_images, beside_others,
]  # fmt: skip
UNSAFE: list[Callable[..., Value]] = [
    centred,
    weighed,
    shifted,
    moved_far,
    cleared,
    correlated,
    unmasked,
    folded,
    scaled,
    backwards,
    chosen,
    cut,
]


def pooled(p: Program, x: Value, kind: str) -> Value:
    if kind in ("first", "last"):
        end = p.b("Gather", x, p.b.constant(0 if kind == "first" else -1), axis=1)
        return p.b("Gemm", end, p.weight(WIDTH, 3))
    if kind in ("greatest", "least"):
        number = p.b("Cast", p.b("Mul", p.x, p.b.constant(np.array(2, np.float32))), to=DType.INT64.onnx_code)
        numbers = p.b("Gather", number, p.b.constant(0), axis=2)  # not of `x`, which is rounded differently when packed
        if kind == "greatest":
            at = p.b("ArgMax", numbers, axis=1, keepdims=0)
        else:
            at = p.b("ArgMin", numbers, axis=-1, keepdims=0, select_last_index=1)
        return p.b("MatMul", p.b("GatherND", x, p.b("Unsqueeze", at, p.axes(1)), batch_dims=1), p.weight(WIDTH, 3))
    return p.b("MatMul", p.b(kind, x, p.axes(1), keepdims=0), p.weight(WIDTH, 3))


POOLS = ["first", "last", "greatest", "least", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"]


def program(steps: Sequence[tuple[Callable[..., Value], int]], pools: Sequence[str]) -> Graph:
    """Every step works on the latest value and on an earlier one."""
    p = Program()
    values = [p.x]
    for step, back in steps:
        values.append(step(p, values[-1], values[-1 - back % len(values)]))
    outputs = [values[-1], *(pooled(p, values[-1], kind) for kind in pools)]
    p.graph.outputs = [p.b("Identity", value) for value in outputs]
    p.graph.remove_dead()
    return p.graph


SHAPES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=6)
STEPS = st.lists(st.tuples(st.sampled_from(SAFE), st.integers(0, 5)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(STEPS, st.lists(st.sampled_from(POOLS), max_size=2), SHAPES, st.integers(1, 40))
def test_packed_programs_equal_runs_of_each_sequence_alone(
    steps: list[tuple[Callable[..., Value], int]], pools: list[str], shapes: list[tuple[int, int]], capacity: int
) -> None:
    check(program(steps, pools), shapes, capacity)


@settings(max_examples=40)
@given(STEPS, st.sampled_from(UNSAFE), STEPS)
def test_mixing_of_tokens_is_detected_anywhere_in_a_model(
    before: list[Any], mixing: Callable[..., Value], after: list[Any]
) -> None:
    assert isinstance(pack(program([*before, (mixing, 0), *after], [])), str)


REFUSED = {
    "the mean is used again for every token": (centred, "a value of whole sequences with a value of tokens"),
    "a softmax over the tokens": (weighed, "Softmax works along the token axis"),
    "tokens move to other places": (shifted, "Slice works along the token axis"),
    "tokens move by two places": (moved_far, "Slice works along the token axis"),
    "tokens are cut off": (cleared, "Slice works along the token axis"),
    "a sum over the tokens": (correlated, "MatMul sums over the token axis"),
    "weights between sequences": (unmasked, "a value for pairs of tokens in a way that attention does not"),
    "tokens in another order": (folded, "Reshape spreads or joins tokens"),
    "the length as a number": (scaled, "computes with the number of tokens"),
    "a table by the length": (chosen, "computes with the number of tokens (attribute starts)"),
    "a triangle by the length": (cut, "computes with the number of tokens (input 1, k)"),
    "the last token first": (backwards, "Slice works along the token axis"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_with_a_reason_that_names_the_node(case: str) -> None:
    mixing, reason = REFUSED[case]
    answer = pack(program([(linear, 0), (mixing, 0)], []))
    assert isinstance(answer, str) and reason in answer and answer.startswith("node '")


OTHERS = {
    "a batch that mixes": (
        """input %x : float32[batch,sequence,4]
        %y : float32[*] = ReduceMax(%x) {axes = [0], keepdims = 1}
        output %y""",
        "over the row axis",
    ),
    "no length": (
        """input %x : float32[batch,7,4]
        %y : float32[*] = Relu(%x)
        output %y""",
        "found none",
    ),
    "two lengths": (
        """input %x : float32[batch,rows,columns]
        %y : float32[*] = Relu(%x)
        output %y""",
        "['columns', 'rows']",
    ),
    "an input of one row per sequence that is an output, too": (
        """input %x : float32[batch,sequence,4]
        input %z : float32[batch,3]
        %y : float32[*] = Relu(%x)
        output %y
        output %z""",
        "output 'z' is an input",
    ),
    "a convolution that leaves tokens out": (
        """input %x : float32[batch,sequence,4]
        const %w : float32[2,4,2] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        %t : float32[*] = Transpose(%x) {perm = [0, 2, 1]}
        %y : float32[*] = Conv(%t, %w)
        output %y""",
        "(Conv): its tokens do not lie along the batch axis",
    ),
    "a long convolution of each channel alone": (
        """input %x : float32[batch,sequence,1]
        const %one : float32[1] = [1.0]
        %w : float32[*] = Expand(%one) {shape = [1, 1, 17]}
        %t : float32[*] = Transpose(%x) {perm = [0, 2, 1]}
        %y : float32[*] = Conv(%t, %w) {pads = [8, 8]}
        output %y""",
        "(Conv): its tokens do not lie along the batch axis",
    ),
    "an output of pairs": (
        """input %x : float32[batch,sequence,4]
        %t : float32[*] = Transpose(%x) {perm = [0, 2, 1]}
        %y : float32[*] = MatMul(%x, %t)
        output %y""",
        "has neither one row per token nor one per sequence",
    ),
    "an input of pairs": (
        """input %x : float32[batch,sequence,4]
        input %bias : float32[batch,sequence,sequence]
        %s : float32[*] = Softmax(%bias) {axis = -1}
        %y : float32[*] = MatMul(%s, %x)
        output %y""",
        "input 'bias'",
    ),
    "a branch that computes with the length": (
        """input %x : float32[batch,sequence,4]
        %r : float32[*] = RandomNormal() {shape = [1]}
        %b : bool[*] = IsNaN(%r)
        %n : int64[*] = Shape(%x) {start = 1, end = 2}
        %t : float32[*] = If(%b) {else_branch = graph @e {
          %u : float32[*] = Cast(%n) {to = 1}
          output %u
        }, then_branch = graph @t {
          const %v : float32[1] = [1.0]
          output %v
        }}
        %y : float32[*] = Add(%x, %t)
        output %y""",
        "its nested graphs read tokens, or their number",
    ),
    "a token at a place that is given": (
        """input %x : float32[batch,sequence,4]
        input %at : int64[batch,sequence]
        %last : int64[*] = ReduceMax(%at) {axes = [1], keepdims = 1}
        %y : float32[*] = GatherND(%x, %last) {batch_dims = 1}
        output %y""",
        "(GatherND): combines a value of whole sequences with a value of tokens",
    ),
    "numbers that happen to be as many as there are tokens": (
        """input %x : float32[batch,sequence,4]
        %r : float32[*] = RandomNormal() {shape = [9]}
        %z : int64[*] = NonZero(%r)
        %f : float32[*] = Cast(%z) {to = 1}
        %t : float32[*] = Transpose(%f) {perm = [1, 0]}
        %y : float32[*] = Add(%x, %t)
        output %y""",
        "an input varies along the axis of the tokens, but has no tokens",
    ),
    "whole sequences with a tensor as long as the batch and random numbers": (
        """input %x : float32[batch,sequence,4]
        %r : float32[*] = RandomNormal() {shape = [9]}
        %z : int64[*] = NonZero(%r)
        %some : int64[*] = Shape(%z) {start = 1}
        %rows : int64[*] = Shape(%x) {end = 1}
        %both : int64[*] = Concat(%rows, %some) {axis = 0}
        %c : float32[*] = ConstantOfShape(%both)
        %s : float32[*] = ReduceSum(%c) {axes = [1], keepdims = 1}
        %m : float32[*] = ReduceMean(%x) {axes = [1], keepdims = 0}
        %y : float32[*] = Add(%m, %s)
        output %y""",
        "needs input 'x' of tokens",
    ),
    "whole sequences with the length as a number": (
        """input %x : float32[batch,sequence,4]
        input %z : float32[batch,9]
        %y : float32[*] = Relu(%x)
        %s : float32[*] = Slice(%z) {axes = [1], starts = [0], ends = [sequence], steps = [1]}
        %m : float32[*] = ReduceSum(%s) {axes = [1], keepdims = 0}
        output %y
        output %m""",
        "needs their length 'sequence'",
    ),
    "a table of pairs": (
        """input %x : float32[batch,sequence,4]
        const %table : float32[2,2] = [1.0, 2.0, 3.0, 4.0]
        %b : float32[*] = Slice(%table) {axes = [0, 1], starts = [0, 0], ends = [sequence, sequence], steps = [1, 1]}
        %t : float32[*] = Transpose(%x) {perm = [0, 2, 1]}
        %s : float32[*] = MatMul(%x, %t)
        %a : float32[*] = Add(%s, %b)
        %w : float32[*] = Softmax(%a) {axis = -1}
        %y : float32[*] = MatMul(%w, %x)
        output %y""",
        "pairs of positions",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_refuses_other_models(case: str) -> None:
    text, reason = OTHERS[case]
    answer = pack(parse_graph(f"graph @g {{\n{text}\n}}"))
    assert isinstance(answer, str) and reason in answer


def test_one_sequence_at_a_time() -> None:
    """A model without a batch can pack its tokens, but not outputs per sequence."""
    text = """input %x : float32[1,sequence,4]
        %t : float32[*] = Transpose(%x) {perm = [0, 2, 1]}
        %s : float32[*] = MatMul(%x, %t)
        %w : float32[*] = Softmax(%s) {axis = -1}
        %y : float32[*] = MatMul(%w, %x)
        """
    graph = parse_graph(f"graph @g {{\n{text} output %y\n}}")
    check(graph, [(1, 3), (1, 8), (1, 1)], 10)
    pooled = f"{text} %p : float32[*] = ReduceMean(%y) {{axes = [1], keepdims = 0}}\n output %p"
    assert "no batch dimension" in str(pack(parse_graph(f"graph @g {{\n{pooled}\n}}")))


def test_values_per_sequence_stay_with_their_sequence() -> None:
    graph = parse_graph("""graph @g {
        input %x : float32[batch,sequence,4]
        input %scale : float32[batch,4]
        %m : float32[*] = ReduceMax(%x) {axes = [1], keepdims = 0}
        %y : float32[*] = Mul(%m, %scale)
        output %y
    }""")
    packed = pack(graph)
    assert isinstance(packed, Packed) and packed.sequences is not None
    assert [value.name for value in packed.sequences.inputs] == ["scale", "m"]
    rng = np.random.default_rng(0)
    feeds = [
        {"x": rng.standard_normal((rows, length, 4)).astype(np.float32), "scale": rng.random((rows, 4), np.float32)}
        for rows, length in ((2, 3), (1, 7), (3, 2))
    ]
    found = packed_runs(graph, packed, 8).run([Feed(feed, *feed["x"].shape[:2]) for feed in feeds])
    for feed, outputs in zip(feeds, found, strict=True):
        np.testing.assert_array_equal(outputs["y"], interpret(graph, feed)["y"])


@pytest.mark.parametrize("filled", ["ConstantOfShape()", "Expand(%row)"])
def test_values_per_sequence_combine_with_token_independent_ones(filled: str) -> None:
    """An initial value per sequence, with as many rows as the batch, has no token axis."""
    text = f"""input %x : float32[batch,sequence,{WIDTH}]
        const %row : float32[{WIDTH}] = [1.0, 2.0, 3.0, 4.0]
        %start : float32[*] = {filled} {{shape = [batch, {WIDTH}]}}
        %e : float32[*] = Exp(%start)
        %m : float32[*] = ReduceMean(%x) {{axes = [1], keepdims = 0}}
        %y : float32[*] = Concat(%m, %e) {{axis = 1}}
        output %y"""
    check(parse_graph(f"graph @g {{\n{text}\n}}"), [(2, 3), (1, 5)], capacity=8)
