"""Arrays in a GPU's memory as inputs and outputs of a run, shared with PyTorch, CuPy and other libraries.

Nothing is copied to the host. Both directions use DLPack (`lathe.core.runtime.session.dlpack`), or version 3 of the
CUDA Array Interface, which Numba supports (https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import FeedError
from lathe.core.runtime.session import dlpack
from lathe.core.runtime.session.dlpack import DeviceType

_LEGACY_STREAM = 1  # the default stream, in which libraries work unless told otherwise


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """An array in a GPU's memory: contiguous, row-major. `torch.from_dlpack(array)` is a view of it.

    `stream`: the stream in which its contents are computed, as the interface numbers streams; None if it is ready.
    `place`: the kind and number of the memory, as DLPack has them. `owner` keeps the memory of other libraries.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stream: int | None = None
    place: tuple[DeviceType, int] = (DeviceType.CUDA, 0)
    owner: Any = None

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array as other libraries read it. It is ready: they need not wait for a stream."""
        data = (self.address if self.nbytes else 0, False)
        facts = {"shape": self.shape, "typestr": self.dtype.str, "data": data, "version": 3}
        return {**facts, "strides": None, "stream": None}

    def __dlpack_device__(self) -> tuple[DeviceType, int]:
        return self.place

    def __dlpack__(self, **_: object) -> Any:
        """A capsule with the array. It is ready, so the consumer's stream, version and device do not matter."""
        return dlpack.export(self.address, self.shape, self.dtype, self.place)

    def stand_in(self) -> NDArray[Any]:
        """An array of this shape and type for the checks of a run. No element is read, so it takes no memory."""
        return np.empty(self.shape, self.dtype)


def device_array(name: str, value: Any) -> DeviceArray | None:
    """The array of a GPU that input `name` is, by DLPack or its CUDA Array Interface; None for anything else.

    FeedError unless it is contiguous, row-major and without a mask, of a type that Lathe knows.
    """
    if isinstance(value, DeviceArray):
        return value
    place = value.__dlpack_device__() if hasattr(value, "__dlpack_device__") else (None, 0)
    if place[0] in (DeviceType.CUDA, DeviceType.CUDA_MANAGED):
        return _from_dlpack(name, value, (DeviceType(place[0]), int(place[1])))
    facts = getattr(value, "__cuda_array_interface__", None)
    return None if facts is None else _from_interface(name, facts)


def _from_dlpack(name: str, value: Any, place: tuple[DeviceType, int]) -> DeviceArray:
    """The array, ready after the work so far of the default stream: its library takes care of its other streams."""
    try:
        block = dlpack.read(value.__dlpack__(stream=_LEGACY_STREAM))
    except (TypeError, ValueError, BufferError) as error:
        raise FeedError(f"input '{name}': {error}") from error
    return DeviceArray(block.address, block.shape, block.dtype, _LEGACY_STREAM, place, block.owner)


def _from_interface(name: str, facts: dict[str, Any]) -> DeviceArray:
    shape, dtype = tuple(map(int, facts["shape"])), np.dtype(facts["typestr"])
    dense = np.empty(shape, dtype).strides
    if facts.get("strides") not in (None, dense) or facts.get("mask") is not None:
        raise FeedError(f"input '{name}': expected a contiguous array without a mask, got one with strides or a mask")
    return DeviceArray(int(facts["data"][0]), shape, dtype, facts.get("stream", _LEGACY_STREAM))
