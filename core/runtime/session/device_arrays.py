"""Arrays in a GPU's memory as inputs and outputs of a run, shared with PyTorch, CuPy and other libraries.

Nothing is copied to the host. Both directions use version 3 of the CUDA Array Interface, which these libraries and
Numba support (https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import FeedError

_LEGACY_STREAM = 1  # the default stream, in which libraries work unless told otherwise


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """An array in a GPU's memory: contiguous, row-major. `torch.as_tensor(array, device="cuda")` views it.

    `stream`: the stream in which its contents are computed, as the interface numbers streams; None if it is ready.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stream: int | None = None

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array as other libraries read it. It is ready: they need not wait for a stream."""
        data = (self.address if self.nbytes else 0, False)
        facts = {"shape": self.shape, "typestr": self.dtype.str, "data": data, "version": 3}
        return {**facts, "strides": None, "stream": None}

    def stand_in(self) -> NDArray[Any]:
        """An array of this shape and type for the checks of a run. No element is read, so it takes no memory."""
        return np.empty(self.shape, self.dtype)


def device_array(name: str, value: Any) -> DeviceArray | None:
    """The array of a GPU that input `name` is, by its CUDA Array Interface; None for anything else.

    FeedError unless it is contiguous, row-major and without a mask.
    """
    facts = getattr(value, "__cuda_array_interface__", None)
    if facts is None:
        return None
    shape, dtype = tuple(map(int, facts["shape"])), np.dtype(facts["typestr"])
    dense = np.empty(shape, dtype).strides
    if facts.get("strides") not in (None, dense) or facts.get("mask") is not None:
        raise FeedError(f"input '{name}': expected a contiguous array without a mask, got one with strides or a mask")
    return DeviceArray(int(facts["data"][0]), shape, dtype, facts.get("stream", _LEGACY_STREAM))
