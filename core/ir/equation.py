"""Solving the equation of two dimensions for a symbol, or for a maximum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import reduce
from math import gcd

from core.ir.dim import Atom, Dim, Larger, Monomial, SymDim, is_never_negative, maxima, replaced, symbols


def solved(one: Dim, other: Dim, is_free: Callable[[str], bool]) -> tuple[str, Dim] | None:
    """A free symbol, and what it is where both dimensions are equal; None where that does not follow.

    The result is never negative, unless it is one of the two dimensions as it stands. Both sides may be divided by
    factors that they share: where those are 0, the dimensions are equal for other values, too.
    """
    for plain, dim in ((one, other), (other, one)):
        name = str(plain)
        if isinstance(plain, SymDim) and plain.names == {name} and is_free(name) and name not in symbols(dim):
            return name, dim
    difference = one - other
    reduced = _without_shared(difference) if isinstance(difference, SymDim) else difference
    return next((each for each in _solutions(reduced, is_free) if is_never_negative(each[1])), None)


def side_taken(one: Dim, other: Dim) -> tuple[Larger, Dim] | None:
    """A maximum in the two dimensions, and which of its sides it is where they are equal: 64 where 2*(64|n) is 128.
    None where that does not follow. Where factors that both share are 0, they are equal for other values, too."""
    difference = one - other
    for maximum in maxima(difference):
        if isinstance(difference, SymDim) and any(atoms.count(maximum) > 1 for atoms, _ in difference.terms):
            continue  # its square may have a second solution
        for side in maximum.sides:
            if replaced(difference, maximum, side) == 0:
                return maximum, side
    return None


def _solutions(difference: Dim, is_free: Callable[[str], bool]) -> Iterator[tuple[str, Dim]]:
    """Each free symbol that is a term of its own, and what it is where the difference is 0. Of symbols that stand for
    each other, the last one comes first: it is named by an earlier one."""
    if isinstance(difference, int):
        return
    for atoms, value in sorted(difference.terms, key=lambda term: str(term[0]), reverse=True):
        name = atoms[0] if len(atoms) == 1 else None
        if isinstance(name, str) and value in (1, -1) and is_free(name):
            rest = difference - SymDim([(atoms, value)])
            if name not in symbols(rest):
                yield name, rest * -value


def _without_shared(dim: SymDim) -> SymDim:
    """The dimension divided by all factors that its terms share."""
    factor = reduce(gcd, [value for _, value in dim.terms])
    shared = reduce(lambda a, b: a & b, [Counter(atoms) for atoms, _ in dim.terms])
    return SymDim([(_left(atoms, shared), value // factor) for atoms, value in dim.terms])


def _left(atoms: Monomial, shared: Counter[Atom]) -> Monomial:
    left = list(atoms)
    for atom in shared.elements():
        left.remove(atom)
    return tuple(left)
