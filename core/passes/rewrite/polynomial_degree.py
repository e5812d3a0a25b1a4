"""The growth of an epilogue's result with its inputs, as a degree: decides whether float16 can hold the result."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf

import numpy as np

from lathe.core.ir.graph import Graph, Node, Value

_LARGEST = float(np.finfo(np.float16).max)

# _BOUNDED: results lie in a fixed range for all inputs. _STEEP: results grow faster than any polynomial. _UNBOUNDED:
# results are unbounded even for bounded inputs, such as 1/x near 0.
_BOUNDED = frozenset(
    {"Sigmoid", "HardSigmoid", "Tanh", "Erf", "Softsign", "Sin", "Cos", "Atan", "Sign", "IsNaN", "IsInf", "Not", "And"}
    | {"Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
)
_STEEP = frozenset({"Exp", "Sinh", "Cosh"})
_UNBOUNDED = frozenset({"Tan", "Reciprocal", "Pow"})


def polynomial_degree(body: Graph, given: Mapping[Value, float]) -> float:
    """The degree of a polynomial that bounds the first output of a scalar body for large inputs.

    `given` holds the degrees of the body's inputs: 0 for constants, 1 for the inputs whose growth counts, infinity for
    inputs of unknown growth. The result is infinity if no polynomial bounds the output, or the output depends on a
    constant beyond the range of float16.
    """
    degrees = {**given, **{value: 0.0 if fits_float16(array) else inf for value, array in body.constants.items()}}
    constant = {value for value, found in degrees.items() if found == 0}
    for node in body.nodes:
        degrees.update(dict.fromkeys(node.outputs, _node_degree(node, degrees, constant)))
    return degrees[body.outputs[0]]


def fits_float16(array: object) -> bool:
    """Whether all elements of an array lie within the range of float16."""
    return bool(np.all(np.abs(np.asarray(array, np.float64)) <= _LARGEST))


def _node_degree(node: Node, degrees: Mapping[Value, float], constant: Collection[Value]) -> float:
    """The degree of a node's result, given the `degrees` of its inputs; infinity if no polynomial bounds it.

    `constant`: values of degree 0 that do not depend on nodes of the body; only a division by these is bounded.
    """
    inputs = [degrees[value] for value in node.inputs if value is not None]
    if node.op in _BOUNDED:
        return 0.0
    if node.op == "Mul":
        return sum(inputs)
    if node.op == "Div":
        return inputs[0] if node.inputs[1] in constant else inf
    if node.op in _UNBOUNDED and not all(value in constant for value in node.inputs):
        return inf
    if node.op in _STEEP and max(inputs) > 0:
        return inf
    return max(inputs, default=0.0)
