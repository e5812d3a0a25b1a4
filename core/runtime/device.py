"""What the runtime asks of a device beside the host: memory, streams of work, events between them, graphs of work.

Two implementations: `core.runtime.cuda` (NVIDIA's driver) and `core.runtime.simulated` (host memory; for tests of
everything that is not the driver). Addresses are plain integers, as plans count with them.

Work of one stream happens in the order it was given; work of several streams in any order that events leave. All calls
but `synchronize` may return before the work is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from core.codegen.cache import ObjectCache
from core.kernels.catalog import KernelSpec
from core.kernels.target import GpuTarget
from core.runtime.machine import Peaks

Grid: TypeAlias = tuple[int, int, int]  # programs along x, y and z, each at least 1
Function: TypeAlias = Any  # a device's own handle of a loaded kernel
HostBytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of a device's memory: what nobody has taken, and all."""

    free: int
    total: int


class Event(Protocol):
    """A point in the work of a stream: of the latest `Stream.record`."""

    def synchronize(self) -> None:
        """Wait until the work before the point is done; DeviceError when some of it failed."""
        ...

    def since(self, other: Event) -> int:
        """Nanoseconds between two points that were reached."""
        ...

    def close(self) -> None: ...


class Graph(Protocol):
    """Work that was captured once, addresses and batch size included, to be given to a stream in one call."""

    def close(self) -> None: ...


class Stream(Protocol):
    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        """From an address in host memory of `Device.host_bytes`, which must stay as it is until the copy is done."""
        ...

    def copy_out(self, target: int, address: int, nbytes: int) -> None:
        """To an address in host memory of `Device.host_bytes`."""
        ...

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """From one place of the device's memory to another."""
        ...

    def copy_from(self, target: int, other: Device, source: int, nbytes: int) -> None:
        """To this device from another one that it reaches; what is there must be done and stay."""
        ...

    def launch(self, function: Function, grid: Grid, addresses: Sequence[int], n: int) -> None:
        """Run a kernel: its operands are the addresses, then the batch size."""
        ...

    def record(self, event: Event) -> None:
        """Let `event` be the point that this stream's work has reached by now."""
        ...

    def wait(self, event: Event) -> None:
        """Let what is given to this stream from now on happen after the point that `event` is now."""
        ...

    def synchronize(self) -> None:
        """Wait until all work of this stream is done; DeviceError when some of it failed."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """What `work` gives to this stream, as a graph; none of it happens."""
        ...

    def replay(self, graph: Graph) -> None:
        """Give the captured work to this stream."""
        ...

    def close(self) -> None: ...


class Module(Protocol):
    """Loaded kernels."""

    def function(self, symbol: str) -> Function: ...

    def close(self) -> None: ...


@runtime_checkable
class Several(Protocol):
    """A function that can run in several ways, of which one has to be found by measuring."""

    def ways(self, n: int) -> Sequence[str]:
        """Those that may win for a batch of `n`, by name."""
        ...

    def by(self, n: int, way: str) -> Function:
        """The function that runs batches of `n` in one way."""
        ...


class Device(Protocol):
    """One device of this process; all sessions on it share it."""

    @property
    def name(self) -> str:
        """Such as "cuda:0"."""
        ...

    @property
    def target(self) -> GpuTarget: ...

    @property
    def keeps_time(self) -> bool:
        """Whether times that its events give say anything about kernels."""
        ...

    @property
    def lost(self) -> str:
        """Why nothing runs here any more; "" while it does. Every call but those that give something back is then a
        DeviceLost, and those do nothing."""
        ...

    def renew(self) -> None:
        """Put a lost device to use again. DeviceLost while sessions still hold something of it, or where that takes a
        new process."""
        ...

    def reaches(self, other: Device) -> bool:
        """Whether values come from another device without a stop in the host's memory."""
        ...

    def library(self) -> int:
        """The version of the vendor's library of products; 0 where there is none for this device."""
        ...

    def memory(self) -> MemoryInfo: ...

    def peaks(self) -> Peaks:
        """What the whole device does at most."""
        ...

    def allocate(self, nbytes: int) -> int:
        """The address of uninitialised bytes, a multiple of 256. DeviceMemoryError when there are none left."""
        ...

    def free(self, address: int) -> None:
        """Give bytes back; no work that is not done yet may use them."""
        ...

    def host_bytes(self, nbytes: int) -> HostBytes:
        """Host memory that copies run from and to beside other work: its pages stay in place."""
        ...

    def free_host(self, block: HostBytes) -> None: ...

    def stream(self) -> Stream: ...

    def event(self, timed: bool = False) -> Event:
        """`timed`: for `Event.since`."""
        ...

    def code(self, spec: KernelSpec, cache: ObjectCache | None = None) -> bytes:
        """The object of a kernel for this device, from the cache where it is there. UnsupportedError without the
        compiler that it takes."""
        ...

    def prepare(self, specs: Iterable[KernelSpec], cache: ObjectCache | None) -> None:
        """Have the objects of kernels in the cache, many at a time where that is faster; what fails is left to
        `code`."""
        ...

    def load(self, objects: Mapping[str, bytes]) -> Module:
        """Kernels by symbol. ArtifactError for what is no code for this device."""
        ...
