"""Solves the equation `one == other` of two dimensions for a symbol, or for a maximum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import reduce
from math import gcd

from lathe.core.ir.dim import Atom, Dim, Maximum, Monomial, SymDim, is_never_negative, maxima, replace_atom, symbols


def solve(one: Dim, other: Dim, is_free: Callable[[str], bool]) -> tuple[str, Dim] | None:
    """A symbol for which `is_free` is true, and the value for which `one` equals `other`; None if none is found.

    The value does not depend on the symbol. It is provably never negative, unless it is `one` or `other` itself.
    Factors that all terms of `one - other` share are divided out: where such a factor is 0, the dimensions are equal
    for other values of the symbol as well.
    """
    for side, dim in ((one, other), (other, one)):
        name = str(side)
        if isinstance(side, SymDim) and side.names == {name} and is_free(name) and name not in symbols(dim):
            return name, dim
    difference = one - other
    reduced = _without_common_factors(difference) if isinstance(difference, SymDim) else difference
    return next((each for each in _solutions(reduced, is_free) if is_never_negative(each[1])), None)


def solve_maximum(one: Dim, other: Dim) -> tuple[Maximum, Dim] | None:
    """A maximum in `one - other`, and the side that it must equal for `one == other`; None if none is found.

    For 2*(64|n) == 128 these are the maximum of 64 and n, and its side 64. Where a factor that all terms share is 0,
    the dimensions are equal for other values of the maximum as well.
    """
    difference = one - other
    for maximum in maxima(difference):
        if isinstance(difference, SymDim) and any(atoms.count(maximum) > 1 for atoms, _ in difference.terms):
            continue  # an equation in its square may have a second solution
        for side in maximum.sides:
            if replace_atom(difference, maximum, side) == 0:
                return maximum, side
    return None


def _solutions(difference: Dim, is_free: Callable[[str], bool]) -> Iterator[tuple[str, Dim]]:
    """Yield each free symbol with the value that makes `difference` 0, if it is a term with factor 1 or -1.

    The symbol may be in no other term. The last symbol by name comes first, so that a symbol is expressed by those
    before it.
    """
    if isinstance(difference, int):
        return
    for atoms, value in sorted(difference.terms, key=lambda term: str(term[0]), reverse=True):
        name = atoms[0] if len(atoms) == 1 else None
        if isinstance(name, str) and value in (1, -1) and is_free(name):
            rest = difference - SymDim([(atoms, value)])
            if name not in symbols(rest):
                yield name, rest * -value


def _without_common_factors(dim: SymDim) -> SymDim:
    """`dim` divided by the greatest common divisor of its terms: of their numbers, symbols and other atoms."""
    factor = reduce(gcd, [value for _, value in dim.terms])
    shared = reduce(lambda a, b: a & b, [Counter(atoms) for atoms, _ in dim.terms])
    return SymDim([(_remaining_factors(atoms, shared), value // factor) for atoms, value in dim.terms])


def _remaining_factors(atoms: Monomial, shared: Counter[Atom]) -> Monomial:
    remaining = list(atoms)
    for atom in shared.elements():
        remaining.remove(atom)
    return tuple(remaining)
