"""What a plan takes of a device: weights, states, one arena, and for every run in flight its inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.ir.types import TensorType
from core.plan.liveness import Affine, aligned
from core.plan.plan import FLAG_BYTES, Plan, Port, exact_affine
from core.runtime.device import Device, Event, HostBytes

SLOTS = 2  # runs in flight: one computes while another's data travel


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of a device that a plan takes for batches of up to `rows`."""

    rows: int
    weights: int
    states: int
    arena: int
    ports: int  # inputs and outputs, for all slots

    @property
    def total(self) -> int:
        return self.weights + self.states + self.arena + self.ports

    def __str__(self) -> str:
        return (
            f"{self.total} bytes for batches of up to {self.rows} (weights {self.weights}, states {self.states}, "
            f"arena {self.arena}, inputs and outputs {self.ports})"
        )


def room_of(plan: Plan, rows: int) -> Room:
    """What an executable of this plan allocates."""
    ports, rows = Ports(plan), max(rows, 1)
    states = sum(port_bytes(port).at(1) for port in plan.states)
    return Room(rows, plan.weights, states, plan.arena.at(rows), SLOTS * ports.size.at(rows))


class Ports:
    """Where inputs, flags and outputs lie in the memory of a slot, for every batch size: without gaps, so that each way
    is one copy. Flags go both ways: in as zeros."""

    def __init__(self, plan: Plan) -> None:
        self.offsets: dict[int, Affine] = {}  # by base
        self.flags = self._add(plan.inputs, Affine())  # where they begin
        self.offsets[plan.flags_base] = self.flags
        self.flag_bytes = aligned(Affine(b=plan.flags * FLAG_BYTES)).b
        self.size = self._add(plan.outputs, self.flags + Affine(b=self.flag_bytes))

    def _add(self, ports: Sequence[Port], at: Affine) -> Affine:
        for port in ports:
            self.offsets[port.base] = at
            at = at + aligned(port_bytes(port))
        return at


def port_bytes(port: Port) -> Affine:
    size = exact_affine(port.type.nbytes) if isinstance(port.type, TensorType) else None
    if size is None:
        raise ValueError(f"'{port.name}' is {port.type}, which has no place on a device")
    return size


@dataclass(eq=False)
class Block:
    """Bytes on a device that grow: what they held is lost then, and so is every graph that knew their address."""

    device: Device
    address: int = 0
    nbytes: int = 0
    generation: int = 0

    def fit(self, nbytes: int) -> None:
        """At least so many. DeviceMemoryError where there is no room; then nothing has changed."""
        if nbytes > self.nbytes:
            larger = self.device.allocate(nbytes)
            self.close()
            self.address, self.nbytes = larger, nbytes
            self.generation += 1

    def close(self) -> None:
        if self.nbytes:
            self.device.free(self.address)
            self.nbytes = 0


@dataclass(eq=False)
class Slot:
    index: int
    ports: Block
    staging: HostBytes
    arrived: Event
    computed: Event
    done: Event

    @staticmethod
    def on(device: Device, index: int) -> Slot:
        return Slot(index, Block(device), device.host_bytes(0), device.event(), device.event(), device.event())

    def fit(self, nbytes: int) -> None:
        device = self.ports.device
        self.ports.fit(nbytes)
        if self.staging.nbytes < nbytes:
            device.free_host(self.staging)
            self.staging = device.host_bytes(nbytes)

    def close(self) -> None:
        device = self.ports.device
        self.ports.close()
        device.free_host(self.staging)
        for event in (self.arrived, self.computed, self.done):
            event.close()


def port_array(port: Port, block: HostBytes, n: int) -> NDArray[Any]:
    """The value of a port whose bytes begin a block."""
    if not isinstance(port.type, TensorType):
        raise ValueError(f"'{port.name}' is no tensor but {port.type}")
    shape, dtype = port.type.evaluate({"n": n}), port.type.dtype.numpy
    return np.frombuffer(block.data, dtype, int(np.prod(shape, dtype=np.int64))).reshape(shape)
