"""Runs whose inputs and outputs stay in a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np

from lathe.core.errors import UnsupportedError
from lathe.core.ir.types import TensorType
from lathe.core.runtime.device.device import Device
from lathe.core.runtime.host.resident_values import Resident
from lathe.core.runtime.session.device_arrays import DeviceArray, device_array
from lathe.core.runtime.session.dlpack import DeviceType
from lathe.core.runtime.session.placed import PlacedRunner
from lathe.core.runtime.session.runner import Runner


class DeviceRun(Mapping[str, DeviceArray]):
    """The outputs of a run by name, in the GPU's memory; valid until `close`, or the end of a `with` block.

    A run that nothing refers to any more closes itself.
    """

    def __init__(self, outputs: Mapping[str, DeviceArray], close: Callable[[], None]) -> None:
        self._outputs, self._close = outputs, close

    def __getitem__(self, name: str) -> DeviceArray:
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def close(self) -> None:
        """Give the memory of the outputs back to the session. Later calls have no effect."""
        self._close()

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> DeviceRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def split_device_arrays(feeds: Mapping[str, Any]) -> tuple[dict[str, DeviceArray], dict[str, Any]]:
    """The feeds that are arrays of a GPU, and all feeds with stand-ins in their places, which checks may look at.

    FeedError as of `device_array`.
    """
    found = {name: device_array(name, value) for name, value in feeds.items()}
    given = {name: array for name, array in found.items() if array is not None}
    return given, {**feeds, **{name: array.stand_in() for name, array in given.items()}}


def run_on_device(
    runner: Runner, n: int, inputs: Sequence[Any], names: Sequence[str], ending: ExitStack
) -> dict[str, DeviceArray]:
    """The outputs, by `names`, of a run of `n` rows. `ending` frees their memory when it is closed.

    `inputs`: arrays of the host, or `DeviceArray`. The run waits for the streams that these name. UnsupportedError
    unless all nodes run on one GPU.
    """
    if not isinstance(runner, PlacedRunner):
        raise UnsupportedError("run_on_device needs a session on a GPU")
    device, given = runner.only_device(), list(inputs)
    for at, array in enumerate(inputs):
        if isinstance(array, DeviceArray):
            if array.stream is not None:
                device.wait_for_stream(array.stream)
            given[at] = Resident(device, array.address, array.nbytes)
    held, places = runner.hold(n, given)
    ending.callback(held.close)
    return {
        name: DeviceArray(
            place.address, port.type.evaluate({"n": n}), np.dtype(port.type.dtype.numpy), place=_place_of(device)
        )
        for name, (port, place) in zip(names, places, strict=True)
        if isinstance(port.type, TensorType)
    }


def _place_of(device: Device) -> tuple[DeviceType, int]:
    """The kind and number of a device's memory. That of simulated devices is the host's."""
    kind, _, number = device.name.partition(":")
    return (DeviceType.CUDA, int(number or 0)) if kind == "cuda" else (DeviceType.CPU, 0)
