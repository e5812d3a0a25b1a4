"""Checks the feeds of a run: arrays of the declared types, and the values of the symbols of their dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import FeedError
from lathe.core.ir.dim import SymDim, affine, symbols
from lathe.core.ir.types import TensorType, ValueType

Symbols: TypeAlias = dict[str, int]


class InputChecks:
    """The checks of a model's inputs, prepared once.

    Most feeds are contiguous arrays of the right dtype whose declared dimensions are numbers and plain symbols: those
    take a fast path.
    """

    def __init__(self, inputs: Mapping[str, ValueType]) -> None:
        self._inputs = inputs
        self._fast_checks = [_fast_checks(name, type_) for name, type_ in inputs.items()]

    def of(self, feeds: Mapping[str, Any]) -> tuple[list[Any], Symbols]:
        """The arrays in the order of the inputs, contiguous, and the values of the symbols of their dimensions.

        Feeds that are contiguous arrays are not copied. FeedError for an input that is missing or does not fit its
        type, and if inputs give a symbol different values. Names that are no inputs are ignored.
        """
        values: Symbols = {}
        arrays = [self._check_fast(each, feeds, values) for each in self._fast_checks]
        if all(array is not None for array in arrays):
            return arrays, values
        sizes = _Sizes()
        return [check_input(name, type_, feeds, sizes) for name, type_ in self._inputs.items()], sizes.values

    def _check_fast(self, check: _FastCheck | None, feeds: Mapping[str, Any], values: Symbols) -> NDArray[Any] | None:
        """The fed array if the fast check accepts it; otherwise None, and the full check decides.

        Enters the values of symbols in `values`.
        """
        if check is None:
            return None
        name, dtype, rank, numbers, plain = check
        array = feeds.get(name)
        if type(array) is not np.ndarray or array.dtype != dtype or array.ndim != rank or not array.flags.c_contiguous:
            return None
        shape = array.shape
        for axis, size in numbers:
            if shape[axis] != size:
                return None
        for axis, symbol in plain:
            if values.setdefault(symbol, shape[axis]) != shape[axis]:
                return None
        return array


class _Sizes:
    """The values of symbols, and the input that gave each symbol its value, for errors."""

    def __init__(self) -> None:
        self.values: Symbols = {}
        self._sources: dict[str, str] = {}

    def bind(self, symbol: str, value: int, name: str) -> None:
        """Enter the value that the shape of input `name` gives a symbol; FeedError if the symbol has another one."""
        first = self._sources.setdefault(symbol, name)
        known = self.values.setdefault(symbol, value)
        if known != value:
            raise FeedError(f"dimension {symbol}: expected {known} as in '{first}', got {value} in '{name}'")


# Name, dtype, rank, axes with known extents, and axes whose extent is the value of a symbol.
_FastCheck: TypeAlias = tuple[str, "np.dtype[Any]", int, list[tuple[int, int]], list[tuple[int, str]]]


def _fast_checks(name: str, type_: ValueType) -> _FastCheck | None:
    if not isinstance(type_, TensorType) or type_.shape is None:
        return None
    axes = list(enumerate(type_.shape))
    plain = [(axis, str(dim)) for axis, dim in axes if isinstance(dim, SymDim) and symbols(dim) == {str(dim)}]
    numbers = [(axis, dim) for axis, dim in axes if isinstance(dim, int)]
    whole = len(numbers) + len(plain) == len(axes)
    return (name, type_.dtype.numpy, len(axes), numbers, plain) if whole else None


def check_input(name: str, type_: ValueType, feeds: Mapping[str, Any], sizes: _Sizes) -> Any:
    """The feed of an input as a contiguous array of the declared type; enters the values of symbols in `sizes`.

    A contiguous array is returned itself, and text keeps its dtype. FeedError if the feed is missing, if its dtype or
    shape does not fit, or if a symbol has another value in `sizes`. Feeds for sequences and optionals are returned
    unchecked.
    """
    if name not in feeds:
        raise FeedError(f"input '{name}' is missing; expected {type_}")
    feed = feeds[name]
    if not isinstance(type_, TensorType):
        return feed
    array = np.asarray(feed)
    if not type_.dtype.holds(array.dtype):
        raise FeedError(f"input '{name}' has dtype {array.dtype}, expected {type_.dtype}")
    if type_.shape is None:
        return np.asarray(array, order="C")
    if array.ndim != type_.rank:
        raise FeedError(f"input '{name}' has shape {list(array.shape)}, expected {type_}")
    for dim, size in zip(type_.shape, array.shape, strict=True):
        _match(name, type_, dim, size, array.shape, sizes)
    return np.asarray(array, order="C")


def _match(name: str, type_: TensorType, dim: Any, size: int, shape: tuple[int, ...], sizes: _Sizes) -> None:
    """Check that an extent `size` fits the declared dimension `dim`; FeedError if not.

    A symbol gets its value in `sizes` from the first dimension that shows it. Dimensions of several symbols are not
    checked.
    """
    if isinstance(dim, int):
        if dim != size:
            raise FeedError(f"input '{name}' has shape {list(shape)}, expected {type_}")
        return
    form = _linear_form(dim)
    if form is None:
        return  # a dimension of several symbols follows from other dimensions
    symbol, step, least = form
    value, rest = divmod(size - least, step) if form[1:] != (1, 0) else (size, 0)
    if rest or value < 0:
        raise FeedError(f"input '{name}' has shape {list(shape)}, expected {type_}")
    sizes.bind(symbol, value, name)


@lru_cache(maxsize=4096)  # called for every dimension of every input in every run
def _linear_form(dim: SymDim) -> tuple[str, int, int] | None:
    """(symbol, factor, constant) of a dimension that is linear in its only symbol; None for any other."""
    names = symbols(dim)
    parts = affine(dim, next(iter(names))) if len(names) == 1 else None
    return (next(iter(names)), *parts) if parts is not None else None
