"""A GPU that is not in this machine, known by its properties: kernels are compiled for it, and nothing runs.

Its name is its description, as `lathe kernels --target` takes it:

    sm_90                          with the properties of the largest GPU of that architecture in the table below
    sm_90/132/232448/62914560      multiprocessors, bytes of shared memory per block, bytes of L2 cache

The choice of tiles depends on these properties: GPUs with equal ones get the same kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NoReturn

from lathe.core.codegen.object_cache import ObjectCache
from lathe.core.errors import UnsupportedError
from lathe.core.kernels.call import KernelSpec
from lathe.core.kernels.cuda import binary_for
from lathe.core.kernels.target import GPU_PREFIX, GpuTarget
from lathe.core.runtime.device.cuda_kernels import compile_ahead
from lathe.core.runtime.device.device import Device, Event, HostBytes, MemoryInfo, Module, Stream
from lathe.core.runtime.host.machine import Peaks

_FORM = "sm_ARCH or sm_ARCH/MULTIPROCESSORS/SHARED_BYTES/L2_BYTES, such as sm_90/132/232448/62914560"

# NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities", and the data sheets of A100, A40, L40 and H200.
_LARGEST = {
    80: GpuTarget(arch=80),
    86: GpuTarget(arch=86, multiprocessors=84, shared_bytes=99 << 10, l2_bytes=6 << 20),
    89: GpuTarget(arch=89, multiprocessors=142, shared_bytes=99 << 10, l2_bytes=96 << 20),
    90: GpuTarget(arch=90, multiprocessors=132, shared_bytes=227 << 10, l2_bytes=60 << 20),
}
_UNKNOWN = Peaks(flops=1e13, bandwidth=1e12)  # only used to compare costs with those of the host
_LIMITLESS = 1 << 62


def parse_target(name: str) -> GpuTarget:
    """The target that a description such as `sm_90` or `sm_90/132/232448/62914560` stands for.

    UnsupportedError for a name that is no description, or an architecture whose properties must be given.
    """
    parts = name.removeprefix(GPU_PREFIX).split("/")
    if not name.startswith(GPU_PREFIX) or len(parts) not in (1, 4) or not all(part.isdecimal() for part in parts):
        raise UnsupportedError(f"target '{name}' is no description of a GPU, expected {_FORM}")
    arch, *facts = map(int, parts)
    if facts:
        multiprocessors, shared_bytes, l2_bytes = facts
        return GpuTarget(arch, multiprocessors, shared_bytes, l2_bytes=l2_bytes)
    if arch not in _LARGEST:
        known = ", ".join(f"{GPU_PREFIX}{each}" for each in _LARGEST)
        raise UnsupportedError(f"target '{name}' needs its facts ({_FORM}); only those of {known} are known")
    return _LARGEST[arch]


class AbsentDevice:
    """A device for which kernels are compiled. What would use memory or run something there raises UnsupportedError."""

    lost = ""
    has_clock = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.target = parse_target(name)

    def code(self, spec: KernelSpec, cache: ObjectCache | None = None) -> bytes:
        return binary_for(spec, self.target, cache).to_bytes()

    def prepare(self, specs: Iterable[KernelSpec], cache: ObjectCache | None) -> None:
        """Compile all kernels into the cache, because no later call compiles candidates one by one.

        Kernels that do not compile are left out. Without a cache, nothing is compiled.
        """
        if cache is None:
            return
        given = {spec.key: spec for spec in specs}
        compile_ahead(given.values(), self.target, cache)
        for spec in given.values():
            with suppress(RuntimeError):
                binary_for(spec, self.target, cache)

    def memory(self) -> MemoryInfo:
        """4 EiB free and in total, in effect no limit: the limits are checked where the GPU is."""
        return MemoryInfo(_LIMITLESS, _LIMITLESS)

    def peaks(self) -> Peaks:
        return _UNKNOWN

    def library_version(self) -> int:
        return 0

    def reaches(self, other: Device) -> bool:
        return other is self

    def renew(self) -> None:
        """No effect: it cannot be lost."""

    def allocate(self, nbytes: int) -> int:
        self._refuse()

    def free(self, address: int) -> None:
        self._refuse()

    def host_bytes(self, nbytes: int) -> HostBytes:
        self._refuse()

    def free_host(self, block: HostBytes) -> None:
        self._refuse()

    def stream(self) -> Stream:
        self._refuse()

    def event(self, timed: bool = False) -> Event:
        self._refuse()

    def wait_for_stream(self, handle: int) -> None:
        self._refuse()

    def load(self, objects: Mapping[str, bytes]) -> Module:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(f"{self.name} is the description of a GPU: kernels are compiled for it, nothing runs")
