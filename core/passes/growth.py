"""How fast the result of an epilogue grows with what it is computed from: whether a type of small range can hold it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf

import numpy as np

from core.ir.graph import Graph, Node, Value

_LARGEST = float(np.finfo(np.float16).max)

# Operators whose results are bounded by numbers, whatever they are given; those whose results no line bounds; and those
# whose results nothing bounds, even if they are given bounded numbers.
_BOUNDED = frozenset(
    {"Sigmoid", "HardSigmoid", "Tanh", "Erf", "Softsign", "Sin", "Cos", "Atan", "Sign", "IsNaN", "IsInf", "Not", "And"}
    | {"Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
)
_STEEP = frozenset({"Exp", "Sinh", "Cosh"})
_OPEN = frozenset({"Tan", "Reciprocal", "Pow"})


def degree(body: Graph, given: Mapping[Value, float]) -> float:
    """The degree of a polynomial that bounds the first output of a scalar body, for large inputs, from the degrees of
    its inputs; infinity where there is none, or a constant is beyond float16."""
    known = {**given, **{value: 0.0 if is_small(array) else inf for value, array in body.constants.items()}}
    fixed = {value for value, found in known.items() if found == 0}
    for node in body.nodes:
        known.update(dict.fromkeys(node.outputs, _of(node, known, fixed)))
    return known[body.outputs[0]]


def is_small(array: object) -> bool:
    """Whether all numbers of an array are within float16."""
    return bool(np.all(np.abs(np.asarray(array, np.float64)) <= _LARGEST))


def _of(node: Node, known: Mapping[Value, float], fixed: Collection[Value]) -> float:
    """The degree of a node's result. `fixed`: numbers of the model; other bounded ones may come near 0."""
    inputs = [known[value] for value in node.inputs if value is not None]
    if node.op in _BOUNDED:
        return 0.0
    if node.op == "Mul":
        return sum(inputs)
    if node.op == "Div":
        return inputs[0] if node.inputs[1] in fixed else inf
    if node.op in _OPEN and not all(value in fixed for value in node.inputs):
        return inf
    if node.op in _STEEP and max(inputs) > 0:
        return inf
    return max(inputs, default=0.0)
