"""The state of modules: `Parameter`, which is trained, and `Buffer`, which is not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lathe.core.ir.graph import Array, Value
from lathe.core.nn.mode import current_mode
from lathe.core.nn.tensor import Tensor


class Parameter(Tensor):
    """A tensor of a module, with a copy of the given elements in `data`; float64 becomes float32.

    With `requires_grad=False` training does not change it.
    """

    _data: Array | None
    _source: Callable[[], Array] | None

    def __init__(self, data: object, requires_grad: bool = True) -> None:
        array = np.array(data)
        self.data = array.astype(np.float32) if array.dtype == np.float64 else array
        self.requires_grad = requires_grad

    @property
    def data(self) -> Array:
        """The elements. Those of a deferred parameter are read at the first access, and kept."""
        if self._data is None:
            assert self._source is not None
            self._data = self._source()
        return self._data

    @data.setter
    def data(self, array: Array) -> None:
        self._data, self._source = array, None

    def defer(self, source: Callable[[], Array]) -> None:
        """Read the elements from `source` when they are needed first, such as those of a large weight in a file."""
        self._data, self._source = None, source

    @property
    def source(self) -> Callable[[], Array] | None:
        """The source of a deferred parameter whose `data` has not been replaced since; otherwise None."""
        return self._source

    @property
    def value(self) -> Value:
        return current_mode().parameter(self)

    @property
    def moves(self) -> bool:
        """Whether training changes the elements: by gradients, or as running statistics of a buffer."""
        return self.requires_grad

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.data.dtype}{list(self.data.shape)})"


class Buffer(Parameter):
    """A tensor of a module's state without a gradient.

    `statistics`: whether the operator that reads the buffer updates it in training, as batch normalization does.
    """

    def __init__(self, data: object, statistics: bool = False) -> None:
        super().__init__(data, requires_grad=False)
        self.statistics = statistics

    @property
    def moves(self) -> bool:
        return self.statistics
