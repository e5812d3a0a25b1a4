"""Numbers that code reads at run time, so that kernels that differ in nothing else are compiled once.

In the spec of such code, symbols stand for the numbers: `RuntimeNumbers` makes the symbols `number0`, `number1`, ... in
order. The call passes the values in the same order, as int64 in a `Block`, its last operand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from lathe.core.ir.dim import SymDim, symbol, symbols
from lathe.core.ir.types import Dim
from lathe.core.kernels.call import Block, KernelCall
from lathe.core.kernels.shared.nest import Nest, is_plannable
from lathe.core.kernels.target import Target

_PREFIX = "number"
_FEW = 3  # up to this many kernels are compiled one by one: code with constant numbers is a little faster
_BLOCK = "numbers"


class RuntimeNumbers:
    """Replaces numbers in dimensions by symbols. `values` are the numbers replaced so far, in the order of symbols."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def take(self, dim: Dim) -> Dim:
        """The dimension, a polynomial in `n`, with each coefficient replaced by a new symbol.

        The coefficients are added to `values`.
        """
        if not isinstance(dim, SymDim):
            return self._symbol(dim)
        total: Dim = 0
        for monomial, coefficient in dim.terms:
            term: Dim = self._symbol(coefficient)
            for atom in monomial:
                term = term * SymDim([((atom,), 1)])
            total = total + term
        return total

    def of_nest(self, nest: Nest) -> Nest | None:
        """The nest with new symbols for its numbers, except for strides of 0 and 1, which select the code.

        The extents of the loops between the first and the last stay numbers as well: the code finds a row by dividing
        by them, and dividing by a number that is read at run time is slow. None if generated code cannot compute a
        dimension (`is_plannable`).
        """
        if not all(map(is_plannable, nest.dims)):
            return None
        ends = (0, nest.rank - 1)
        extents = tuple(self.take(extent) if k in ends else extent for k, extent in enumerate(nest.extents))
        strides = tuple(tuple(dim if dim in (0, 1) else self.take(dim) for dim in dims) for dims in nest.strides)
        return Nest(extents, strides)

    def _symbol(self, value: int) -> Dim:
        self.values.append(value)
        return symbol(f"{_PREFIX}{len(self.values) - 1}")


def runtime_numbers_in(dims: Iterable[Dim]) -> list[tuple[str, int]]:
    """The symbols for run-time numbers in the dimensions, each with the index of its number, sorted by index."""
    names = {name for dim in dims for name in symbols(dim) if name.startswith(_PREFIX)}
    return sorted(((name, int(name.removeprefix(_PREFIX))) for name in names), key=lambda each: each[1])


def with_runtime_numbers(call: KernelCall, target: Target) -> KernelCall | None:
    """The call with code that reads numbers at run time, and with a further operand that holds them.

    None if its kernel has no such code, or is dynamic-shape code already.
    """
    if call.spec.size_names:
        return None
    found = call.spec.general(target, len(call.operands))
    if found is None:
        return None
    spec, numbers = found
    return replace(call, shared=spec, operands=(*call.operands, Block(_BLOCK, np.array(numbers, np.int64))))


def share_code(calls: Sequence[KernelCall], target: Target) -> list[KernelCall]:
    """The calls in order, with general code where more than three different kernels can share it.

    These kernels differ only in numbers, which the general code reads at run time.
    """
    pairs = [(call, with_runtime_numbers(call, target)) for call in calls]
    kernels: dict[str, set[str]] = {}
    for call, general in pairs:
        if general is not None:
            kernels.setdefault(general.code.key, set()).add(call.spec.key)
    return [general if general and len(kernels[general.code.key]) > _FEW else call for call, general in pairs]
