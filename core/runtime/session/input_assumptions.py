"""Checks assumptions of code about inputs that the model does not declare (`lathe.core.passes.proofs.assumptions`)."""

from __future__ import annotations

from collections.abc import Mapping

from lathe.core.ir.dim import Dim, SymDim, substitute, symbols
from lathe.core.ir.dims import compile_dims, size
from lathe.core.ir.types import TensorType, ValueType


class InputAssumptions:
    """Checks the extents that code assumes of inputs; prepared, because every run of such a model is checked."""

    def __init__(self, declared: Mapping[str, ValueType], assumed: Mapping[str, ValueType]) -> None:
        places: dict[str, int] = {}
        self._declared: list[tuple[str, int, list[tuple[int, int]]]] = []  # input, rank, (axis, place of its symbol)
        for name, type_ in declared.items():
            dims = type_.dims if isinstance(type_, TensorType) else ()
            plain = [(axis, str(dim)) for axis, dim in enumerate(dims) if _is_plain(dim)]
            found = [(axis, places.setdefault(symbol, len(places))) for axis, symbol in plain]
            self._declared.append((name, len(dims) if isinstance(type_, TensorType) else -1, found))
        tensors = [(name, type_) for name, type_ in assumed.items() if isinstance(type_, TensorType)]
        wanted = [
            (name, axis, dim)
            for name, type_ in tensors
            for axis, dim in enumerate(type_.dims)
            if isinstance(dim, SymDim) and symbols(dim) <= places.keys()
        ]
        self._wanted = [(name, axis) for name, axis, _ in wanted]
        env: dict[str, Dim] = {name: size(place) for name, place in places.items()}
        self._evaluate = compile_dims([substitute(dim, env) for _, _, dim in wanted])
        self._count = len(places)

    def fits(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether inputs of these shapes, by name, satisfy the assumptions.

        True also if an input is missing or has another rank than declared: other checks find that.
        """
        values = [0] * self._count
        for name, rank, found in self._declared:
            shape = shapes.get(name)
            if shape is None or len(shape) != rank:
                return True
            for axis, place in found:
                values[place] = shape[axis]
        expected = self._evaluate(values)
        return [shapes[name][axis] for name, axis in self._wanted] == expected


def _is_plain(dim: Dim) -> bool:
    """Whether a dimension is just one symbol, without arithmetic."""
    return isinstance(dim, SymDim) and symbols(dim) == {str(dim)}
