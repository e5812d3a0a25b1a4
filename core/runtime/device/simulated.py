"""A device made of host memory, which runs kernels on NumPy: for tests of plans, copies, graphs and placement.

It is strict where a GPU is silent. Memory begins as NaN. Every operand must lie inside one allocated block. Work is not
done when it is submitted to a stream, but as late as `Schedule` says: "late" does only the work that a caller waits
for, "early" all work that may run, "random" some of it. So code that works only by lucky timing fails here every time.
"""

from __future__ import annotations

import itertools
import random
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Literal, Protocol, TypeAlias

import numpy as np

from lathe.core.codegen.object_cache import ObjectCache
from lathe.core.errors import DeviceError, DeviceLost, DeviceMemoryError
from lathe.core.kernels.call import KernelSpec
from lathe.core.kernels.cuda import Source, generate, interpret
from lathe.core.kernels.reference.cpu import ReferenceKernel, object_of
from lathe.core.kernels.target import GpuTarget
from lathe.core.runtime.device.device import Device, Event, Graph, Grid, HostBytes, MemoryInfo, Stream
from lathe.core.runtime.host.machine import Peaks
from lathe.core.runtime.host.memory import address_of, aligned_bytes, array_at

Schedule: TypeAlias = Literal["late", "early", "random"]

_POISON = 0xFF  # every float of these bytes is NaN, every signed integer -1
_BYTES = np.dtype(np.uint8)


class Kernel(Protocol):
    """A kernel in Python: a reference, or a GPU kernel in Triton's interpreter."""

    def run(self, grid: Grid, addresses: Sequence[int], n: int, view: Callable[[int, int], HostBytes]) -> None:
        """Run the kernel for a batch of `n`; `view(address, nbytes)` gives the bytes there, or raises DeviceError."""
        ...


Cost: TypeAlias = Callable[[Kernel, Grid, int], int]  # nanoseconds of a launch for a batch size


@dataclass(frozen=True)
class Backend:
    """How kernels run: `code` makes the object of a spec, `load` makes a kernel in Python from the object."""

    target: GpuTarget
    code: Callable[[KernelSpec], bytes]
    load: Callable[[bytes], Kernel]


class InterpretedKernel:
    """A GPU kernel, given as the bytes of its source, that Triton's interpreter runs; needs Triton, and is slow."""

    def __init__(self, data: bytes) -> None:
        self._source = Source.from_bytes(data)

    def run(self, grid: Grid, addresses: Sequence[int], n: int, view: Callable[[int, int], HostBytes]) -> None:
        for address in addresses:
            view(address, 1)
        try:
            interpret(self._source, grid, addresses, n)
        except Exception as error:  # Triton's interpreter raises whatever the kernel's Python would
            raise DeviceError(f"kernel {self._source.symbol}: {type(error).__name__}: {error}") from error


REFERENCES = Backend(GpuTarget(device="simulated"), object_of, ReferenceKernel)
INTERPRETER = Backend(GpuTarget(), lambda spec: generate(spec, GpuTarget()).to_bytes(), InterpretedKernel)


@dataclass(slots=True)
class Traffic:
    """The number of copies in one direction, and their bytes together."""

    copies: int = 0
    nbytes: int = 0

    def note(self, nbytes: int) -> None:
        self.copies += 1
        self.nbytes += nbytes


class Memory:
    """The allocated blocks of a simulated device, at most `nbytes` bytes together."""

    def __init__(self, nbytes: int) -> None:
        self.total = nbytes
        self._blocks: dict[int, HostBytes] = {}
        self._starts: list[int] = []

    @property
    def used(self) -> int:
        return sum(block.nbytes for block in self._blocks.values())

    def allocate(self, nbytes: int) -> int:
        if self.used + nbytes > self.total:
            raise DeviceMemoryError(f"{nbytes} bytes do not fit: {self.used} of {self.total} are used")
        whole = aligned_bytes(nbytes + 256)
        offset = -address_of(whole) % 256
        block = whole[offset : offset + nbytes]
        block[:] = _POISON
        address = address_of(whole) + offset
        self._blocks[address] = block
        self._starts = sorted(self._blocks)
        return address

    def free(self, address: int) -> None:
        if address not in self._blocks:
            raise DeviceError(f"no block was allocated at {address:#x}")
        del self._blocks[address]
        self._starts = sorted(self._blocks)

    def view(self, address: int, nbytes: int) -> HostBytes:
        """`nbytes` bytes at `address` as an array. DeviceError unless they lie inside one allocated block."""
        index = bisect_right(self._starts, address) - 1
        start = self._starts[index] if index >= 0 else 0
        block = self._blocks.get(start)
        if block is None or address + nbytes > start + block.nbytes:
            raise DeviceError(f"{nbytes} bytes at {address:#x} lie in no allocated block")
        return array_at(address, _BYTES, (nbytes,))


