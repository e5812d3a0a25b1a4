"""The device memory of a plan: weights, states, one arena, and for every run in flight its inputs and outputs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.ir.types import TensorType
from lathe.core.plan.liveness import Affine, align_size
from lathe.core.plan.plan import FLAG_BYTES, Plan, Port, estimated_affine, exact_affine
from lathe.core.runtime.device.device import Device, Event, HostBytes
from lathe.core.runtime.host.host_copies import LARGE
from lathe.core.runtime.host.memory import address_of
from lathe.core.runtime.host.resident_values import Resident

_MAX_LAYOUTS = 256  # cached staging layouts of a slot; at the limit, all of them are dropped
SLOTS = 2  # runs in flight: one computes while the data of the other are copied


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Bytes of device memory that a plan takes for batches of up to `rows` rows. `weights`: those that stay there."""

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


def memory_of_plan(plan: Plan, rows: int, adopted: Container[str] = ()) -> PlanMemory:
    """The memory that an executable of this plan allocates for batches of up to `rows` rows.

    States in `adopted` have memory already and count nothing.
    """
    ports, rows = PortLayout(plan), max(rows, 1)
    states = sum(port_bytes(port).at(1) for port in plan.states if port.name not in adopted) + temporary_bytes(plan)
    return PlanMemory(rows, plan.resident, states, plan.arena.at(plan.address_rows(rows)), SLOTS * ports.size.at(rows))


def temporary_bytes(plan: Plan) -> int:
    """Bytes for the next values of states while they are copied; 0 unless several states are copied."""
    bases = {port.base for port in plan.states}
    sizes = [plan.value_addresses[name][1].nbytes for name, base in plan.copies if base in bases]
    return sum(align_size(estimated_affine(size)).b for size in sizes) if len(sizes) > 1 else 0


class PortLayout:
    """The offsets of inputs, flags and outputs in the memory of a slot, as functions of the batch size.

    Flags are words that kernels set to refuse their data. There are no gaps, so that each direction is one copy. Flags
    are copied in both directions: they are zero on the way in.
    """

    def __init__(self, plan: Plan) -> None:
        self.offsets: dict[int, Affine] = {}  # by the base of the port
        self.flags = self._add(plan.inputs, Affine())  # where they begin
        self.offsets[plan.flags_base] = self.flags
        self.flag_bytes = align_size(Affine(b=plan.flags * FLAG_BYTES)).b
        self.size = self._add(plan.outputs, self.flags + Affine(b=self.flag_bytes))

    def _add(self, ports: Sequence[Port], at: Affine) -> Affine:
        for port in ports:
            self.offsets[port.base] = at
            at = at + align_size(port_bytes(port))
        return at


def port_bytes(port: Port) -> Affine:
    size = exact_affine(port.type.nbytes) if isinstance(port.type, TensorType) else None
    if size is None:
        raise ValueError(f"'{port.name}' is {port.type}, which has no place on a device")
    return size


@dataclass(eq=False)
class DeviceBlock:
    """Device memory that can grow. Growing loses the contents, and invalidates every graph that holds its address."""

    device: Device
    address: int = 0
    nbytes: int = 0
    generation: int = 0

    def fit(self, nbytes: int) -> None:
        """Grow to at least `nbytes` bytes. DeviceMemoryError if memory is too small; then nothing has changed."""
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
class StagingCopy:
    """One copy of `nbytes` bytes between the staging memory of the host and the device; both ends are addresses."""

    host: int
    device: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StagingLayout:
    """The staging layout of a slot for one batch size: arrays of the host, and the copies to and from the device.

    It is made once, so that a run computes none of it.
    `residents`: where the outputs are on the device.
    `is_large`: inputs or outputs are copied in pieces (`host_copies`).
    """

    inputs: tuple[NDArray[Any], ...]
    flags: NDArray[np.int32]
    outputs: tuple[NDArray[Any], ...]
    input_copies: tuple[StagingCopy, ...]
    flags_copy: StagingCopy
    output_copies: tuple[StagingCopy, ...]
    residents: tuple[Resident, ...]
    is_large: bool

    @property
    def into(self) -> list[StagingCopy]:
        """The copies of inputs and flags to the device: at most one, because neighbours are merged."""
        return merge_neighbours([*self.input_copies, self.flags_copy])

    @property
    def back(self) -> list[StagingCopy]:
        """The copies of flags and outputs from the device: at most one, because neighbours are merged."""
        return merge_neighbours([self.flags_copy, *self.output_copies])


