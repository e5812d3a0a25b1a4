"""Validates the feeds of a training step against the types of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import FeedError
from lathe.core.ir.graph import Array, Value
from lathe.core.ir.types import TensorType
from lathe.core.reference import bind_symbols
from lathe.core.runtime.session.run_inputs import Binding


class InputValidator:
    """Checks feeds by name against declared types. Combinations of dtypes and shapes that passed are remembered."""

    def __init__(self, inputs: Sequence[Value]) -> None:
        self._inputs = tuple(inputs)
        self._names = tuple(value.name for value in inputs)
        self._known_signatures: dict[tuple[Any, ...], Binding] = {}

    def validate(self, feeds: Mapping[str, Any]) -> tuple[list[NDArray[Any]], Binding]:
        """The feeds as C-contiguous arrays in the order of the inputs, and the values of the symbolic dimensions.

        Arrays that are contiguous already are not copied. FeedError for an input that is missing, unknown or ill-typed,
        or if inputs give a symbolic dimension different values.
        """
        arrays = [feeds.get(name) for name in self._names]
        if len(arrays) == len(feeds) and all(
            type(array) is np.ndarray and array.flags.c_contiguous for array in arrays
        ):
            binding = self._known_signatures.get(_signature(arrays))  # type: ignore[arg-type]
            if binding is not None:
                return arrays, binding  # type: ignore[return-value]
        return self._validate_new_signature(feeds)

    def _validate_new_signature(self, feeds: Mapping[str, Any]) -> tuple[list[NDArray[Any]], Binding]:
        unknown = feeds.keys() - set(self._names)
        if unknown:
            raise FeedError(f"unknown input '{min(unknown)}'; a step takes {', '.join(self._names)}")
        arrays = [check_array(value.name, value.tensor, feeds) for value in self._inputs]
        symbols = bind_symbols(self._inputs, dict(zip(self._inputs, arrays, strict=True)))
        return arrays, self._known_signatures.setdefault(_signature(arrays), tuple(sorted(symbols.items())))


def _signature(arrays: Sequence[NDArray[Any]]) -> tuple[Any, ...]:
    return tuple((array.dtype, array.shape) for array in arrays)


def describe_array(array: Array | None) -> str:
    """Dtype and shape of an array for messages, such as `float32[2,3]`; `nothing` for None."""
    return "nothing" if array is None else f"{array.dtype}[{','.join(map(str, array.shape))}]"


def check_array(name: str, type_: TensorType, feeds: Mapping[str, Any]) -> NDArray[Any]:
    """The feed `name` as a C-contiguous array of the declared type. FeedError if it is missing or ill-typed.

    Symbolic dimensions may have any size here; `InputValidator` checks that they agree between inputs.
    """
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
