"""The states of a plan in a device's memory: they stay there from run to run, whatever the batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import DeviceError
from lathe.core.plan.liveness import Affine, align_size
from lathe.core.plan.plan import Plan, Port
from lathe.core.runtime.device.device import Device, Stream
from lathe.core.runtime.host.device_tape import Copy
from lathe.core.runtime.host.memory import address_of
from lathe.core.runtime.host.plan_memory import DeviceBlock, port_array, port_bytes, temporary_bytes


class DeviceStates:
    """Memory blocks by the names of states.

    `adopted` states live in the memory of another executable of this device. The caller makes sure that the two
    executables never run at the same time, and that the other one is closed last.
    """

    def __init__(self, plan: Plan, device: Device, adopted: Mapping[str, DeviceBlock]) -> None:
        self._device = device
        self._ports = {port.name: port for port in plan.states}
        self._blocks = {name: adopted[name] if name in adopted else DeviceBlock(device) for name in self._ports}
        self._own = [block for name, block in self._blocks.items() if name not in adopted]
        self._temporary = DeviceBlock(device)
        self._temporary_bytes = temporary_bytes(plan)

    def allocate(self) -> None:
        """Allocate the memory of all states. DeviceMemoryError if the device has too little."""
        for name, port in self._ports.items():
            self._blocks[name].fit(port_bytes(port).at(1))
        self._temporary.fit(self._temporary_bytes)

    def block(self, name: str) -> DeviceBlock:
        """The memory of the state `name`."""
        return self._blocks[name]

    @property
    def bases(self) -> dict[int, int]:
        """The address of each state, by the number that stands for its base in the plan's addresses."""
        return {port.base: self._blocks[name].address for name, port in self._ports.items()}

    def write(self, name: str, array: NDArray[Any], stream: Stream) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        stage = self._device.host_bytes(data.nbytes)
        stage[:] = data
        stream.copy_in(self._blocks[name].address, address_of(stage), stage.nbytes)
        stream.synchronize()
        self._device.free_host(stage)

    def read(self, name: str, stream: Stream) -> NDArray[Any]:
        """A copy of a state's current value."""
        port: Port = self._ports[name]
        stage = self._device.host_bytes(port_bytes(port).at(1))
        stream.copy_out(address_of(stage), self._blocks[name].address, stage.nbytes)
        stream.synchronize()
        value = port_array(port, stage, 1).copy()
        self._device.free_host(stage)
        return value

    def ordered(self, updates: Sequence[Copy]) -> list[Copy]:
        """Copies that have the effect of doing all `updates` (next values to states) at the same time.

        Several updates go through temporary memory, because a source may be the previous value of another state.
        """
        if len(updates) < 2:
            return list(updates)
        first, then, at = [], [], self._temporary.address
        for copy in updates:
            first.append(Copy(at, copy.source, copy.nbytes))
            then.append(Copy(copy.target, at, copy.nbytes))
            at += align_size(Affine(b=copy.nbytes)).b
        return first + then

    def close(self) -> None:
        """Free the blocks that are not adopted."""
        for block in (*self._own, self._temporary):
            with suppress(DeviceError):  # after a fault every call fails, and the memory is lost anyway
                block.close()
