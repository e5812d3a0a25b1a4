"""The definition of Einsum by reductions, transposes and matrix products.

More than two operands are multiplied two at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import TypeAlias

from lathe.core.errors import UnsupportedError
from lathe.core.ir.dim import product
from lathe.core.ir.types import Dim
from lathe.core.ops.opdef.terms import Term

# The label of an axis is its letter, or its negative index among the axes of the ellipsis. A joined axis has the tuple
# of its labels.
Label: TypeAlias = str | int | tuple["Label", ...]
Labels: TypeAlias = Sequence[Label]

_SOME = 64  # the assumed size of a symbolic extent when sizes are compared


@dataclass(frozen=True)
class Labelled:
    """A tensor with a label for each of its axes; all labels differ."""

    labels: tuple[Label, ...]
    term: Term

    @classmethod
    def of(cls, labels: Labels, term: Term) -> Labelled:
        """The tensor `term` with these labels; of axes with the same label, the diagonal becomes the last axis.

        UnsupportedError if the extents of a diagonal are not known to be equal.
        """
        found, own = list(labels), term
        for label in dict.fromkeys(labels):
            while found.count(label) > 1:
                first = found.index(label)
                second = found.index(label, first + 1)
                own = _diagonal(own, first, second)
                found = [each for i, each in enumerate(found) if i not in (first, second)] + [label]
        return cls(tuple(found), own)

    @property
    def is_constant(self) -> bool:
        return self.term.value in self.term.writer.known

    def extent(self, label: Label) -> Dim:
        return self.term.shape[self.labels.index(label)]

    def only(self, labels: Labels) -> Labelled:
        """The tensor summed over all its axes except those with these labels, which stay in the tensor's order."""
        kept = tuple(label for label in self.labels if label in labels)
        gone = [axis for axis, label in enumerate(self.labels) if label not in labels]
        return Labelled(kept, self.term.sum(gone, keepdims=False)) if gone else self

    def without(self, labels: Labels) -> Labelled:
        """The tensor without those of these axes that it has, which have extent 1."""
        gone = [axis for axis, label in enumerate(self.labels) if label in labels]
        kept = tuple(label for label in self.labels if label not in labels)
        return Labelled(kept, self.term.squeeze(*gone)) if gone else self

    def join_axes(self, labels: Labels) -> Labelled:
        """The tensor with these axes reshaped into one, in this order; transposed before if they are not adjacent."""
        if len(labels) < 2:
            return self
        first = self.labels.index(labels[0])
        if self.labels[first : first + len(labels)] != tuple(labels):
            rest = [label for label in self.labels if label not in labels]
            return Labelled((*rest, *labels), self.ordered([*rest, *labels])).join_axes(labels)
        last, shape = first + len(labels), self.term.shape
        view = self.term.reshape((*shape[:first], product(shape[first:last]), *shape[last:]))
        return Labelled((*self.labels[:first], tuple(labels), *self.labels[last:]), view)

    def ordered(self, labels: Labels) -> Term:
        """The tensor with its axes in this order. Axes that it lacks get extent 1, or are left out if they lead."""
        while labels and labels[0] not in self.labels:
            labels = labels[1:]
        missing = [label for label in labels if label not in self.labels]
        rank = len(self.labels)
        full = self.term.unsqueeze(*range(rank, rank + len(missing))) if missing else self.term
        there = [*self.labels, *missing]
        return full.transpose(*(there.index(label) for label in labels))


def define(operands: Sequence[Labelled], result: Labels) -> Term:
    """The product of all operands, summed over the labels that `result`, the labels of the output, lacks.

    UnsupportedError if the result has an axis twice, or if the equality of extents is known only in a run.
    """
    if len(set(result)) < len(result):
        raise UnsupportedError("only an Einsum whose result has each axis once is rewritten")
    if len(operands) > 2:
        return define(_multiply_two(operands, result), result)
    if len(operands) == 1:
        return operands[0].only(result).ordered(result)
    a, b = _drop_broadcast(*operands)
    a, b = a.only((*b.labels, *result)), b.only((*a.labels, *result))
    if all(label in result for label in a.labels if label in b.labels):
        return a.ordered(result) * b.ordered(result)
    if set(a.labels) == set(b.labels):
        order = [*result, *(label for label in a.labels if label not in result)]
        return (a.ordered(order) * b.ordered(order)).sum(range(len(result), len(order)), keepdims=False)
    if _should_exchange(a, b, result[-1]):
        a, b = b, a
    return _product(a, b, result)


