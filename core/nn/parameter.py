"""What modules own: `Parameter`, which training moves, and `Buffer`, which it does not."""

from __future__ import annotations

import numpy as np

from core.ir.graph import Array, Value
from core.nn.mode import current
from core.nn.tensor import Tensor


class Parameter(Tensor):
    """A tensor that a module owns: `data` are its elements. With `requires_grad=False` training leaves it as it is."""

    def __init__(self, data: object, requires_grad: bool = True) -> None:
        array = np.array(data)
        self.data: Array = array.astype(np.float32) if array.dtype == np.float64 else array
        self.requires_grad = requires_grad

    @property
    def value(self) -> Value:
        return current().parameter(self)

    @property
    def moves(self) -> bool:
        """Whether training may change it."""
        return self.requires_grad

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.data.dtype}{list(self.data.shape)})"


class Buffer(Parameter):
    """A tensor that belongs to a module's state and has no gradient. `statistics`: the operator that reads it brings it
    up to date in training, as batch normalization does."""

    def __init__(self, data: object, statistics: bool = False) -> None:
        super().__init__(data, requires_grad=False)
        self.statistics = statistics

    @property
    def moves(self) -> bool:
        return self.statistics
