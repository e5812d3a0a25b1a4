"""Einsum: products summed over the axes that the output term does not name."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

import numpy as np

from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Array
from lathe.core.ir.types import TensorType, ValueType
from lathe.core.ops.opdef.backward import Backward, Rewrite
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, Required, RowAxis, register
from lathe.core.ops.opdef.terms import Term
from lathe.core.ops.opdef.type_rules import NUMBER, as_computed, check_kind, same_dtype
from lathe.core.ops.tensor.einsum_definition import Label, Labelled, define


@register
class Einsum(OpDef):
    """`equation` as in NumPy's einsum, with or without an arrow and ellipses."""

    agreeing = True  # NumPy reads beyond an operand whose diagonal has an axis of extent 0
    rounds_freely = True
    inputs = "*Inputs"
    outputs = "Output"
    attrs = {"equation": Required("text")}

    def terms(self, c: NodeView) -> tuple[list[str], str]:
        """The terms of the equation: those of the inputs, and that of the output, as text.

        Without an arrow, the output has the axes of the ellipsis, then the letters that occur once, sorted.
        """
        text: str = c.attr("equation").replace(" ", "")
        left, arrow, right = text.partition("->")
        if not arrow:
            once = sorted(letter for letter in set(left) if letter.isalpha() and left.count(letter) == 1)
            right = ("..." if "..." in left else "") + "".join(once)
        return left.split(","), right

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype = same_dtype(c, range(len(c.node.inputs)))
        check_kind(c, 0, NUMBER)
        terms, output = self.terms(c)
        shapes = [c.shape(i) for i in range(len(c.node.inputs))]
        if len(terms) != len(shapes):
            c.fail(f"equation '{c.attr('equation')}' has {len(terms)} terms for {len(shapes)} inputs")
        extents: dict[Label, Dim] = {}
        for term, shape in zip(terms, shapes, strict=True):
            if shape is None:
                return [TensorType(dtype, None)]
            for label, dim in zip(_labels(c, term, len(shape)), shape, strict=True):
                extents[label] = _common_extent(c, label, extents.get(label, 1), dim)
        hidden = sum(isinstance(label, int) for label in extents)
        labels = _labels(c, output, len(output.replace("...", "")) + hidden * ("..." in output))
        if not set(labels) <= extents.keys():
            c.fail(f"equation '{c.attr('equation')}' names an axis of the output that no input has")
        return [TensorType(dtype, tuple(extents[label] for label in labels))]

    def reference(self, c: Call, *inputs: Array) -> Array:
        result = np.einsum(c.attr("equation").replace(" ", ""), *map(as_computed, inputs))
        return np.asarray(result).astype(inputs[0].dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        """Rows stay apart if the label of their axis is in all inputs with rows, in no other input, and in the output.

        Each of these terms has it once.
        """
        terms, output = self.terms(c)
        ranks = [len(c.tensor(i).dims) for i in range(len(axes))]
        labels = [_labels(c, term, rank) for term, rank in zip(terms, ranks, strict=True)]
        found = {term[axis] for term, axis in zip(labels, axes, strict=True) if axis is not None}
        if not found:
            return [None]
        row = found.pop()
        result = _labels(c, output, c.node.output.tensor.rank)
        shared = all((row in term) == (axis is not None) for term, axis in zip(labels, axes, strict=True))
        if found or not shared or result.count(row) != 1 or any(term.count(row) > 1 for term in labels):
            return MixesRows("Einsum sums over the row axis, or not all its operands have rows along one axis")
        return [result.index(row)]

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """Matrix products, for any number of operands; see `einsum_definition.py`."""
        terms, output = self.terms(g)
        labels = [_labels(g, term, x.rank) for term, x in zip(terms, g.terms, strict=True)]
        result = _labels(g, output, g.node.output.tensor.rank)
        return [define([Labelled.of(*pair) for pair in zip(labels, g.terms, strict=True)], result)]

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """Each input's gradient is the Einsum of dY and the other inputs, expanded along axes that only this input has.

        UnsupportedError if a term has a letter twice: a diagonal.
        """
        terms, output = self.terms(g)
        names = _letters(g, terms, output)
        labels = [_with_letters(term, x.rank, names) for term, x in zip(terms, g.terms, strict=True)]
        result = _with_letters(output, g.dy().rank, names)
        found: list[Term | None] = []
        for i, own in enumerate(labels):
            if len(set(own)) < len(own):
                g.unsupported(f"equation '{g.attr('equation')}' takes a diagonal, which is not differentiated")
            others = [(result, g.dy()), *((labels[j], x) for j, x in enumerate(g.terms) if j != i)]
            found.append(_contract(own, g.terms[i].shape, others))
        return found


def _letters(c: NodeView, terms: Sequence[str], output: str) -> dict[Label, str]:
    """An unused letter for each axis that the ellipsis may stand for, by its index from the right (-1, -2, ..)."""
    free = sorted(set(string.ascii_letters).difference("".join(terms), output))
    return {-1 - i: letter for i, letter in enumerate(free)}


def _with_letters(term: str, rank: int, names: Mapping[Label, str]) -> str:
    """A term for a tensor of rank `rank`, with the ellipsis replaced by the letters `names` of its axes."""
    hidden = rank - len(term.replace("...", ""))
    return term.replace("...", "".join(names[axis] for axis in range(-hidden, 0)))


def _contract(own: str, shape: Sequence[Dim], others: Sequence[tuple[str, Term]]) -> Term:
    """The Einsum of `others`, pairs of term and operand, with output term `own`, expanded to `shape`.

    Axes in `own` that no operand has are the expanded ones.
    """
    known = set("".join(label for label, _ in others))
    kept = "".join(label for label in own if label in known)
    equation = ",".join(label for label, _ in others) + "->" + kept
    (_, first), *rest = others
    total = first.op("Einsum", *(term for _, term in rest), equation=equation)
    missing = [axis for axis, label in enumerate(own) if label not in known]
    return total.unsqueeze(*missing).expand(shape) if missing else total


def _labels(c: NodeView, term: str, rank: int) -> list[Label]:
    """One label per axis of a tensor of rank `rank`: its letter; under an ellipsis, its index from the right (-1, ..).

    ModelError if the term does not fit the rank.
    """
    before, ellipsis, after = term.partition("...")
    hidden = rank - len(before) - len(after)
    if not (before + after).isalpha() and before + after:
        c.fail(f"equation '{c.attr('equation')}' has a term '{term}', expected letters and at most one '...'")
    if hidden < 0 or (hidden > 0 and not ellipsis):
        c.fail(f"equation '{c.attr('equation')}' has a term '{term}' for a tensor of rank {rank}")
    return [*before, *range(-hidden, 0), *after]


def _common_extent(c: Infer, label: Label, x: Dim, y: Dim) -> Dim:
    """The common extent of a label with extents x and y; an extent of 1 broadcasts. ModelError for different numbers.

    Two different symbolic extents give a new symbol.
    """
    c.broadcast([dim for dim in (x, y) if dim != 1])
    if isinstance(x, int) and isinstance(y, int) and x != y and 1 not in (x, y):
        c.fail(f"axis '{label}' of equation '{c.attr('equation')}' is {x} in one input and {y} in another")
    if x == 1 or x == y:
        return y
    if isinstance(x, int) or y == 1:
        return x
    return y if isinstance(y, int) else c.fresh_dim(f"of_{label}".replace("-", "last"))
