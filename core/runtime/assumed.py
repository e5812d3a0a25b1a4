"""Whether inputs are as code assumes them to be, beyond what the model declares (`core.passes.assumptions`)."""

from __future__ import annotations

from collections.abc import Mapping

from core.ir.dim import Dim, SymDim, substitute, symbols
from core.ir.dims import evaluator, size
from core.ir.types import TensorType, ValueType


class Assumed:
    """The sizes that inputs have by the types that are assumed, prepared: every run of such a model is looked at."""

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
        self._evaluate = evaluator([substitute(dim, env) for _, _, dim in wanted])
        self._count = len(places)

    def fits(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether inputs of these shapes are so. Inputs that do not fit the declared types at all fit here."""
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
    """Whether a dimension is a symbol."""
    return isinstance(dim, SymDim) and symbols(dim) == {str(dim)}
