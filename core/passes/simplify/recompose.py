"""Recognizes normalizations and activations that exporters write as many small operators.

The rules match canonical forms: `simplify` ran before, so x/c is x*(1/c), x-c is x+(-c), x^2 is x*x, and a product with
a reciprocal is a division. HardSwish rounds differently from its parts, so it replaces them only where no discontinuous
operator reads the result (core/passes/rewrite/discontinuities.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import pi, sqrt

import numpy as np

from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.passes.rewrite.base import PassResult, have_same_type, shape_of
from lathe.core.passes.rewrite.discontinuities import unless_discontinuous
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.pattern import (
    Match,
    Op,
    Pattern,
    Rewrite,
    Rule,
    any_order,
    apply,
    const,
    is_close,
    is_constant,
    op,
    scalar,
    var,
)
from lathe.core.passes.rewrite.permutation import without_leading_ones


@dataclass(frozen=True)
class Recompose:
    """Applies the rules of this module.

    `inside`: the graph is the body of a node, and unknown nodes of the outer graph read its outputs.
    """

    inside: bool = False
    name: str = "recompose"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        apply(editor, [*RULES, *(unless_discontinuous(rule, self.inside) for rule in ROUNDING)])
        return editor.finish()


def _activation(operator: str, **attrs: Attr) -> Rewrite:
    """A rewrite of a match to `operator(x)`, with these attributes, if the result has the type of x."""

    def rewrite(e: Editor, m: Match) -> Value | None:
        return e.emit(m.root, operator, m["x"], attrs=attrs) if have_same_type(m["x"], m.root.output) else None

    return rewrite


def _rules(name: str, patterns: list[Op], rewrite: Rewrite) -> list[Rule]:
    return [Rule(name, pattern, rewrite) for pattern in patterns]


_X = var("x")

# Activations -------------------------------------------------------------------------------------------------------

_ERF = op("Add", op("Erf", op("Mul", _X, scalar(1 / sqrt(2)))), scalar(1.0))
_CUBES: list[Pattern] = [op("Pow", _X, scalar(3.0)), op("Mul", _X, op("Mul", _X, _X))]


def _tanh_term(cube: Pattern) -> Op:
    inner = op("Add", _X, op("Mul", cube, scalar(0.044715)))
    return op("Add", op("Tanh", op("Mul", inner, scalar(sqrt(2 / pi)))), scalar(1.0))


def _is_hard_sigmoid(node: Node) -> bool:
    return is_close(_float(node, "alpha", 0.2), 1 / 6) and is_close(_float(node, "beta", 0.5), 0.5)


def _float(node: Node, name: str, default: float) -> float:
    return float(node.attrs.get(name, default))  # type: ignore[arg-type]


def _is_relu6(node: Node) -> bool:
    return node.attrs.get("min") == (0.0,) and node.attrs.get("max") == (6.0,)


_CLIP6 = op("Clip", op("Add", _X, scalar(3.0)), test=_is_relu6)

ACTIVATIONS = [
    *_rules("Gelu", any_order("Mul", _X, scalar(0.5), _ERF), _activation("Gelu")),
    *(
        rule
        for cube in _CUBES
        for rule in _rules(
            "Gelu (tanh)", any_order("Mul", _X, scalar(0.5), _tanh_term(cube)), _activation("Gelu", approximate="tanh")
        )
    ),
    Rule("Swish", op("Mul", _X, op("Sigmoid", _X)), _activation("Swish")),
    Rule("Mish", op("Mul", _X, op("Tanh", op("Softplus", _X))), _activation("Mish")),
]
ROUNDING = [
    Rule("HardSwish", op("Mul", _X, op("HardSigmoid", _X, test=_is_hard_sigmoid)), _activation("HardSwish")),
    *_rules("HardSwish", any_order("Mul", _X, scalar(1 / 6), _CLIP6), _activation("HardSwish")),
]

# Normalizations ----------------------------------------------------------------------------------------------------


def _keeps_dims(node: Node) -> bool:
    return bool(node.attrs.get("keepdims", 1)) and node.attrs.get("axes") is not None


def _mean(x: Pattern, name: str) -> Op:
    return op("ReduceMean", x, name=name, test=_keeps_dims)


def _deviations(variance: Pattern) -> list[Op]:
    """The patterns of sqrt(variance + epsilon), as Sqrt or Pow; the constant is bound to the variable "epsilon"."""
    sum_ = op("Add", variance, const("epsilon", lambda a: a.size == 1))
    return [op("Sqrt", sum_), op("Pow", sum_, scalar(0.5))]


def _over_deviation(x: Pattern, variance: Pattern) -> list[Op]:
    """The patterns of x / sqrt(variance + epsilon), as a quotient or as a product with a power of -0.5."""
    sum_ = op("Add", variance, const("epsilon", lambda a: a.size == 1))
    return [*(op("Div", x, root) for root in _deviations(variance)), op("Mul", x, op("Pow", sum_, scalar(-0.5)))]


def _trailing_axis(shape: tuple[object, ...] | None, node: Node) -> int | None:
    """The first axis that the reduction `node` reduces, as a negative number; None unless it reduces the last axes.

    `shape` is the shape of its input.
    """
    axes = node.attrs.get("axes")
    if shape is None or not isinstance(axes, tuple) or not axes:
        return None
    rank = len(shape)
    found = sorted(axis % rank for axis in axes if isinstance(axis, int))
    return found[0] - rank if found == list(range(found[0], rank)) else None


def _normalization(operator: str, reductions: tuple[str, ...]) -> Rewrite:
    """A rewrite of a match to the normalization `operator` with a scale of ones.

    A later rule replaces the ones with the factor that usually follows. `reductions` names the ReduceMean nodes of the
    pattern, which must all reduce the same last axes.
    """

    def rewrite(e: Editor, m: Match) -> Value | None:
        x, shape = m["x"], shape_of(m["x"])
        axes = {_trailing_axis(shape, m.node(name)) for name in reductions}
        axis = axes.pop()
        if axes or axis is None or shape is None or x.type != m.root.output.type or x.dtype.numpy != np.float32:
            return None
        normalized = [dim for dim in shape[axis:] if isinstance(dim, int)]
        if len(normalized) < -axis:
            return None
        attrs: dict[str, Attr] = {"axis": axis, "epsilon": float(e.graph.constants[m["epsilon"]].item())}
        return e.emit(m.root, operator, x, e.constant(np.ones(normalized, np.float32), "ones"), attrs=attrs)

    return rewrite


def _fits_normalized(node: Node, array: Array, shape: tuple[object, ...] | None) -> bool:
    """Whether a constant has exactly the extents of the axes that `node` normalizes, up to leading axes of extent 1.

    `shape` is that of the node's input.
    """
    axis = node.attrs.get("axis", -1)
    if shape is None or not isinstance(axis, int):
        return False
    rank = len(shape)
    return without_leading_ones(array).shape == shape[axis % rank :]


def _with_scale(e: Editor, m: Match) -> Value | None:
    return _rebuild(e, m, m["gamma"], bias=None)


def _with_bias(e: Editor, m: Match) -> Value | None:
    return _rebuild(e, m, m["gamma"], bias=m["beta"])


def _rebuild(e: Editor, m: Match, gamma: Value, bias: Value | None) -> Value | None:
    node, shape = m.node("norm"), shape_of(m["x"])
    new = bias if bias is not None else gamma
    array = e.graph.constants[new]
    if len(node.outputs) > 1 or m["x"].type != m.root.output.type or not _fits_normalized(node, array, shape):
        return None
    flat = e.constant(without_leading_ones(array), new.name)
    if bias is None:
        return e.emit(m.root, node.op, m["x"], flat, attrs=node.attrs)
    return e.emit(m.root, node.op, m["x"], gamma, flat, attrs=node.attrs)


def _layer_norm_patterns() -> list[Op]:
    centred = op("Sub", _X, _mean(_X, "mean"))
    return _over_deviation(centred, _mean(op("Mul", centred, centred), "variance"))


def _rms_patterns() -> list[Op]:
    return _over_deviation(_X, _mean(op("Mul", _X, _X), "variance"))


_ONES = const("", is_constant(1))
_ANY: Callable[[Array], bool] = lambda array: array.dtype == np.float32  # noqa: E731
_NORM = "LayerNormalization|RMSNormalization"

NORMALIZATIONS = [
    *_rules("LayerNormalization", _layer_norm_patterns(), _normalization("LayerNormalization", ("mean", "variance"))),
    *_rules("RMSNormalization", _rms_patterns(), _normalization("RMSNormalization", ("variance",))),
    Rule("scale of a norm", op("Mul", op(_NORM, _X, _ONES, name="norm"), const("gamma", _ANY)), _with_scale),
    Rule(
        "bias of a norm",
        op("Add", op("LayerNormalization", _X, var("gamma"), name="norm"), const("beta", _ANY)),
        _with_bias,
    ),
]

# Attention -----------------------------------------------------------------------------------------------------------


def _guarded_softmax(e: Editor, m: Match) -> Value | None:
    """A GuardedSoftmax for Where(IsNaN(weights), 0, weights); None if no Softmax computes the weights.

    PyTorch writes such a Where for tokens whose keys are all masked with -inf.
    """
    softmax = m["weights"].producer
    if softmax is None or softmax.op != "Softmax" or not have_same_type(m["weights"], m.root.output):
        return None
    return e.emit(m.root, "GuardedSoftmax", *softmax.inputs, attrs=softmax.attrs)


_WEIGHTS = var("weights")
ATTENTION = [Rule("GuardedSoftmax", op("Where", op("IsNaN", _WEIGHTS), scalar(0.0), _WEIGHTS), _guarded_softmax)]

RULES = ACTIVATIONS + NORMALIZATIONS + ATTENTION