def merge_neighbours(ways: Iterable[StagingCopy]) -> list[StagingCopy]:
    """The copies, each merged with the one before if it begins, on both sides, where that one ends; no empty copies."""
    found: list[StagingCopy] = []
    for way in ways:
        last = found[-1] if found else None
        if last is not None and (last.host + last.nbytes, last.device + last.nbytes) == (way.host, way.device):
            found[-1] = StagingCopy(last.host, last.device, last.nbytes + way.nbytes)
        else:
            found.append(way)
    return [way for way in found if way.nbytes]


class Slot:
    """The memory and events of one run in flight: staging memory of the host, and inputs and outputs on the device."""

    def __init__(self, device: Device, index: int, plan: Plan, layout: PortLayout) -> None:
        self.index = index
        self.memory = DeviceBlock(device)
        self.arrived, self.computed, self.done = device.event(), device.event(), device.event()
        self._plan, self._layout = plan, layout
        self._staging = device.host_bytes(0)
        self._layouts: dict[int, StagingLayout] = {}
        self._pieces: list[Event] = []  # of outputs that are copied in pieces

    def fit(self, rows: int) -> None:
        """Make room for batches of `rows` rows. DeviceMemoryError if memory is too small; then nothing has changed."""
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
            self._layouts.clear()

    def layout(self, n: int) -> StagingLayout:
        """The staging layout for `n` rows, cached per batch size; makes room for it first.

        DeviceMemoryError if memory is too small.
        """
        found = self._layouts.get(n)
        if found is None:
            self.fit(max(n, 1))
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            found = self._layouts[n] = self._make_layout(n)
        return found

    def _make_layout(self, n: int) -> StagingLayout:
        layout, plan = self._layout, self._plan
        flags = layout.flags.at(max(n, 1))
        inputs, outputs = (tuple(self._array(port, n) for port in ports) for ports in (plan.inputs, plan.outputs))
        output_copies = tuple(self._copy_of(port, n) for port in plan.outputs)
        return StagingLayout(
            inputs=inputs,
            flags=self._staging[flags : flags + layout.flag_bytes].view(np.int32),
            outputs=outputs,
            input_copies=tuple(self._copy_of(port, n) for port in plan.inputs),
            flags_copy=self._copy_at(flags, layout.flag_bytes),
            output_copies=output_copies,
            residents=tuple(Resident(self.memory.device, way.device, way.nbytes) for way in output_copies),
            is_large=max(sum(array.nbytes for array in arrays) for arrays in (inputs, outputs)) >= LARGE,
        )

    def piece_events(self, count: int) -> list[Event]:
        """Events for `count` pieces of outputs; they are made when they are first needed."""
        while len(self._pieces) < count:
            self._pieces.append(self.memory.device.event())
        return self._pieces[:count]

    def _copy_of(self, port: Port, n: int) -> StagingCopy:
        rows = max(n, 1)
        return self._copy_at(self._layout.offsets[port.base].at(rows), align_size(port_bytes(port)).at(rows))

    def _copy_at(self, offset: int, nbytes: int) -> StagingCopy:
        return StagingCopy(address_of(self._staging) + offset, self.memory.address + offset, nbytes)

    def _array(self, port: Port, n: int) -> NDArray[Any]:
        return port_array(port, self._staging[self._layout.offsets[port.base].at(max(n, 1)) :], n)

    def close(self) -> None:
        self._layouts.clear()
        self.memory.close()
        self.memory.device.free_host(self._staging)
        for event in (self.arrived, self.computed, self.done, *self._pieces):
            event.close()


def port_array(port: Port, block: HostBytes, n: int) -> NDArray[Any]:
    """The value of a port for `n` rows as an array over the beginning of `block`. ValueError if it is no tensor."""
    if not isinstance(port.type, TensorType):
        raise ValueError(f"'{port.name}' is no tensor but {port.type}")
    shape, dtype = port.type.evaluate({"n": n}), port.type.dtype.numpy
    return np.frombuffer(block.data, dtype, int(np.prod(shape, dtype=np.int64))).reshape(shape)
