"""`StoredTensor`: a tensor in a checkpoint file, which is decoded when it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Array


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `kind` is the file's name of the type, `data` are its bytes, which `decode` converts.

    `decode` returns an array of `shape`: a view of the file if the type is one of NumPy's, otherwise float32.
    `is_known` says whether it can decode the type.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    decode: Callable[[StoredTensor], Array]
    is_known: bool = True

    def check(self) -> None:
        """UnsupportedError if Lathe cannot decode the type."""
        if not self.is_known:
            self.decode(self)

    def array(self) -> Array:
        """The elements, read-only or new. UnsupportedError if Lathe cannot decode the type."""
        return self.decode(self)


# What NumPy can hold: its arrays have at most 64 axes, and sizes below 2**63 bytes even if an extent is 0.
_MOST_AXES = 32
_MOST_ELEMENTS = 1 << 48


def element_count(shape: Sequence[int], name: str, where: str) -> int:
    """The number of elements of a tensor. ModelError if NumPy has no arrays of this shape."""
    if len(shape) > _MOST_AXES or math.prod(extent for extent in shape if extent) > _MOST_ELEMENTS:
        raise ModelError(f"tensor '{name}': shape {list(shape)[:8]} is too large", where=where)
    return math.prod(shape)
