"""What is given to a training step, held to what it expects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import FeedError
from core.ir.graph import Array
from core.ir.types import TensorType


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
    return np.ascontiguousarray(array)