class SimulatedDevice:
    """A device in host memory that runs kernels on NumPy, at a time that its `schedule` determines.

    The device is lost, and DeviceLost is raised, if a kernel fails or has an operand outside the allocated blocks.
    """

    def __init__(
        self,
        name: str = "simulated",
        backend: Backend = REFERENCES,
        nbytes: int = 1 << 30,
        schedule: Schedule = "late",
        seed: int = 0,
        cost: Cost | None = None,
    ) -> None:
        """`nbytes`: the device's memory. `seed`: of the random schedule. `cost` gives the nanoseconds of each launch.

        With a `cost`, time is simulated: events show the cost of kernels, and nothing else takes time.
        """
        self.name = name
        self.target = backend.target
        self.lock = threading.RLock()
        self.space = Memory(nbytes)
        self.schedule = schedule
        self.chance = random.Random(seed)
        self.streams: list[_Stream] = []
        self.launches = self.replays = 0  # the number of calls of each
        self.inward, self.outward = Traffic(), Traffic()  # copies from and to the host that were done
        self.lost = ""
        self.nanoseconds = 0  # by `cost`
        self._cost = cost
        self._backend = backend

    @property
    def has_clock(self) -> bool:
        return self._cost is not None

    def now(self) -> int:
        return self.nanoseconds if self._cost is not None else perf_counter_ns()

    def spend(self, kernel: Kernel, grid: Grid, n: int) -> None:
        """Add the cost of a kernel that has run to the simulated time; no effect without a cost function."""
        if self._cost is not None:
            self.nanoseconds += self._cost(kernel, grid, n)

    def reaches(self, other: Device) -> bool:
        return isinstance(other, SimulatedDevice)

    def renew(self) -> None:
        with self.lock:
            if self.space.used:
                raise DeviceLost(f"{self.lost}; sessions that ran there still hold {self.space.used} bytes: close them")
            self.streams.clear()
            self.lost = ""

    def library_version(self) -> int:
        """0: there is no vendor library."""
        return 0

    def peaks(self) -> Peaks:
        """10^13 operations and 10^12 bytes per second: round numbers, only for reports and comparisons."""
        return Peaks(flops=1e13, bandwidth=1e12)

    def memory(self) -> MemoryInfo:
        with self.lock:
            return MemoryInfo(self.space.total - self.space.used, self.space.total)

    def allocate(self, nbytes: int) -> int:
        with self.lock:
            return self.space.allocate(nbytes)

    def free(self, address: int) -> None:
        with self.lock:
            self.space.free(address)

    def host_bytes(self, nbytes: int) -> HostBytes:
        return aligned_bytes(nbytes)

    def free_host(self, block: HostBytes) -> None:
        """No effect: the garbage collector frees it."""

    def stream(self) -> Stream:
        with self.lock:
            made = _Stream(self)
            self.streams.append(made)
            return made

    def event(self, timed: bool = False) -> Event:
        return _Event(self)

    def wait_for_stream(self, handle: int) -> None:
        """No effect: other libraries have no streams here."""

    def code(self, spec: KernelSpec, cache: ObjectCache | None = None) -> bytes:
        return self._backend.code(spec)

    def prepare(self, specs: Iterable[KernelSpec], cache: ObjectCache | None) -> None:
        """No effect: there is nothing to compile."""

    def load(self, objects: Mapping[str, bytes]) -> _Module:
        return _Module({symbol: self._backend.load(data) for symbol, data in objects.items()})

    # -- when work happens ----------------------------------------------------------------------------------------

    def run_scheduled(self) -> None:
        """Run submitted work as the schedule says: "early" all that can run, "random" at most 3 pieces, "late" none."""
        if self.schedule == "early":
            self._run_while(lambda: True)
        elif self.schedule == "random":
            steps = itertools.repeat(None, self.chance.randrange(4))
            self._run_while(lambda: next(steps, 0) is None)

    def run_work(self, work: _Work) -> None:
        """Run one piece of work. If it fails, the device is lost, as on a GPU.

        DeviceLost then, and for all later work.
        """
        if not self.lost:
            try:
                work.run()
            except Exception as error:
                self.lost = f"{self.name} was lost: {type(error).__name__}: {error}"
        if self.lost:
            raise DeviceLost(self.lost)

    def finish(self, ticket: _Ticket) -> None:
        """Run the work that a recorded event depends on, and more if the schedule says so.

        DeviceError if the event can never be reached, DeviceLost as for `run_work`.
        """
        if self.schedule == "late":
            self._reach(ticket)
        else:
            self._run_while(lambda: not ticket.reached)
        if not ticket.reached:
            raise DeviceError("a stream waits for an event that can never come")

    def _reach(self, ticket: _Ticket) -> None:
        while not ticket.reached and ticket.stream.work:
            blocking = ticket.stream.blocked_by()
            if blocking is not None:
                self._reach(blocking)
                if not blocking.reached:
                    return
            ticket.stream.run_one()

    def _run_while(self, more: Callable[[], bool]) -> None:
        while more():
            ready = [stream for stream in self.streams if stream.work and stream.blocked_by() is None]
            if not ready:
                return
            self.chance.choice(ready).run_one()


