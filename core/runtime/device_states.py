"""The states of a plan in a device's memory: they stay there from run to run, whatever the batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import DeviceError
from core.plan.liveness import Affine, aligned
from core.plan.plan import Plan, Port
from core.runtime.device import Device, Stream
from core.runtime.memory import address_of
from core.runtime.room import Block, aside_bytes, port_array, port_bytes
from core.runtime.tape import Copy


class DeviceStates:
    """Blocks of memory by the names of states. Some may live in the memory of another executable of this device, which
    takes turns with this one and is closed after it: those are `adopted`."""

    def __init__(self, plan: Plan, device: Device, adopted: Mapping[str, Block]) -> None:
        self._device = device
        self._ports = {port.name: port for port in plan.states}
        self._blocks = {name: adopted[name] if name in adopted else Block(device) for name in self._ports}
        self._own = [block for name, block in self._blocks.items() if name not in adopted]
        self._aside = Block(device)
        self._aside_bytes = aside_bytes(plan)

    def allocate(self) -> None:
        """DeviceMemoryError where there is no room."""
        for name, port in self._ports.items():
            self._blocks[name].fit(port_bytes(port).at(1))
        self._aside.fit(self._aside_bytes)

    def block(self, name: str) -> Block:
        """Where a state lives."""
        return self._blocks[name]

    @property
    def bases(self) -> dict[int, int]:
        """Addresses by the plan's bases."""
        return {port.base: self._blocks[name].address for name, port in self._ports.items()}

    def write(self, name: str, array: NDArray[Any], stream: Stream) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        stage = self._device.host_bytes(data.nbytes)
        stage[:] = data
        stream.copy_in(self._blocks[name].address, address_of(stage), stage.nbytes)
        stream.synchronize()
        self._device.free_host(stage)

    def read(self, name: str, stream: Stream) -> NDArray[Any]:
        """A copy of a state's present value."""
        port: Port = self._ports[name]
        stage = self._device.host_bytes(port_bytes(port).at(1))
        stream.copy_out(address_of(stage), self._blocks[name].address, stage.nbytes)
        stream.synchronize()
        value = port_array(port, stage, 1).copy()
        self._device.free_host(stage)
        return value

    def ordered(self, updates: Sequence[Copy]) -> list[Copy]:
        """Copies of next values to states. Where there are several, what is copied goes aside first, in case that it is
        what another state held before."""
        if len(updates) < 2:
            return list(updates)
        first, then, at = [], [], self._aside.address
        for copy in updates:
            first.append(Copy(at, copy.source, copy.nbytes))
            then.append(Copy(copy.target, at, copy.nbytes))
            at += aligned(Affine(b=copy.nbytes)).b
        return first + then

    def close(self) -> None:
        """Free what is this one's own."""
        for block in (*self._own, self._aside):
            with suppress(DeviceError):  # after a fault every call fails: what is lost is lost
                block.close()
