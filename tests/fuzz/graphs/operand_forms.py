"""Other forms of operands: a window of a larger value, of unknown rank, from data, changed by an extent, or shared.

A rule chooses the operands of an operator; this module changes how one of them is computed. The numbers stay the same,
except under `_counted` and `_constant`, whose results the oracle has to accept. So every operand of every operator is
tested with every kind, also if no rule has it: axes that are computed, weights of unknown rank.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import helper

from tests.fuzz.graphs.facts import words
from tests.fuzz.graphs.grower import Grower
from tests.fuzz.graphs.unknown_rank import holds, rankless
from tests.fuzz.graphs.values import BOOL, FLOATS, I64, INTS, STRING, Item, UnfitNode

Aim = tuple[str, int, str]  # an operator, one of its inputs, and the kind of operand that it should have

_COMMON = words("Add Sub Mul Cast Concat Constant Gather Identity Mod Reshape Shape Size Slice Greater Tanh Abs Sin")
_CHANCE, _CHANCE_OF_COMMON = 0.3, 0.02

# Inputs that must keep the values of the rule: results of other values are undefined, or crash ONNX Runtime.
_FIXED = {
    "Div": "1", "Mod": "1",  # division by zero
    "Scatter|ScatterElements|ScatterND": "1",  # two updates of one index have no order
    "RoiAlign": "1|2", "RNN|GRU|LSTM": "4", "Col2Im": "1|2",  # read without a check of the bounds
    "Resize|Upsample": "1|2|3",  # rows and channels are not resized, and fractions of pixels are rounded in many ways
    "Dropout": "2",  # the flag for training
    "TensorScatter": "2", "RotaryEmbedding": "3", "Attention": "6",  # read without a check of the bounds
}  # fmt: skip


def is_fixed(op: str, index: int) -> bool:
    """True if an input must keep the values of the rule."""
    return any(re.fullmatch(names, op) and re.fullmatch(places, str(index)) for names, places in _FIXED.items())


class Operands:
    """Changes the form of one or more operands of some nodes."""

    def __init__(self, aim: Aim, often: bool) -> None:
        """`aim`: the form that is tried for this input of every such operator. `often`: change other operands, too."""
        self._aim, self._often = aim, often

    def wanted(self, f: Grower, op: str, inputs: int) -> bool:
        chance = (_CHANCE_OF_COMMON if op in _COMMON else _CHANCE + 0.08 * inputs) if self._often else 0.0
        return f.on_frequent(max(chance, 0.8 * (op == self._aim[0])))

    def inputs(self, f: Grower, op: str, inputs: Sequence[Item | None]) -> Sequence[Item | None]:
        """The inputs, some of them in another form. UnfitNode if no other form is possible."""
        if op == self._aim[0]:
            try:
                with f.attempt():
                    return self._aimed(f, op, inputs)
            except UnfitNode:
                pass
        return self._at_random(f, op, inputs)

    def _aimed(self, f: Grower, op: str, inputs: Sequence[Item | None]) -> Sequence[Item | None]:
        _, index, form = self._aim
        changed = list(inputs)
        if index >= len(changed) or changed[index] is None:
            raise UnfitNode("no such input")
        if form in ("alias", "part") and index not in _shareable(changed):
            _alike(f, changed, index)
        _FORMS[form](f, op, changed, index)
        return changed

    def _at_random(self, f: Grower, op: str, inputs: Sequence[Item | None]) -> Sequence[Item | None]:
        given = [index for index, item in enumerate(inputs) if item is not None]
        if not given:
            raise UnfitNode("no operands")
        kinds = {
            "window": _window, "rankless": _rankless, "counted": _counted, "shared": _shared, "data": _data,
            "constant": _constant, "open": _open,
        }  # fmt: skip
        changed = list(inputs)
        moved = op not in _COMMON  # rules rely on the values of the simple operators that they use
        apart = 0.3 if f.world.rowwise else 1.0  # forms that mostly make rows dependent are rarer
        fixed = any(item is not None and item.static for item in inputs)
        for _ in range(1 + f.choose(1 + len(given) // 2)):
            chosen = f.kind(
                window=2, rankless=1.3 * apart, shared=2 * bool(_shareable(changed)), data=fixed,
                counted=2 * moved * apart, constant=1.2, open=apart,
            )  # fmt: skip
            trial = list(changed)
            try:
                with f.attempt():
                    kinds[chosen](f, op, trial, f.of(_shareable(changed) if chosen == "shared" else given))
                changed = trial
            except UnfitNode:
                continue
        if changed == list(inputs):
            raise UnfitNode("nothing in another form")
        return changed


def _alike(f: Grower, inputs: list[Item | None], index: int) -> None:
    """Give the first input the element type of a parameter, so that both can be parts of one tensor."""
    other = index or next((i for i in range(len(inputs) - 1, 0, -1) if inputs[i] is not None), 0)
    x, parameter = _at(inputs, 0), _at(inputs, other)
    if other == 0 or STRING in (x.dtype, parameter.dtype):
        raise UnfitNode("no two operands")
    if parameter.dtype in INTS and x.dtype in FLOATS:
        least, most = np.iinfo(parameter.dtype).min, np.iinfo(parameter.dtype).max
        wide = [x.at(case).astype(np.float64) for case in f.alive]
        if any(not ((array >= least) & (array <= most)).all() for array in wide):
            raise UnfitNode("what a conversion makes of larger numbers is open")
    inputs[0] = f.one("Cast", x, to=_number(parameter.dtype))


def _shareable(inputs: Sequence[Item | None]) -> list[int]:
    """The indices of inputs that share their element type with another input."""
    types = Counter(item.dtype for item in inputs if item is not None)
    return [index for index, item in enumerate(inputs) if item is not None and types[item.dtype] > 1]


def _at(inputs: Sequence[Item | None], index: int) -> Item:
    item = inputs[index]
    if item is None:
        raise UnfitNode("no such input")
    return item


# -- data --------------------------------------------------------------------------------------------------------------


def _data(f: Grower, op: str, inputs: list[Item | None], index: int) -> None:
    """The constant, or another one, selected by a condition that is known only at run time and is true."""
    inputs[index] = _chosen(f, _at(inputs, index))


def _chosen(f: Grower, x: Item) -> Item:
    if not x.static:
        return x
    if f.opset < 9:
        raise UnfitNode("no Where")
    other = f.weight(x.dtype, x.at(f.alive[0]).shape)
    made = f.one("Where", holds(f), x, other)
    made.counted = False
    return made


# -- windows -----------------------------------------------------------------------------------------------------------


def _window(f: Grower, op: str, inputs: list[Item | None], index: int) -> None:
    """One half of a tensor that contains the operand twice, or the operand and its negative."""
    x = _chosen(f, _at(inputs, index))
    rank = x.rank(f.alive)
    if rank is None:
        raise UnfitNode("no axis")
    place = f.choose(2)
    if rank == 0:
        line = f.one("Reshape", x, f.vector([1]))
        pair = f.one("Concat", line, line, axis=0)
        inputs[index] = f.one("Gather", pair, f.constant(place, np.int64), axis=0)
        return
    axis = f.of(range(1, rank)) if f.world.rowwise and rank > 1 else f.choose(rank)
    other = f.one("Neg", x) if x.dtype in FLOATS and f.on_frequent(0.5) else x
    pair = f.one("Concat", *((x, other) if place == 0 else (other, x)), axis=axis)
    attrs = {"num_outputs": 2} if f.opset >= 18 else {}
    inputs[index] = f.emit("Split", [pair], outputs=2, axis=axis, **attrs)[place]


def _shared(f: Grower, op: str, inputs: list[Item | None], index: int) -> None:
    """Two operands as adjacent parts of one tensor."""
    x = _at(inputs, index)
    others = [i for i, y in enumerate(inputs) if i != index and y is not None and y.dtype == x.dtype]
    second = f.of(others)
    y = _at(inputs, second)
    if x.static and y.static:
        x = _chosen(f, x)
    axis = _common_axis(f, x, y)
    if axis is not None:
        inputs[index], inputs[second] = _halves(f, x, y, axis)
        return
    flat = [f.one("Reshape", item, f.vector([-1])) for item in (x, y)]
    for place, item, half in zip((index, second), (x, y), _halves(f, flat[0], flat[1], 0), strict=True):
        shapes = set(item.shapes(f.alive))
        if len(shapes) == 1:
            inputs[place] = f.one("Reshape", half, f.vector(shapes.pop()))
        else:
            attrs = {"allowzero": 1} if f.opset >= 14 else {}
            inputs[place] = f.one("Reshape", half, f.one("Shape", item), **attrs)


def _halves(f: Grower, x: Item, y: Item, axis: int) -> tuple[Item, Item]:
    joined = f.one("Concat", x, y, axis=axis)
    extent = x.fixed(axis, f.alive)
    if extent is not None:
        return f.slice(joined, [axis], [0], [extent]), f.slice(joined, [axis], [extent], [2**31 - 1])
    n = f.one("Gather", f.one("Shape", x), f.vector([axis]), axis=0)
    return f.slice(joined, [axis], f.vector([0]), n), f.slice(joined, [axis], n, f.vector([2**31 - 1]))


def _common_axis(f: Grower, x: Item, y: Item) -> int | None:
    """An axis along which both can be concatenated; not that of rows, if rows must stay independent."""
    rank = x.rank(f.alive)
    if not rank or y.rank(f.alive) != rank:
        return None

    def joins(axis: int) -> bool:
        pairs = zip(x.shapes(f.alive), y.shapes(f.alive), strict=True)
        return all((*s[:axis], *s[axis + 1 :]) == (*t[:axis], *t[axis + 1 :]) for s, t in pairs)

    axes = [axis for axis in range(int(f.world.rowwise and rank > 1), rank) if joins(axis)]
    return f.of(axes) if axes else None


# -- unknown ranks -----------------------------------------------------------------------------------------------------


def _rankless(f: Grower, op: str, inputs: list[Item | None], index: int) -> None:
    """The output of an If whose other branch has another rank."""
    inputs[index] = rankless(f, _at(inputs, index), holds(f))


def _open(f: Grower, op: str, inputs: list[Item | None], index: int) -> None:
    """The same value with data-dependent extents."""
    x = _at(inputs, index)
    if not x.rank(f.alive) or f.opset < 8:
        raise UnfitNode("no extents")
    inputs[index] = f.one("Expand", x, f.one("Add", f.one("Shape", x), f.nothing()))


# -- extents -----------------------------------------------------------------------------------------------------------


def _counted(f: Grower, op: str, inputs: list[Item | None], index: int) -> None:
    """The operand changed by an extent: floats by at most half, integers by at most 2, booleans negated."""
    x = _at(inputs, index)
    if x.dtype == STRING or is_fixed(op, index):
        raise UnfitNode("no extent moves it")
    small = _remainder(f)
    if x.dtype == BOOL:
        made = f.one("Xor", x, f.one("Greater", small, f.constant(0, np.int64)))
    elif x.dtype in INTS:
        wide = x if x.dtype == I64 else f.one("Cast", x, to=_number(I64))
        made = f.one(f.of(("Add", "Sub")), wide, small)
        made = made if x.dtype == I64 else f.one("Cast", made, to=_number(x.dtype))
    else:
        quarters = f.one("Mul", f.one("Cast", small, to=_number(x.dtype)), f.constant(f.of((0.25, -0.25)), x.dtype))
        made = f.one("Mul", x, f.one("Add", quarters, f.constant(1, x.dtype)))
    inputs[index] = made


def _remainder(f: Grower) -> Item:
    """An extent modulo 2 or 3."""
    n, divisor = f.extent(scalar=True), f.constant(f.of((2, 3)), np.int64)
    if f.opset >= 10:
        return f.one("Mod", n, divisor)
    return f.one("Sub", n, f.one("Mul", f.one("Div", n, divisor), divisor))


def _number(dtype: np.dtype[Any]) -> int:
    return int(helper.np_dtype_to_tensor_dtype(dtype))


# -- constants ---------------------------------------------------------------------------------------------------------


def _constant(f: Grower, op: str, inputs: list[Item | None], index: int) -> None:
    """A constant with the operand's value in one of the cases."""
    x = _at(inputs, index)
    if x.static or (op in _COMMON and (index > 0 or len(set(x.shapes(f.alive))) > 1)):
        raise UnfitNode("a constant already, or in the place of one")
    inputs[index] = f.constant(x.at(f.alive[0]))


# The function that makes an operand of each kind of the coverage table.
_FORMS = {
    "plain": _data, "constant": _constant, "alias": _shared, "window": _window, "part": _shared, "count": _counted,
    "unknown rank": _rankless,
}  # fmt: skip
