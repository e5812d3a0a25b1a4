"""Dimensions of dynamic-shape code: the names of its sizes, and Python code that evaluates many dimensions at once.

Dynamic-shape code (`lathe.core.compiler.dynamic_shapes`) has a symbol for each size: `size0`, `size1`, and so on, in
the order of the model's symbols; `filled0`, `filled1` if the code assumes that the size is 1 or more. Kernels read the
sizes from a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from lathe.core.ir.dim import FILLED, Atom, Dim, FloorDiv, Maximum, SymDim, symbol, symbols

Evaluate: TypeAlias = Callable[[Sequence[int]], list[int]]  # from sizes to the values of dimensions

_SIZE = re.compile(rf"(?:size|{FILLED})(0|[1-9][0-9]{{0,5}})")


def size(place: int) -> SymDim:
    """The symbol of the size at index `place` of the table of sizes, in code for which the size may be 0."""
    return symbol(f"size{place}")


def filled(place: int) -> SymDim:
    """The symbol of the size at index `place` of the table of sizes, in code that assumes that it is 1 or more."""
    return symbol(f"{FILLED}{place}")


def size_index(name: str) -> int | None:
    """The index in the table of the size with this symbol (`size0` or `filled0`: 0); None for other symbols."""
    found = _SIZE.fullmatch(name)
    return int(found[1]) if found else None


def has_only_sizes(dim: Dim) -> bool:
    """Whether a dimension is symbolic, and depends on sizes only."""
    return isinstance(dim, SymDim) and all(size_index(name) is not None for name in symbols(dim))


def compile_dims(dims: Sequence[Dim]) -> Evaluate:
    """A compiled function from the table of sizes to a list of the values of all `dims`, in order.

    The function raises ZeroDivisionError for a quotient by zero. `compile_dims` raises ValueError for a dimension that
    depends on symbols other than sizes.
    """
    text = f"lambda sizes: [{', '.join(map(_source, dims))}]"
    evaluate: Evaluate = eval(compile(text, "<dimensions>", "eval"), {"__builtins__": {}, "max": max})
    return evaluate


def _source(dim: Dim) -> str:
    if isinstance(dim, int):
        return str(dim)
    return " + ".join("*".join([str(number), *map(_atom, atoms)]) for atoms, number in dim.terms)


def _atom(atom: Atom) -> str:
    if isinstance(atom, FloorDiv):
        return f"(({_source(atom.numerator)})//({_source(atom.denominator)}))"
    if isinstance(atom, Maximum):
        return f"max({_source(atom.one)}, {_source(atom.other)})"
    place = size_index(atom)
    if place is None:
        raise ValueError(f"symbol {atom}: expected a size, such as size0")
    return f"sizes[{place}]"
