"""Symbolic dimensions: integers, or polynomials over named symbols with floor division and maxima.

A dimension is a plain `int` whenever it is known. Otherwise it is a `SymDim`: a polynomial with integer coefficients
over atoms, in a normal form, so that equal expressions compare and hash equal. An atom is a symbol (`n`), a quotient
that is not known to divide evenly (`(H - 1)//2`) or the maximum of two dimensions (`(p)|(t)`). Symbols stand for
non-negative integers. Quotients are rounded down. A quotient by zero has no value: it stays an atom, and `evaluate`
raises KeyError for it.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import gcd, prod
from typing import TypeAlias, Union

Dim: TypeAlias = Union[int, "SymDim"]

_NO_NAMES: frozenset[str] = frozenset()

# Far beyond real models. Without a limit, a hostile model could square a dimension repeatedly until memory is full.
_MAX_SIZE = 512
_MAX_SPLIT = 40  # the largest `size` for `_is_for_the_sides`, whose time is exponential in the number of maxima


@dataclass(frozen=True, slots=True)
class FloorDiv:
    """The atom `numerator // denominator`, whose division is not known to be exact, or is by 0."""

    numerator: Dim
    denominator: Dim

    def __str__(self) -> str:
        return f"(({self.numerator})//({self.denominator}))"

    @property
    def sides(self) -> tuple[Dim, Dim]:
        """The two operands of the atom."""
        return self.numerator, self.denominator


@dataclass(frozen=True, slots=True)
class Maximum:
    """The atom `max(one, other)`, printed as `((one)|(other))`; neither side is known to be at least the other.

    `maximum` sorts the two sides, so equal maxima compare equal.
    """

    one: Dim
    other: Dim

    def __str__(self) -> str:
        return f"(({self.one})|({self.other}))"

    @property
    def sides(self) -> tuple[Dim, Dim]:
        """The two operands of the atom."""
        return self.one, self.other


Atom: TypeAlias = str | FloorDiv | Maximum
Monomial: TypeAlias = tuple[Atom, ...]


class SymDim:
    """A dimension that depends on symbols. Build with `symbol(name)` and arithmetic; immutable.

    `/` means the same as `//`. A number may stand on the left of `//`; on the left of `/` and `%` it raises TypeError.
    `%` raises ZeroDivisionError for the number 0. ValueError if a result has more than `_MAX_SIZE` parts (`size`: terms
    and atoms, nested ones included).
    """

    __slots__ = ("_hash", "_names", "size", "terms")

    def __init__(self, terms: Sequence[tuple[Monomial, int]]) -> None:
        self.terms = tuple(terms if len(terms) == 1 else sorted(terms, key=_term_order))
        self.size = len(self.terms) + sum([_size(atom) for atoms, _ in self.terms for atom in atoms])
        self._names: frozenset[str] | None = None
        if self.size > _MAX_SIZE:
            raise ValueError(f"a dimension has {self.size} parts, expected at most {_MAX_SIZE}")
        self._hash = hash(self.terms)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self.terms == other.terms if isinstance(other, SymDim) else NotImplemented  # a Ratio raises TypeError

    def __add__(self, other: Dim) -> Dim:
        if not isinstance(other, int | SymDim):
            return NotImplemented
        if isinstance(other, int) and other == 0:
            return self
        total = dict(self.terms)
        for monomial, coefficient in _terms(other):
            total[monomial] = total.get(monomial, 0) + coefficient
        return _make(total)

    __radd__ = __add__

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: Dim) -> Dim:
        return self + (-other)

    def __rsub__(self, other: Dim) -> Dim:
        return -self + other

    def __mul__(self, other: Dim) -> Dim:
        if not isinstance(other, int | SymDim):
            return NotImplemented
        if isinstance(other, int) and other:
            return self if other == 1 else self._times_number(other)
        total: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in _terms(other):
                product = tuple(sorted(left + right, key=str))
                total[product] = total.get(product, 0) + a * b
        return _make(total)

    __rmul__ = __mul__

    def _times_number(self, number: int) -> SymDim:
        """The product with a number that is not 0. Terms keep their order and number, so they are not sorted again."""
        scaled = SymDim.__new__(SymDim)
        scaled.terms = tuple([(atoms, value * number) for atoms, value in self.terms])
        scaled.size, scaled._names, scaled._hash = self.size, self._names, hash(scaled.terms)
        return scaled

    def __floordiv__(self, other: Dim) -> Dim:
        return floor_div(self, other)

    def __rfloordiv__(self, other: Dim) -> Dim:
        return floor_div(other, self)

    def __truediv__(self, other: Dim) -> Dim:
        return floor_div(self, other)

    def __mod__(self, other: Dim) -> Dim:
        if other == 0:
            raise ZeroDivisionError(f"{self} modulo zero")
        return self - floor_div(self, other) * other

    @property
    def names(self) -> frozenset[str]:
        """The names of all symbols that the dimension depends on."""
        if self._names is None:
            self._names = frozenset().union(*(_names(atom) for atoms, _ in self.terms for atom in atoms))
        return self._names

    def __str__(self) -> str:
        return _text(self)

    def __repr__(self) -> str:
        return f"SymDim({_text(self)})"


@lru_cache(maxsize=1 << 12)
def symbol(name: str) -> SymDim:
    """The dimension that consists of the symbol `name`."""
    return SymDim([((name,), 1)])


def floor_div(numerator: Dim, denominator: Dim) -> Dim:
    """`numerator // denominator` in normal form: the terms that divide exactly, plus a `FloorDiv` atom of the rest.

    Terms that divide move out of the quotient: (n - 20)//10 is n//10 - 2. Nested quotients by positive numbers become
    one: (n//5 + 1)//2 is (n + 5)//10. Factors that numerator and denominator share are cancelled; a sum is cancelled
    only if it is the whole denominator. Where a cancelled factor is 0, the quotient has no value, but the result may
    have one: n*m//n is m. For the denominator 0 the result is an atom, also if the numerator is a number.
    """
    if isinstance(denominator, int) and denominator == 0:
        return SymDim([((FloorDiv(numerator, denominator),), 1)])
    if isinstance(numerator, int) and isinstance(denominator, int):
        return numerator // denominator
    if numerator == denominator:
        return 1
    if isinstance(denominator, int) and denominator < 0:
        return floor_div(-numerator, -denominator)
    divisor = _terms(denominator)
    if len(divisor) == 1:
        whole, rest = _divide_terms(numerator, *divisor[0])
        if rest == 0:
            return whole
        if isinstance(denominator, int) and isinstance(rest, int):
            return whole + rest // denominator
        return _opaque(rest, denominator) + whole
    exact = _divide_exactly(numerator, denominator)
    return _opaque(numerator, denominator) if exact is None else exact


def maximum(one: Dim, other: Dim) -> Dim:
    """The maximum of two dimensions: one of them if that is provable, otherwise a `Maximum` atom.

    Common terms stand outside of the atom, so that equal maxima have one form: the maximum of 64 - n and 0 is the
    maximum of 64 and n, minus n.
    """
    difference = one - other
    if isinstance(difference, int) or is_never_negative(difference):
        return one if isinstance(difference, SymDim) or difference >= 0 else other
    if is_never_negative(-difference):
        return other
    common = _common(one, other)
    first, second = sorted((one - common, other - common), key=str)
    return SymDim([((Maximum(first, second),), 1)]) + common


def _common(one: Dim, other: Dim) -> Dim:
    """The common part of two dimensions: each term with the smaller of its two coefficients (0 where it is absent)."""
    first, second = dict(_terms(one)), dict(_terms(other))
    return _make({atoms: min(first.get(atoms, 0), second.get(atoms, 0)) for atoms in first | second})


def evaluate(dim: Dim, env: Mapping[str, int]) -> int:
    """The integer value of `dim`. KeyError if a symbol is missing from `env`, or a quotient divides by zero."""
    value = substitute(dim, env)
    if isinstance(value, int):
        return value
    missing = sorted(symbols(value))
    raise KeyError(f"no value for {', '.join(missing)} in {value}" if missing else f"{dim} divides by zero: {value}")


def is_never_negative(dim: Dim) -> bool:
    """Whether `dim` is provably 0 or more for every value of its symbols; False if that is not known."""
    if isinstance(dim, int):
        return dim >= 0
    return _is_counted(dim) or (dim.size <= _MAX_SPLIT and _is_for_the_sides(dim))


def _is_for_the_sides(dim: SymDim) -> bool:
    """Whether `dim` is never negative whichever side a maximum in it equals: n - max(n, 64) + 64 is n or 64.

    If the maximum is only added, one side suffices: the maximum is at least that side. Maxima that are terms by
    themselves are tried; False if there is none.
    """
    maximum = next((atoms[0] for atoms, _ in dim.terms if len(atoms) == 1 and isinstance(atoms[0], Maximum)), None)
    if maximum is None:
        return False
    adds = all(value > 0 and len(atoms) == 1 for atoms, value in dim.terms if maximum in atoms)
    return (any if adds else all)(is_never_negative(replace_atom(dim, maximum, side)) for side in maximum.sides)


def _is_counted(dim: SymDim) -> bool:
    """Whether the sum of lower bounds of the terms of `dim` is 0 or more; False if a term has no known bound."""
    least = 0
    for atoms, value in dim.terms:
        bounds = [_least(atom) for atom in atoms]
        if any(bound < 0 for bound in bounds) or (value < 0 and atoms):
            return False
        least += value * prod(bounds)
    return least >= 0


def _least(atom: Atom) -> int:
    """A lower bound of `atom`, 0 or more; -1 if no such bound is known.

    Symbols are 0 or more, those that begin with `FILLED` 1 or more. A quotient of two dimensions that are not negative
    is not negative. A maximum is at least each number among its sides, and not negative if one of its sides is not.
    """
    if isinstance(atom, str):
        return int(atom.startswith(FILLED))
    if isinstance(atom, Maximum):
        numbers = [side for side in atom.sides if isinstance(side, int)]
        return max([-1, *numbers, *(0 for side in atom.sides if is_never_negative(side))])
    return 0 if all(map(is_never_negative, atom.sides)) else -1


FILLED = "filled"  # the prefix of sizes that are 1 or more (`lathe.core.ir.dims`)
DATA_DEPENDENT_PREFIX = (
    "_"  # the prefix of data-dependent symbols: no input has them, and only a run determines their values
)


def is_data_dependent(dim: Dim) -> bool:
    """Whether only a run gives the value of `dim`: it has a symbol that begins with `DATA_DEPENDENT_PREFIX`."""
    return any(name.startswith(DATA_DEPENDENT_PREFIX) for name in symbols(dim))


def violated_assumption(supposed: Iterable[Dim], values: Mapping[str, int]) -> str:
    """A message on the first assumption that is violated for these values of the symbols; "" if none is.

    Each dimension in `supposed` is assumed to be 0 or more. A dimension without a value, because of a quotient by zero
    or a symbol that `values` lacks, counts as violated.
    """
    try:
        found = ((dim, evaluate(dim, values)) for dim in supposed)
        return next((f"a dimension {dim} would be {value}" for dim, value in found if value < 0), "")
    except KeyError as error:  # a quotient by zero, or a symbol without a value
        return str(error.args[0])


def assumptions_hold(supposed: Iterable[Dim], values: Mapping[str, int]) -> bool:
    """Whether no assumption is violated for these values: as `violated_assumption`, without the message."""
    found = (substitute(dim, values) for dim in supposed)
    return all(isinstance(value, int) and value >= 0 for value in found)


def is_checked_at_run_time(supposed: Dim) -> bool:
    """Whether `supposed >= 0` may fail, and can only be checked while the model runs: it is data-dependent."""
    return is_data_dependent(supposed) and not is_never_negative(supposed)  # names are faster to look at than terms


def substitute(dim: Dim, env: Mapping[str, Dim]) -> Dim:
    """`dim` with every symbol in `env` replaced by its dimension."""
    if isinstance(dim, int) or dim.names.isdisjoint(env):
        return dim
    total: Dim = 0
    for monomial, coefficient in dim.terms:
        product: Dim = coefficient
        for atom in monomial:
            product = product * _substitute_atom(atom, env)
        total = total + product
    return total


def maxima(dim: Dim) -> tuple[Maximum, ...]:
    """The maxima among the factors of a dimension's terms, each once."""
    found = (atom for atoms, _ in _terms(dim) for atom in atoms if isinstance(atom, Maximum))
    return tuple(dict.fromkeys(found))


def replace_atom(dim: Dim, atom: Atom, by: Dim) -> Dim:
    """`dim` with `atom` replaced by the dimension `by` in all terms that have it as a factor."""
    total: Dim = 0
    for atoms, coefficient in _terms(dim):
        total = total + product([coefficient, *(by if each == atom else SymDim([((each,), 1)]) for each in atoms)])
    return total


def symbols(dim: Dim) -> frozenset[str]:
    """The names of all symbols that `dim` depends on."""
    return _NO_NAMES if isinstance(dim, int) else dim.names


def affine(dim: Dim, name: str) -> tuple[int, int] | None:
    """Two integers `(a, b)` with dim == a*name + b, or None if `dim` is not of that form; (0, dim) for a number."""
    if isinstance(dim, int):
        return 0, dim
    a = b = 0
    for monomial, coefficient in dim.terms:
        if monomial == ():
            b = coefficient
        elif monomial == (name,):
            a = coefficient
        else:
            return None
    return a, b


def product(dims: Iterable[Dim]) -> Dim:
    """The product of dimensions; 1 for none."""
    number = 1  # integers are multiplied first, because each product with a SymDim builds a new one
    result: Dim | None = None
    for dim in dims:
        if isinstance(dim, SymDim):
            result = dim if result is None else result * dim
        else:
            number *= dim
    return number if result is None else result * number if number != 1 else result


def parse_dim(text: str) -> Dim:
    """Parse the text of a dimension, as in `str(dim)`. ValueError for other text.

    The text has integers and symbols, joined with `+`, `-`, `*`, `//`, `|` (maximum) and parentheses.
    """
    found = _DimParser(text)
    try:
        dim = found.at_level("|")
    except RecursionError as error:
        raise ValueError(f"not a dimension: {text!r}") from error
    if found.token:
        raise found.error()
    return dim


_TOKEN = re.compile(r"//|\w+|\S")
_LEVELS: Mapping[str, Mapping[str, Callable[[Dim, Dim], Dim]]] = {  # operators by how tightly they bind
    "|": {"|": maximum},
    "+": {"+": operator.add, "-": operator.sub},
    "*": {"*": operator.mul, "//": floor_div},
}
_TIGHTER = {"|": "+", "+": "*"}


class _DimParser:
    """Reads the text of a dimension by recursive descent: `|` binds least, then `+` and `-`, then `*` and `//`.

    Python's own parser would do, but in Python 3.11 it can fail when two threads use it (CPython issue 106905).
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = iter(_TOKEN.findall(text))
        self.token = ""  # the next one, "" at the end
        self._take()

    def error(self) -> ValueError:
        return ValueError(f"not a dimension: {self._text!r}")

    def at_level(self, level: str) -> Dim:
        """An operand, and operators of this level or tighter ones with their operands, from left to right."""
        tighter = _TIGHTER.get(level)
        dim = self.at_level(tighter) if tighter else self._operand()
        while self.token in _LEVELS[level]:
            apply = _LEVELS[level][self._take()]
            dim = apply(dim, self.at_level(tighter) if tighter else self._operand())
        return dim

    def _operand(self) -> Dim:
        token = self._take()
        if token == "-":
            return -self._operand()
        if token == "(":
            dim = self.at_level("|")
            if self._take() != ")":
                raise self.error()
            return dim
        if token.isdecimal() and token.isascii():
            return int(token)
        if token.isidentifier():
            return symbol(token)
        raise self.error()

    def _take(self) -> str:
        token, self.token = self.token, next(self._tokens, "")
        return token


def _terms(dim: Dim) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(dim, SymDim):
        return dim.terms
    return (((), int(dim)),) if dim else ()


def _names(atom: Atom) -> frozenset[str]:
    return frozenset((atom,)) if isinstance(atom, str) else frozenset().union(*map(symbols, atom.sides))


def _size(atom: Atom) -> int:
    """The number of terms and atoms in `atom`, including `atom` itself: a measure of its complexity."""
    if isinstance(atom, str):
        return 1
    return 1 + sum(side.size for side in atom.sides if isinstance(side, SymDim))


def _make(total: dict[Monomial, int]) -> Dim:
    terms = [(monomial, coefficient) for monomial, coefficient in total.items() if coefficient]
    if not terms:
        return 0
    if len(terms) == 1 and terms[0][0] == ():
        return terms[0][1]
    return SymDim(terms)


def _term_order(term: tuple[Monomial, int]) -> tuple[int, str]:
    return -len(term[0]), "*".join(map(str, term[0]))


def _divide_terms(numerator: Dim, monomial: Monomial, coefficient: int) -> tuple[Dim, Dim]:
    """Divide `numerator` by the term `coefficient * monomial`: the sum of the exact quotients of terms, and the rest.

    The rest is the sum of the terms that do not divide. A constant term divided by a number is split: its quotient,
    rounded down, goes to the first result and its remainder to the rest.
    """
    whole: Dim = 0
    rest: Dim = 0
    for atoms, value in _terms(numerator):
        quotient = _without(atoms, monomial)
        if quotient is None or (value % coefficient and atoms):
            rest = rest + _make({atoms: value})
        else:
            whole = whole + _make({quotient: value // coefficient})
            rest = rest + value % coefficient
    return whole, rest


def _divide_exactly(numerator: Dim, denominator: Dim) -> Dim | None:
    """The exact quotient by polynomial long division: 4*n for 4*n*H - 4*n by H - 1.

    None if the division is not exact, or an intermediate result has more than `_MAX_SIZE` parts.
    """
    atoms, coefficient = _highest(denominator)
    whole: Dim = 0
    with suppress(ValueError):
        while numerator != 0:
            own, value = _highest(numerator)
            quotient = _without(own, atoms)
            if quotient is None or value % coefficient:
                return None
            part = _make({quotient: value // coefficient})
            whole, numerator = whole + part, numerator - part * denominator
        return whole
    return None


def _highest(dim: Dim) -> tuple[Monomial, int]:
    """The leading term and its coefficient: that with the most factors, and of several the first by their names.

    This is a monomial order: the leading term of a product is the product of the leading terms, as division needs.
    """
    return min(_terms(dim), key=lambda term: (-len(term[0]), *map(str, term[0])))


def _without(atoms: Monomial, divisor: Monomial) -> Monomial | None:
    """The monomial `atoms` divided by the monomial `divisor`, or None if it is not divisible."""
    remaining = list(atoms)
    for atom in divisor:
        if atom not in remaining:
            return None
        remaining.remove(atom)
    return tuple(remaining)


def _opaque(numerator: Dim, denominator: Dim) -> Dim:
    """The floor quotient of dimensions that do not divide: a `FloorDiv` atom, after common factors are cancelled."""
    if isinstance(denominator, int) and isinstance(numerator, SymDim):
        return _divide_by_number(numerator, denominator)
    terms = _terms(numerator) + _terms(denominator)
    common = reduce(gcd, [abs(c) for _, c in terms])
    shared = _common_atoms([atoms for atoms, _ in terms])
    if common > 1 or shared:
        numerator, denominator = (_cancel(side, common, shared) for side in (numerator, denominator))
        return floor_div(numerator, denominator)  # a denominator that has become 1 leaves no quotient
    return SymDim([((FloorDiv(numerator, denominator),), 1)])


def _divide_by_number(numerator: SymDim, denominator: int) -> Dim:
    """The floor quotient by a positive number; common factors are cancelled, and a nested quotient is merged."""
    constant = next((value for atoms, value in numerator.terms if not atoms), 0)
    common = reduce(gcd, [value for atoms, value in numerator.terms if atoms], denominator)
    if common > 1:  # (2*n + 1)//4 is n//2: floor((2*n + 1) / 2) is n
        return floor_div(_cancel(numerator - constant, common, ()) + constant // common, denominator // common)
    inner = _quotient_term(numerator)
    if inner is not None:
        rest = numerator - SymDim([((inner,), 1)])
        return floor_div(rest * inner.denominator + inner.numerator, denominator * inner.denominator)
    return SymDim([((FloorDiv(numerator, denominator),), 1)])


def _quotient_term(dim: SymDim) -> FloorDiv | None:
    """A `FloorDiv` atom by a positive number that is, by itself, a term of `dim`; None if there is none."""
    for atoms, value in dim.terms:
        atom = atoms[0] if value == 1 and len(atoms) == 1 else None
        if isinstance(atom, FloorDiv) and isinstance(atom.denominator, int) and atom.denominator > 0:
            return atom
    return None


def _common_atoms(monomials: Iterable[Monomial]) -> Monomial:
    """The greatest common divisor of monomials: the atoms that all have, with multiplicity."""
    first, *rest = map(Counter, monomials)
    for atoms in rest:
        first &= atoms
    return tuple(first.elements())


def _cancel(dim: Dim, by: int, atoms: Monomial) -> Dim:
    """`dim` divided by `by` times `atoms`, which divide every term."""
    return _make({_without(own, atoms) or (): value // by for own, value in _terms(dim)})


def _substitute_atom(atom: Atom, env: Mapping[str, Dim]) -> Dim:
    if isinstance(atom, str):
        return env.get(atom, symbol(atom))
    operation = floor_div if isinstance(atom, FloorDiv) else maximum
    return operation(*(substitute(side, env) for side in atom.sides))


def _text(dim: SymDim) -> str:
    parts: list[str] = []
    for monomial, coefficient in dim.terms:
        factors = [str(atom) for atom in monomial]
        if abs(coefficient) != 1 or not factors:
            factors.insert(0, str(abs(coefficient)))
        sign = "-" if coefficient < 0 else ("+" if parts else "")
        parts.append(sign + "*".join(factors))
    return "".join(parts)
