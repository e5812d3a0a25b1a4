"""Numbers that code reads when it runs, so that kernels which differ in nothing else are compiled once.

In the spec of such code, symbols stand for them: number `i` of the call is the symbol that `Numbers` made for it. The
call brings their values as a `Block`, its last operand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from core.ir.dim import SymDim, symbol, symbols
from core.ir.types import Dim
from core.kernels.catalog.base import Block, KernelCall
from core.kernels.catalog.nest import Nest, is_plannable
from core.kernels.target import Target

_PREFIX = "number"
_FEW = 3  # kernels that are made for their numbers all the same: that code is a little faster
_BLOCK = "numbers"


class Numbers:
    """Takes numbers out of dimensions. `values` are those taken so far."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def take(self, dim: Dim) -> Dim:
        """The dimension with symbols in the places of its coefficients. It must be a polynomial in `n`."""
        if not isinstance(dim, SymDim):
            return self._symbol(dim)
        taken: Dim = 0
        for monomial, coefficient in dim.terms:
            term: Dim = self._symbol(coefficient)
            for atom in monomial:
                term = term * SymDim([((atom,), 1)])
            taken = taken + term
        return taken

    def of_nest(self, nest: Nest) -> Nest | None:
        """A nest that says no more than which operands stand still, or go from one element to the next, in which loop.
        The extents between the first and the last loop stay: where a row lies is found by dividing by them, which takes
        long by a number that only the call knows. None for a nest whose dimensions are no polynomials."""
        if not all(map(is_plannable, nest.dims)):
            return None
        ends = (0, nest.rank - 1)
        extents = tuple(self.take(extent) if k in ends else extent for k, extent in enumerate(nest.extents))
        strides = tuple(tuple(dim if dim in (0, 1) else self.take(dim) for dim in dims) for dims in nest.strides)
        return Nest(extents, strides)

    def _symbol(self, value: int) -> Dim:
        self.values.append(value)
        return symbol(f"{_PREFIX}{len(self.values) - 1}")


def in_dims(dims: Iterable[Dim]) -> list[tuple[str, int]]:
    """The symbols that stand for numbers in any of the dimensions, and which ones they stand for."""
    names = {name for dim in dims for name in symbols(dim) if name.startswith(_PREFIX)}
    return sorted(((name, int(name.removeprefix(_PREFIX))) for name in names), key=lambda each: each[1])


def with_numbers(call: KernelCall, target: Target) -> KernelCall | None:
    """The call with code that reads numbers, None where its kernel has no such code, or reads sizes already."""
    if call.spec.size_names:
        return None
    found = call.spec.general(target, len(call.operands))
    if found is None:
        return None
    spec, numbers = found
    return replace(call, shared=spec, operands=(*call.operands, Block(_BLOCK, np.array(numbers, np.int64))))


def sharing(calls: Sequence[KernelCall], target: Target) -> list[KernelCall]:
    """The calls. Where many kernels differ only in numbers, they have one code that reads these."""
    pairs = [(call, with_numbers(call, target)) for call in calls]
    kernels: dict[str, set[str]] = {}
    for call, general in pairs:
        if general is not None:
            kernels.setdefault(general.code.key, set()).add(call.spec.key)
    return [general if general and len(kernels[general.code.key]) > _FEW else call for call, general in pairs]
