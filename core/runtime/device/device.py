"""The interface of a device besides the host: memory, streams of work, events between them, graphs of work.

There are two implementations that run: `lathe.core.runtime.device.cuda` (NVIDIA's driver) and
`lathe.core.runtime.device.simulated` (host memory, for tests of everything but the driver). Addresses are plain
integers, because plans compute with them.

The work of one stream happens in order. The work of several streams happens in any order that events allow. All calls
but `synchronize` may return before the work is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lathe.core.codegen.object_cache import ObjectCache
from lathe.core.kernels.call import KernelSpec
from lathe.core.kernels.target import GpuTarget
from lathe.core.runtime.host.machine import Peaks

Grid: TypeAlias = tuple[int, int, int]  # programs along x, y and z, each at least 1
Function: TypeAlias = Any  # the device's handle of a loaded kernel
HostBytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of a device's memory: free, and total."""

    free: int
    total: int


class Event(Protocol):
    """A point in the work of a stream, set by the latest `Stream.record`. `Device.event` makes one."""

    def synchronize(self) -> None:
        """Wait until the work before the point is done; DeviceError if some of it failed."""
        ...

    def since(self, other: Event) -> int:
        """Nanoseconds from `other` to this point. Both must be timed events whose points have been reached."""
        ...

    def close(self) -> None: ...


class Graph(Protocol):
    """Captured work of a stream, with fixed addresses and batch size, which a stream can replay in one call."""

    def close(self) -> None: ...


class Stream(Protocol):
    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        """Copy to the device from host memory of `Device.host_bytes`.

        The caller must not change the source until the copy is done.
        """
        ...

    def copy_out(self, target: int, address: int, nbytes: int) -> None:
        """Copy from the device to host memory of `Device.host_bytes`, which has the bytes once the copy is done."""
        ...

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device's memory."""
        ...

    def copy_from(self, target: int, other: Device, source: int, nbytes: int) -> None:
        """Copy to this device from another one that it reaches (`Device.reaches`).

        The work that writes the source must be done, and the source must stay until the copy is done.
        """
        ...

    def launch(self, function: Function, grid: Grid, addresses: Sequence[int], n: int) -> None:
        """Run a kernel or library function: its arguments are the addresses of the operands, then the batch size."""
        ...

    def record(self, event: Event) -> None:
        """Set `event` to the end of this stream's work so far."""
        ...

    def wait(self, event: Event) -> None:
        """Delay later work of this stream until the point is reached that `event` was last set to."""
        ...

    def synchronize(self) -> None:
        """Wait until all work of this stream is done; DeviceError if some of it failed."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """The work that `work` submits to this stream, as a graph; none of it is executed."""
        ...

    def replay(self, graph: Graph) -> None:
        """Submit the captured work to this stream."""
        ...

    def close(self) -> None: ...


class Module(Protocol):
    """Loaded kernels."""

    def function(self, symbol: str) -> Function: ...

    def close(self) -> None: ...


@runtime_checkable
class Tunable(Protocol):
    """A function with several implementations ("ways"), of which the tuner finds the fastest by measuring."""

    def ways(self, n: int) -> Sequence[str]:
        """The names of the implementations that may be the fastest for a batch of `n`."""
        ...

    def by(self, n: int, way: str) -> Function:
        """The function that runs batches of `n` with the implementation `way`."""
        ...


class Device(Protocol):
    """One device of this process besides the host CPU; all sessions on it share it."""

    @property
    def name(self) -> str:
        """For example "cuda:0"."""
        ...

    @property
    def target(self) -> GpuTarget: ...

    @property
    def has_clock(self) -> bool:
        """Whether timed events measure how long kernels run; false for a simulation without costs of kernels."""
        ...

    @property
    def lost(self) -> str:
        """Why nothing runs here any more; "" while the device works.

        On a lost device no work is done, and calls that wait for work raise DeviceLost. Calls that submit work or
        allocate memory may raise it, too. Calls that free or close something do not.
        """
        ...

    def renew(self) -> None:
        """Make a lost device usable again.

        DeviceLost while sessions still hold memory of it, or if that takes a new process.
        """
        ...

    def reaches(self, other: Device) -> bool:
        """Whether this device can copy from another one without a detour through host memory."""
        ...

    def library_version(self) -> int:
        """The version of the vendor's library for matrix products; 0 if there is none for this device."""
        ...

    def memory(self) -> MemoryInfo: ...

    def peaks(self) -> Peaks:
        """The peak rates of the whole device."""
        ...

    def allocate(self, nbytes: int) -> int:
        """The address of uninitialised memory, a multiple of 256.

        DeviceMemoryError if there is not enough memory.
        """
        ...

    def free(self, address: int) -> None:
        """Free memory; no unfinished work may use it."""
        ...

    def host_bytes(self, nbytes: int) -> HostBytes:
        """Host memory of `nbytes` bytes, pinned if the device has that, so that copies overlap with other work."""
        ...

    def free_host(self, block: HostBytes) -> None: ...

    def stream(self) -> Stream: ...

    def event(self, timed: bool = False) -> Event:
        """A new event; only `timed` events support `Event.since`."""
        ...

    def wait_for_stream(self, handle: int) -> None:
        """Wait for the work so far of another library's stream; 1 is the default stream, as in the driver's API."""
        ...

    def code(self, spec: KernelSpec, cache: ObjectCache | None = None) -> bytes:
        """The object of a kernel for this device, from the cache if it is there, otherwise compiled and added to it.

        UnsupportedError if the compiler for it is not installed, RuntimeError if the kernel does not compile.
        """
        ...

    def prepare(self, specs: Iterable[KernelSpec], cache: ObjectCache | None) -> None:
        """Compile kernels into the cache ahead of `code`, if several processes together are faster.

        The device of a GPU that is not here always compiles them. Without a cache there is no effect. Kernels that do
        not compile are skipped, and `code` raises the errors.
        """
        ...

    def load(self, objects: Mapping[str, bytes]) -> Module:
        """Load kernels from their objects by symbol. ArtifactError for an object that is no code for this device."""
        ...
