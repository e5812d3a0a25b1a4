"""Values of unknown rank, and values computed from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.fuzz.graphs.bodies import body_of
from tests.fuzz.graphs.evaluate import tensor_type
from tests.fuzz.graphs.values import F32, FLOATS, Item, UnfitNode

if TYPE_CHECKING:
    from tests.fuzz.graphs.grower import Grower


UNKNOWN = 300  # elements: more than type inference computes with (`lathe.core.ops.opdef.inference`)


def holds(f: Grower) -> Item:
    """A true condition that its node alone does not reveal: computed from data or a size.

    If rows must stay independent, it is mostly computed from constants (`SharedState.settled`)."""
    if f.world.settled and f.opset >= 9:
        many = f.constant(np.full(UNKNOWN, f.of((0.25, 4.0))), np.float32)
        number = f.one(f.of(("ReduceL1", "ReduceMean")), many, keepdims=0, keep=False)
        return f.one("Greater", number, f.constant(-1, np.float32), keep=False)
    found = [v for v in f.visible() if v.dtype == F32 and v.exact and all(v.at(case).size for case in f.alive)]
    if found and not f.world.rowwise and f.on_frequent(0.7):
        first = f.one("Gather", f.one("Reshape", f.of(found), f.vector([-1])), f.constant(0, np.int64), axis=0)
        return f.one("Greater", f.one("Abs", first), f.constant(-1, np.float32))
    size = f.one("Size", f.of(f.visible()))
    if f.opset >= 9:
        return f.one("Greater", size, f.constant(-1, np.int64))
    return f.one("Greater", f.one("Cast", size, to=1), f.constant(-1, np.float32))


def rankless(f: Grower, x: Item, flag: Item) -> Item:
    """`x` through an If whose other branch has another rank."""
    then, other = type(f)(f.world, f), type(f)(f.world, f)
    ends = [then.one("Identity", x), other.one("Reshape", x, other.vector([-1, 1] if x.rank(f.alive) == 1 else [-1]))]
    made = f.emit("If", [flag], then_branch=body_of(then, [], ends[:1]), else_branch=body_of(other, [], ends[1:]))[0]
    made.rankless = True
    return made


def of_all(f: Grower, x: Item) -> Item:
    """A number computed from `x` with its rank hidden: from all elements, the first one, or their number."""
    if x.dtype not in FLOATS:
        raise UnfitNode("no floating-point numbers")
    y = rankless(f, x, holds(f))
    if f.world.rowwise or f.on_frequent(0.5):  # the rank of the result is unknown, too
        y = f.one("Mul", y, f.constant(0.5, y.dtype)) if f.on_frequent(0.5) else f.one(f.of(("Neg", "Tanh", "Abs")), y)
    sizes = 0.0 if f.world.hidden == "numbers" else 0.5
    use = f.kind(reduce=2, first=1, shape=sizes, size=sizes)
    if use == "reduce":
        return f.one("Tanh", f.one(f.of(("ReduceSum", "ReduceMax", "ReduceMean")), y, keepdims=0))
    if use == "first":
        return f.one("Gather", f.one("Reshape", y, f.vector([-1])), f.constant(0, np.int64), axis=0)
    if use == "size":
        size = f.one("Size", y)
    else:
        size = f.one("Gather", f.one("Shape", y), f.constant(0, np.int64), axis=0)
    number = f.one("Cast", size, to=tensor_type(np.zeros(0, x.dtype)))
    return f.one("Mul", number, f.constant(0.03125, x.dtype))
