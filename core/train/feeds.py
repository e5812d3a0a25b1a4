"""What is given to a training step, held to what it expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import FeedError
from core.ir.graph import Array, Value
from core.ir.types import TensorType
from core.reference import bind_symbols
from core.runtime.given import Binding


class Door:
    """Lets in arrays by name that are of the declared types; knows those again that it has let in before."""

    def __init__(self, inputs: Sequence[Value]) -> None:
        self._inputs = tuple(inputs)
        self._names = tuple(value.name for value in inputs)
        self._known: dict[tuple[Any, ...], Binding] = {}

    def admit(self, feeds: Mapping[str, Any]) -> tuple[list[NDArray[Any]], Binding]:
        """Contiguous arrays in the order of the inputs, and what the symbols of their shapes stand for.

        FeedError for an input that is missing, unknown or ill-typed.
        """
        given = [feeds.get(name) for name in self._names]
        if len(given) == len(feeds) and all(type(array) is np.ndarray and array.flags.c_contiguous for array in given):
            binding = self._known.get(_signature(given))  # type: ignore[arg-type]
            if binding is not None:
                return given, binding  # type: ignore[return-value]
        return self._examined(feeds)

    def _examined(self, feeds: Mapping[str, Any]) -> tuple[list[NDArray[Any]], Binding]:
        unknown = feeds.keys() - set(self._names)
        if unknown:
            raise FeedError(f"unknown input '{min(unknown)}'; a step takes {', '.join(self._names)}")
        arrays = [checked(value.name, value.tensor, feeds) for value in self._inputs]
        symbols = bind_symbols(self._inputs, dict(zip(self._inputs, arrays, strict=True)))
        return arrays, self._known.setdefault(_signature(arrays), tuple(sorted(symbols.items())))


def _signature(arrays: Sequence[NDArray[Any]]) -> tuple[Any, ...]:
    return tuple((array.dtype, array.shape) for array in arrays)


def describe(array: Array | None) -> str:
    return "nothing" if array is None else f"{array.dtype}[{','.join(map(str, array.shape))}]"


def checked(name: str, type_: TensorType, feeds: Mapping[str, Any]) -> NDArray[Any]:
    """A feed as a contiguous array of the declared type; its symbols are checked together later."""
    if name not in feeds:
        raise FeedError(f"input '{name}' is missing; expected {type_}")
    array = np.asarray(feeds[name])
    if array.dtype != type_.dtype.numpy:
        raise FeedError(f"input '{name}' has dtype {array.dtype}, expected {type_.dtype}")
    fits = array.ndim == type_.rank and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(type_.dims, array.shape, strict=True)
    )
    if not fits:
        raise FeedError(f"input '{name}' has shape {list(array.shape)}, expected {type_}")
    return np.asarray(array, order="C")