def _multiply_two(operands: Sequence[Labelled], result: Labels) -> list[Labelled]:
    """The operands with two of them replaced by their product.

    The product is summed over axes that neither the other operands nor the result have. The pair with the smallest
    product is chosen, where a symbolic extent counts as `_SOME`; of several such pairs the first.
    """

    def kept_labels(pair: tuple[int, int]) -> list[Label]:
        others = [each.labels for i, each in enumerate(operands) if i not in pair]
        needed = {label for labels in (*others, result) for label in labels}
        both = (*operands[pair[0]].labels, *operands[pair[1]].labels)
        return [label for label in dict.fromkeys(both) if label in needed]

    def size(pair: tuple[int, int]) -> int:
        one, other = (operands[i] for i in pair)
        extents = [one.extent(label) if label in one.labels else other.extent(label) for label in kept_labels(pair)]
        return prod(extent if isinstance(extent, int) else _SOME for extent in extents)

    pair = min(combinations(range(len(operands)), 2), key=size)
    made = Labelled(tuple(kept_labels(pair)), define([operands[i] for i in pair], kept_labels(pair)))
    return [made, *(each for i, each in enumerate(operands) if i not in pair)]


def _should_exchange(a: Labelled, b: Labelled, last: Label) -> bool:
    """Whether to exchange the operands: if only `a` has the result's last label, so that it becomes the column axis.

    Not if that axis is symbolic while all axes that only `b` has are known.
    """
    known = all(isinstance(b.extent(label), int) for label in b.labels if label not in a.labels)
    return last not in b.labels and (isinstance(a.extent(last), int) or not known)


def _drop_broadcast(a: Labelled, b: Labelled) -> tuple[Labelled, Labelled]:
    """Both operands, without axes of extent 1 that broadcast to an axis of the other operand.

    UnsupportedError for shared axes of other extents that are not known to be equal.
    """
    single: tuple[list[Label], list[Label]] = ([], [])
    for label in (label for label in a.labels if label in b.labels):
        own, other = a.extent(label), b.extent(label)
        if own == other:
            continue
        if 1 not in (own, other):
            raise UnsupportedError(f"only a run shows whether {own} and {other} agree along axis '{label}'")
        single[0 if own == 1 else 1].append(label)
    return a.without(single[0]), b.without(single[1])


def _product(a: Labelled, b: Labelled, result: Labels) -> Term:
    """A batched matrix product of two operands.

    The shared axes that `result` lacks become the summed axis. The last axis that only `a` has becomes the rows of the
    matrices. Axes that only `b` has become columns, if joining them moves no elements (`_columns`). The remaining axes
    are batch axes, along which an operand without them broadcasts.
    """
    depth = [label for label in (b if a.is_constant else a).labels if label in a.labels and label not in result]
    columns, rows = _columns(a, b, result), [label for label in result if label not in b.labels][-1:]
    extents = [a.extent(label) if label in a.labels else b.extent(label) for label in (*rows, *columns)]
    lead = [label for label in result if label not in (*rows, *columns)]
    left = a.join_axes(depth).ordered([*lead, *(rows or ["row"]), _label(depth)])
    right_order = [*lead, _label(depth), _label(columns) if columns else "column"]
    right = b.join_axes(depth).join_axes(columns).ordered(right_order)
    found = left @ right
    found = found.reshape((*found.shape[: len(lead)], *extents))
    return Labelled((*lead, *rows, *columns), found).ordered(result)


def _columns(a: Labelled, b: Labelled, result: Labels) -> list[Label]:
    """The axes that become columns: the last that only `b` has, and those before it that join without a copy.

    For a constant `b`, which may be transposed at compile time, all that have known extents, if it has no batch axis.
    """
    free = [label for label in result if label not in a.labels]
    known = [label for label in free if isinstance(b.extent(label), int)]
    if b.is_constant and known and all(label in free or label not in result for label in b.labels):
        return known
    run = free[-1:]
    for label in reversed(free[:-1] if free[-1:] == known[-1:] else []):
        follows = result[result.index(label) + 1] == run[0] == b.labels[(b.labels.index(label) + 1) % len(b.labels)]
        if not follows or label not in known:
            break
        run.insert(0, label)
    return run


def _label(labels: Labels) -> Label:
    """The label of the axis that `Labelled.join_axes` makes of axes with these labels."""
    return labels[0] if len(labels) == 1 else tuple(labels)


def _diagonal(x: Term, first: int, second: int) -> Term:
    """`x` with the diagonal of two axes in their place, as its last axis. UnsupportedError for unequal extents."""
    size = x.shape[first]
    if not isinstance(size, int) or x.shape[second] != size:
        raise UnsupportedError(f"the extents {size} and {x.shape[second]} of a diagonal are not known to be equal")
    rest = [axis for axis in range(x.rank) if axis not in (first, second)]
    moved = x.transpose(*rest, first, second)
    flat = moved.reshape((*moved.shape[:-2], size * size))
    return flat.slice(len(rest), 0, size * size, size + 1)
