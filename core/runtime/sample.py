"""Stand-ins for data: inputs of the right types, for measuring and for trying out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import FeedError
from core.ir.types import TensorType
from core.runtime.session import Session


def sample(session: Session, rows: int) -> dict[str, NDArray[Any]]:
    """Inputs between 0 and 1 (0 and 8 for integers), always the same; the batch axis has `rows`, other free axes 1.

    FeedError for inputs that are no tensors of numbers or of known rank.
    """
    random = np.random.default_rng(0)
    feeds = {}
    for name, type_ in session.inputs.items():
        if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype.numpy.kind == "O":
            raise FeedError(f"input '{name}' is {type_}: there is no stand-in for it, give its values")
        sizes = dict.fromkeys(type_.symbols, 1) | {session.batching.symbol or "": rows}
        shape, dtype = type_.evaluate(sizes), type_.dtype.numpy
        values = random.integers(0, 9, shape) if dtype.kind in "iub" else random.random(shape)
        feeds[name] = values.astype(dtype)
    return feeds
