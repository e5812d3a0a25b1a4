"""Rules for If, Loop, Scan, functions and sequences: nested graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from tests.fuzz.graphs.bodies import body_of
from tests.fuzz.graphs.evaluate import LOCAL, live, tensor_type
from tests.fuzz.graphs.facts import words
from tests.fuzz.graphs.grower import Grower
from tests.fuzz.graphs.rules import RULES, rule
from tests.fuzz.graphs.unknown_rank import holds, of_all, rankless
from tests.fuzz.graphs.values import BF16, F32, FLOATS, I64, NUMBERS, Item, UnfitNode, same_shape

_INSIDE = tuple(
    sorted(
        words(
            """
            Add Sub Mul Relu Tanh Neg Abs Sigmoid MatMul Transpose Slice Gather Concat Reshape Where Clip
            ReduceMax ReduceSum Softmax Unsqueeze Expand Split Max Min Cast ScatterElements Identity Shape Conv
            Pad
            """
        )
    )
)


def condition(f: Grower) -> Item:
    """A truth value of rank 0: from the number of rows, from data, or a constant."""
    kind = f.kind(count=2, data=2, constant=0.7)
    if kind == "constant" or f.opset < 9:
        return f.constant(f.on_frequent(0.5), bool)
    if kind == "count":
        return f.one("Greater", f.extent(scalar=True), f.constant(f.choose(8), np.int64))
    x = f.pick((F32,), where=lambda v: v.exact and all(v.at(case).size for case in f.alive))
    flat = f.one("Reshape", x, f.vector([-1]))
    first = f.one("Gather", flat, f.constant(0, np.int64), axis=0)
    return f.one("Greater", first, f.constant(0, np.float32))


def _grow(inner: Grower, steps: int) -> None:
    """Add some nodes to a body, by the same rules as in other graphs."""
    rules = [each for each in RULES if each.op in _INSIDE and each.since <= inner.opset <= each.until]
    for _ in range(steps):
        try:
            with inner.attempt():
                inner.of(rules).build(inner)
        except UnfitNode:
            continue


def _formal(inner: Grower, item: Item) -> Item:
    """An input of a body, with a name of its own and the arrays of a value."""
    made = Item(inner.world.name("i"), item.arrays, item.shadows, steps=item.steps, counted=item.counted)
    made.rankless = item.rankless
    inner.known[made.name] = made
    inner.items.append(made)
    return made


def _own(inner: Grower, item: Item) -> Item:
    """The value as an output of a body: if no node of the body computes it, through Identity."""
    made = {name for node in inner.nodes for name in node.output}
    return item if item.name in made and not item.static else inner.one("Identity", item)


def _merge(f: Grower, inner: Grower) -> None:
    f.kinds.update(inner.kinds)


@rule("If", weight=2.5)
def _if(f: Grower) -> None:
    flag = condition(f)
    x = f.pick(FLOATS if f.on_frequent(0.8) else NUMBERS)
    kind = f.kind(same=2, rank=2, shape=1)
    branches, results = [], []
    for side in range(2):
        inner = Grower(f.world, f)
        y = x
        if f.on_frequent(0.7):
            _grow(inner, f.choose(3))
            fits = [v for v in inner.items if v.dtype == x.dtype and (kind != "same" or same_shape(v, x, f.alive))]
            y = inner.of(fits) if fits else inner.one(f.of(("Neg", "Abs")), x) if x.dtype in FLOATS else x
        if side and kind == "rank":
            y = _other_rank(inner, x)
        branches.append((inner, _own(inner, y)))
    for inner, result in branches:
        results.append(body_of(inner, [], [result]))
    if kind == "same" and not same_shape(branches[0][1], branches[1][1], f.alive):
        raise UnfitNode("branches differ")
    made = f.emit("If", [flag], then_branch=results[0], else_branch=results[1])[0]
    ranks = [branch[1].rank(f.alive) for branch in branches]
    made.rankless = ranks[0] != ranks[1] or None in ranks or any(branch[1].rankless for branch in branches)
    for inner, _ in branches:
        _merge(f, inner)


def _other_rank(f: Grower, x: Item) -> Item:
    if f.on_frequent(0.5) or not x.rank(f.alive):
        return f.one("Unsqueeze", x, axes=[0]) if f.opset < 13 else f.one("Unsqueeze", x, f.vector([0]))
    if x.dtype in FLOATS and f.opset < 18:
        return f.one("ReduceMax", x, axes=[0], keepdims=0)
    return f.one("Reshape", x, f.vector([-1]))


@rule("If", weight=1.5)
def _rankless(f: Grower) -> None:
    """Add a value whose rank the compiler cannot know, and a value computed from it."""
    if f.on_frequent(0.6):
        add_of_all(f)
        return
    made = rankless(f, f.pick((F32,), (1, 2, 3)), holds(f))
    f.one("Add", made, f.like(made))


def add_of_all(f: Grower) -> None:
    """Add the sum of a value and a number computed from another value, whose rank is hidden."""
    f.one("Add", f.pick((F32,)), of_all(f, f.pick((F32,), (1, 2, 3, 4))))


@rule("Loop", weight=3)
def _loop(f: Grower) -> None:
    kinds = [
        kind for kind in (NUMBERS if f.on_frequent(0.2) else FLOATS) if kind != BF16
    ]  # ONNX's reference stacks bfloat16 wrongly
    carried = [f.pick(kinds) for _ in range(1 + f.choose(2))]
    inner = Grower(f.world, f)
    cases = range(len(f.world.cases))
    step = Item(f.world.name("i"), dict.fromkeys(cases, np.array(0, np.int64)), {})
    going = Item(f.world.name("i"), dict.fromkeys(cases, np.array(True)), {})
    for item in (step, going):
        item.shadows = item.arrays
        inner.known[item.name] = item
    inner.items.append(step)
    formal = [_formal(inner, item) for item in carried]
    _grow(inner, 1 + f.choose(4))
    after = [_own(inner, _again(inner, item)) for item in formal]
    scanned = [_own(inner, inner.of(inner.items))] if f.on_frequent(0.5) else []
    if f.opset >= 9 and f.on_frequent(0.3):
        test = inner.one("Less", step, inner.constant(f.choose(4), np.int64), keep=False)
    else:
        test = inner.one("Identity", going, keep=False)
    inputs = [step, going, *formal]
    results = [test, *after, *scanned]
    if len({item.name for item in results}) < len(results):
        raise UnfitNode("one value twice")
    body = body_of(inner, inputs, results)
    most = f.whole(1 if scanned else 0, 3, scalar=True)  # with 0 steps the shape of stacked values is undefined
    first = f.constant(True, bool) if f.on_frequent(0.7) else None
    f.emit("Loop", [most, first, *carried], outputs=len(after) + len(scanned), body=body)
    _merge(f, inner)


def _again(inner: Grower, item: Item) -> Item:
    """Another value of the same type and shape, for the next iteration."""
    found = [v for v in inner.items if v is not item and v.dtype == item.dtype and same_shape(v, item, inner.alive)]
    if item.dtype not in FLOATS:
        return inner.of([*found, item])
    with inner.attempt():
        x = inner.of(found) if found else item
        y = inner.one(inner.of(("Add", "Mul", "Sub")), x, inner.like(x))
        if not same_shape(y, item, inner.alive):
            raise UnfitNode("another shape")
        return inner.one("Tanh", y)


@rule("Scan", since=9, weight=5)
def _scan(f: Grower) -> None:
    x = f.pick((F32,), (2, 3, 4))
    axis = f.choose(x.rank(f.alive) or 1)
    f.without_empty(x)  # ONNX Runtime divides by zero there
    inner = Grower(f.world, f)
    if any(x.at(case).shape[axis] == 0 for case in f.alive):
        raise UnfitNode("no steps")
    arrays = {case: np.take(x.at(case), 0, axis) for case in f.alive}
    shadows = {case: np.take(x.shadows[case], 0, axis) for case in f.alive}
    piece = Item(f.world.name("i"), arrays, shadows, steps=x.steps)
    inner.known[piece.name] = piece
    inner.items.append(piece)
    shapes = {array.shape for array in arrays.values()}
    state = None
    if f.on_frequent(0.7) and len(shapes) == 1:
        state = f.fit(F32, next(iter(shapes)), x)
    formal = [_formal(inner, state)] if state is not None else []
    _grow(inner, 1 + f.choose(3))
    after = [_own(inner, _again(inner, item)) for item in formal]
    scanned = _own(inner, inner.of(inner.items[-3:]))
    results = [*after, scanned]
    if len({item.name for item in results}) < len(results):
        raise UnfitNode("one value twice")
    for item in results:
        inner.without_empty(item)  # it divides by their sizes, too
    body = body_of(inner, [*formal, piece], results)
    attrs: dict[str, Any] = {"scan_input_axes": [axis]}
    if f.on_frequent(0.3):
        attrs["scan_input_directions"] = [1]
    if f.on_frequent(0.3) and scanned.rank(f.alive):
        attrs["scan_output_axes"] = [1]
    inputs = [*([state] if state is not None else []), x]
    f.emit("Scan", inputs, outputs=len(results), body=body, num_scan_inputs=1, **attrs)
    _merge(f, inner)


@rule("function", since=8, weight=2)
def _function(f: Grower) -> None:
    """Add a model-local function, called once or twice."""
    inputs = [f.pick((F32,)) for _ in range(1 + f.choose(2))]
    inner = Grower(f.world, f, closed=True)
    formal = [_formal(inner, item) for item in inputs]
    _grow(inner, 1 + f.choose(4))
    made = [item for item in inner.items if item not in formal] or [inner.one("Neg", formal[0])]
    results = list({item.name: _own(inner, item) for item in (made[-1], inner.of(made))}.values())
    name = f.world.name("F")
    nodes = live(inner.nodes, [item.name for item in results])
    f.world.functions.append(
        helper.make_function(
            LOCAL,
            name,
            [item.name for item in formal],
            [item.name for item in results],
            nodes,
            [helper.make_opsetid("", f.opset), helper.make_opsetid(LOCAL, 1)],
        )
    )
    f.emit(name, inputs, outputs=len(results), domain=LOCAL)
    _merge(f, inner)
    if f.on_frequent(0.3):
        f.emit(name, [inputs[0]] * len(inputs), outputs=len(results), domain=LOCAL)


@rule("SequenceConstruct", since=11, weight=0.8)
def _sequence(f: Grower) -> None:
    """Put values into a sequence and take them out, inside an If: the results of each node must be arrays."""
    x = f.pick((F32, I64), (1, 2, 3))
    parts = [x, *(f.pick((x.dtype,), (x.rank(f.alive) or 1,)) for _ in range(1 + f.choose(2)))]
    inner = Grower(f.world, f)
    flag = f.constant(True, bool)
    names = [f.world.name() for _ in range(2)]
    place = f.constant(f.choose(len(parts)), np.int64)
    nodes = [helper.make_node("SequenceConstruct", [part.name for part in parts], names[:1])]
    if f.on_frequent(0.5):
        nodes.append(helper.make_node("SequenceAt", [names[0], place.name], names[1:]))
    else:
        nodes.append(helper.make_node("ConcatFromSequence", names[:1], names[1:], axis=0))
    info = helper.make_tensor_value_info(names[1], tensor_type(x.at(f.alive[0])), None)
    graph = helper.make_graph(nodes, f.world.name("body"), [], [info])
    other = helper.make_graph(
        [helper.make_node("Identity", [x.name], [f"{names[1]}e"])],
        f.world.name("body"),
        [],
        [helper.make_tensor_value_info(f"{names[1]}e", tensor_type(x.at(f.alive[0])), None)],
    )
    del inner
    f.emit("If", [flag], then_branch=graph, else_branch=other)
