"""What a plan takes of a device: weights, states, one arena, and for every run in flight its inputs and outputs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.ir.types import TensorType
from core.plan.liveness import Affine, aligned
from core.plan.plan import FLAG_BYTES, Plan, Port, affine_of, exact_affine
from core.runtime.device import Device, HostBytes
from core.runtime.memory import address_of

_FORMS = 256  # batch sizes that a slot remembers the arrays of
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


def room_of(plan: Plan, rows: int, adopted: Container[str] = ()) -> Room:
    """What an executable of this plan allocates, where the states that are `adopted` have their place."""
    ports, rows = Ports(plan), max(rows, 1)
    states = sum(port_bytes(port).at(1) for port in plan.states if port.name not in adopted) + aside_bytes(plan)
    return Room(rows, plan.weights, states, plan.arena.at(rows), SLOTS * ports.size.at(rows))


def aside_bytes(plan: Plan) -> int:
    """For next values of states on their way, where several are copied."""
    bases = {port.base for port in plan.states}
    sizes = [plan.located[name][1].nbytes for name, base in plan.copies if base in bases]
    return sum(aligned(affine_of(size)).b for size in sizes) if len(sizes) > 1 else 0


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


@dataclass(frozen=True, slots=True)
class Way:
    """One copy between the staging and the device."""

    host: int
    device: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Form:
    """A slot for one batch size: its staging as arrays, and where each of them has its place on the device."""

    inputs: tuple[NDArray[Any], ...]
    flags: NDArray[np.int32]
    outputs: tuple[NDArray[Any], ...]
    input_ways: tuple[Way, ...]
    flags_way: Way
    output_ways: tuple[Way, ...]

    @property
    def into(self) -> list[Way]:
        """Copies of everything that goes to the device: one, or none."""
        return joined([*self.input_ways, self.flags_way])

    @property
    def back(self) -> list[Way]:
        """Copies of everything that comes back."""
        return joined([self.flags_way, *self.output_ways])


def joined(ways: Iterable[Way]) -> list[Way]:
    """The same copies, neighbours as one."""
    found: list[Way] = []
    for way in ways:
        last = found[-1] if found else None
        if last is not None and (last.host + last.nbytes, last.device + last.nbytes) == (way.host, way.device):
            found[-1] = Way(last.host, last.device, last.nbytes + way.nbytes)
        else:
            found.append(way)
    return [way for way in found if way.nbytes]


class Slot:
    """What one run in flight owns."""

    def __init__(self, device: Device, index: int, plan: Plan, layout: Ports) -> None:
        self.index = index
        self.memory = Block(device)
        self.arrived, self.computed, self.done = device.event(), device.event(), device.event()
        self._plan, self._layout = plan, layout
        self._staging = device.host_bytes(0)
        self._forms: dict[int, Form] = {}

    def fit(self, rows: int) -> None:
        """Room for batches of so many. DeviceMemoryError where there is none; then nothing has changed."""
        nbytes = self._layout.size.at(rows)
        if nbytes > self.memory.nbytes:
            device = self.memory.device
            staging = device.host_bytes(nbytes)
            try:
                self.memory.fit(nbytes)
            except BaseException:
                device.free_host(staging)
                raise
            device.free_host(self._staging)
            self._staging = staging
            self._forms.clear()

    def form(self, n: int) -> Form:
        """Made once for every batch size in use."""
        found = self._forms.get(n)
        if found is None:
            self.fit(max(n, 1))
            if len(self._forms) >= _FORMS:
                self._forms.clear()
            found = self._forms[n] = self._form(n)
        return found

    def _form(self, n: int) -> Form:
        layout, plan = self._layout, self._plan
        flags = layout.flags.at(max(n, 1))
        return Form(
            inputs=tuple(self._array(port, n) for port in plan.inputs),
            flags=self._staging[flags : flags + layout.flag_bytes].view(np.int32),
            outputs=tuple(self._array(port, n) for port in plan.outputs),
            input_ways=tuple(self._way(port, n) for port in plan.inputs),
            flags_way=self._between(flags, layout.flag_bytes),
            output_ways=tuple(self._way(port, n) for port in plan.outputs),
        )

    def _way(self, port: Port, n: int) -> Way:
        rows = max(n, 1)
        return self._between(self._layout.offsets[port.base].at(rows), aligned(port_bytes(port)).at(rows))

    def _between(self, offset: int, nbytes: int) -> Way:
        return Way(address_of(self._staging) + offset, self.memory.address + offset, nbytes)

    def _array(self, port: Port, n: int) -> NDArray[Any]:
        return port_array(port, self._staging[self._layout.offsets[port.base].at(max(n, 1)) :], n)

    def close(self) -> None:
        self._forms.clear()
        self.memory.close()
        self.memory.device.free_host(self._staging)
        for event in (self.arrived, self.computed, self.done):
            event.close()


def port_array(port: Port, block: HostBytes, n: int) -> NDArray[Any]:
    """The value of a port whose bytes begin a block."""
    if not isinstance(port.type, TensorType):
        raise ValueError(f"'{port.name}' is no tensor but {port.type}")
    shape, dtype = port.type.evaluate({"n": n}), port.type.dtype.numpy
    return np.frombuffer(block.data, dtype, int(np.prod(shape, dtype=np.int64))).reshape(shape)
