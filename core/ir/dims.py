"""Many dimensions at once: Python code that evaluates them, and the names of the sizes that only a run shows.

Code for any sizes (`core.any_size`) has a symbol for each size: `size0`, `size1`, and so on, in the order of the
model's symbols, or `filled0`, `filled1` where the code supposes that the size is 1 or more. Kernels read the sizes from
a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from core.ir.dim import FILLED, Atom, Dim, FloorDiv, Larger, SymDim, symbol, symbols

Evaluate: TypeAlias = Callable[[Sequence[int]], list[int]]  # sizes to the values of dimensions

_SIZE = re.compile(rf"(?:size|{FILLED})(0|[1-9][0-9]{{0,5}})")


def size(place: int) -> SymDim:
    """The symbol of the size at this place of the table."""
    return symbol(f"size{place}")


def filled(place: int) -> SymDim:
    """The symbol of a size that is supposed to be 1 or more."""
    return symbol(f"{FILLED}{place}")


def place_of(name: str) -> int | None:
    """The place of a size in the table; None for other symbols."""
    found = _SIZE.fullmatch(name)
    return int(found[1]) if found else None


def is_sized(dim: Dim) -> bool:
    """Whether a dimension depends on sizes, and on no other symbols."""
    return isinstance(dim, SymDim) and all(place_of(name) is not None for name in symbols(dim))


def evaluator(dims: Sequence[Dim]) -> Evaluate:
    """A function that evaluates all dimensions for given sizes. It raises ZeroDivisionError for a quotient by zero.

    ValueError for a dimension that depends on anything but sizes.
    """
    text = f"lambda sizes: [{', '.join(map(_source, dims))}]"
    made: Evaluate = eval(compile(text, "<dimensions>", "eval"), {"__builtins__": {}, "max": max})
    return made


def _source(dim: Dim) -> str:
    if isinstance(dim, int):
        return str(dim)
    return " + ".join("*".join([str(number), *map(_atom, atoms)]) for atoms, number in dim.terms)


def _atom(atom: Atom) -> str:
    if isinstance(atom, FloorDiv):
        return f"(({_source(atom.numerator)})//({_source(atom.denominator)}))"
    if isinstance(atom, Larger):
        return f"max({_source(atom.one)}, {_source(atom.other)})"
    place = place_of(atom)
    if place is None:
        raise ValueError(f"dimension {atom} is no size of the table")
    return f"sizes[{place}]"
