"""Sample inputs: arrays of the right types, for measuring and for trying out a model."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import FeedError
from lathe.core.ir.types import TensorType
from lathe.core.runtime.session.session import Session


def sample_inputs(session: Session, rows: int) -> dict[str, NDArray[Any]]:
    """Random inputs by name, the same on every call: floats from 0 to 1 (exclusive), integers from 0 to 8, booleans.

    The batch axis, if there is one, has extent `rows`; other symbols have the value 1. FeedError for inputs that are no
    tensors of numbers, or whose ranks are unknown.
    """
    random = np.random.default_rng(0)
    feeds = {}
    for name, type_ in session.inputs.items():
        if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype.numpy.kind == "O":
            raise FeedError(f"input '{name}' is {type_}: there is no sample for it, give its values")
        sizes = dict.fromkeys(type_.symbols, 1) | {session.batching.symbol or "": rows}
        shape, dtype = type_.evaluate(sizes), type_.dtype.numpy
        values = random.integers(0, 9, shape) if dtype.kind in "iub" else random.random(shape)
        feeds[name] = values.astype(dtype)
    return feeds