@dataclass(eq=False)
class _Ticket:
    """One recording of an event: the stream, whether the point has been reached, and when."""

    stream: _Stream
    reached: bool = False
    nanoseconds: int = 0

    def reach(self) -> None:
        self.reached, self.nanoseconds = True, self.stream.device.now()


@dataclass(frozen=True, slots=True)
class _Work:
    run: Callable[[], None]
    after: _Ticket | None = None  # the point that it waits for


@dataclass(frozen=True, slots=True)
class _Captured:
    """Work that a stream, number `lane` of a capture, was given: to run, to wait for a point, or to reach one."""

    lane: int
    run: Callable[[], None] = lambda: None
    after: _Ticket | None = None
    point: _Ticket | None = None


@dataclass(eq=False)
class _Capture:
    """A capture in progress. A stream that waits for a point of a captured stream is captured, too, as in CUDA."""

    streams: list[_Stream]
    found: list[_Captured] = field(default_factory=list)
    points: set[_Ticket] = field(default_factory=set)

    def add(self, stream: _Stream, run: Callable[[], None], after: _Ticket | None, point: _Ticket | None) -> None:
        if after is not None and after not in self.points:
            raise DeviceError("a stream that is captured waits for work outside of the capture")
        if point is not None:
            self.points.add(point)
        self.found.append(_Captured(self.streams.index(stream), run, after, point))

    def check_joined(self) -> None:
        """DeviceError if the first stream does not wait for all work of the others."""
        waited = {each.after for each in self.found if each.lane == 0}
        open_lanes: set[int] = set()
        for each in self.found:
            if each.point in waited and each.point is not None:
                open_lanes.discard(each.lane)
            elif each.lane:
                open_lanes.add(each.lane)
        if open_lanes:
            raise DeviceError(f"{len(open_lanes)} streams of the capture were not joined")


@dataclass(eq=False)
class _Graph:
    work: tuple[_Captured, ...]

    def close(self) -> None:
        self.work = ()


class _Module:
    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        self._kernels = dict(kernels)

    def function(self, symbol: str) -> Kernel:
        return self._kernels[symbol]

    def close(self) -> None:
        self._kernels.clear()


@dataclass(eq=False)
class _Event:
    device: SimulatedDevice
    ticket: _Ticket | None = None

    def synchronize(self) -> None:
        with self.device.lock:
            if self.ticket is not None:
                self.device.finish(self.ticket)

    def since(self, other: Event) -> int:
        earlier = other.ticket if isinstance(other, _Event) else None
        if self.ticket is None or earlier is None or not (self.ticket.reached and earlier.reached):
            raise DeviceError("since() needs two events whose points were reached")
        return self.ticket.nanoseconds - earlier.nanoseconds

    def close(self) -> None:
        pass


@dataclass(eq=False)
class _Stream:
    device: SimulatedDevice
    work: deque[_Work] = field(default_factory=deque)
    captured: _Capture | None = None
    is_temporary: bool = False  # it ends with its work

    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        space, host = self.device.space, array_at(source, _BYTES, (nbytes,))

        def run() -> None:
            np.copyto(space.view(address, nbytes), host)
            self.device.inward.note(nbytes)

        self._submit(run)

    def copy_out(self, target: int, address: int, nbytes: int) -> None:
        space, host = self.device.space, array_at(target, _BYTES, (nbytes,))

        def run() -> None:
            np.copyto(host, space.view(address, nbytes))
            self.device.outward.note(nbytes)

        self._submit(run)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        space = self.device.space
        self._submit(lambda: np.copyto(space.view(target, nbytes), space.view(source, nbytes)))

    def copy_from(self, target: int, other: Device, source: int, nbytes: int) -> None:
        if not isinstance(other, SimulatedDevice):
            raise TypeError(f"{other.name} is another kind of device")
        here, there = self.device.space, other.space
        self._submit(lambda: np.copyto(here.view(target, nbytes), there.view(source, nbytes)))

    def launch(self, function: Kernel, grid: Grid, addresses: Sequence[int], n: int) -> None:
        if min(grid) < 1:
            raise DeviceError(f"a launch needs at least one program along each axis, got {grid}")
        given = tuple(addresses)
        self.device.launches += 1

        def run() -> None:
            function.run(grid, given, n, self.device.space.view)
            self.device.spend(function, grid, n)

        self._submit(run)

    def record(self, event: Event) -> None:
        if not isinstance(event, _Event):
            raise TypeError(f"an event of another device: {event}")
        event.ticket = ticket = _Ticket(self)
        self._submit(ticket.reach, point=ticket)

    def wait(self, event: Event) -> None:
        if isinstance(event, _Event) and event.ticket is not None:
            forked = event.ticket.stream.captured
            if forked is not None and self.captured is None:
                forked.streams.append(self)
                self.captured = forked
            self._submit(lambda: None, event.ticket)

    def synchronize(self) -> None:
        event = _Event(self.device)
        self.record(event)
        event.synchronize()

    def capture(self, work: Callable[[], None]) -> Graph:
        with self.device.lock:
            found = self.captured = _Capture([self])
            try:
                work()
            finally:
                for stream in found.streams:
                    stream.captured = None
            found.check_joined()
            return _Graph(tuple(found.found))

    def replay(self, graph: Graph) -> None:
        """Submit the work of the first captured stream to this one, and that of others to new streams."""
        if not isinstance(graph, _Graph):
            raise TypeError(f"a graph of another device: {graph}")
        with self.device.lock:
            self.device.replays += 1
            lanes = {0: self}
            points: dict[_Ticket, _Ticket] = {}
            for each in graph.work:
                lane = lanes.setdefault(each.lane, _Stream(self.device, is_temporary=True))
                run = each.run
                if each.point is not None:
                    points[each.point] = point = _Ticket(lane)
                    run = point.reach
                lane.work.append(_Work(run, points[each.after] if each.after is not None else None))
            self.device.streams += [lane for number, lane in lanes.items() if number]
            self.device.run_scheduled()

    def close(self) -> None:
        with self.device.lock:
            if not self.device.lost:
                self.synchronize()
            if self in self.device.streams:
                self.device.streams.remove(self)

    def blocked_by(self) -> _Ticket | None:
        """The unreached point that the next work waits for; None if that work can run, or if there is no work."""
        after = self.work[0].after if self.work else None
        return after if after is not None and not after.reached else None

    def run_one(self) -> None:
        work = self.work.popleft()
        if self.is_temporary and not self.work:
            self.device.streams.remove(self)
        self.device.run_work(work)

    def _submit(self, run: Callable[[], None], after: _Ticket | None = None, point: _Ticket | None = None) -> None:
        with self.device.lock:
            if self.captured is not None:
                self.captured.add(self, run, after, point)
                return
            self.work.append(_Work(run, after))
            self.device.run_scheduled()
