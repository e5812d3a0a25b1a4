"""NVIDIA's driver through NVIDIA's own bindings (`cuda-bindings`, the extra `cuda`).

The bindings are thin, one Python function per function of the driver, 31 MB, and bring no second allocator, stream or
kernel cache, as CuPy would. The CUDA toolkit is not needed: kernels are binaries or PTX, which the driver itself
compiles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lathe.core.codegen.object_cache import ObjectCache
from lathe.core.errors import ArtifactError, DeviceError, DeviceLost, UnsupportedError
from lathe.core.kernels.call import KernelSpec
from lathe.core.kernels.cuda import Binary, binary_for
from lathe.core.kernels.gemm.cublaslt_spec import LibrarySpec
from lathe.core.kernels.target import GpuTarget
from lathe.core.runtime.device.cublaslt import Library, Product, open_library
from lathe.core.runtime.device.cuda_driver import Driver, load_driver
from lathe.core.runtime.device.cuda_kernels import compile_ahead
from lathe.core.runtime.device.device import Device, Event, Graph, Grid, HostBytes, MemoryInfo, Module, Stream
from lathe.core.runtime.host.machine import Peaks
from lathe.core.runtime.host.memory import address_of, array_at

_WARP = 32
_PLAIN_SHARED = 48 << 10  # bytes of shared memory that every kernel may use; more must be requested
_LANES = 128  # float32 multiply-adds of a multiprocessor in one cycle, on everything from sm_86 on
_UNKNOWN = Peaks(flops=1e13, bandwidth=5e11)  # if the driver does not report its clock rates
_BYTES = np.dtype(np.uint8)
_PROBE = 256  # bytes
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for all contexts
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
_KNOWN_PEERS = "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"
_UNTIMED = 2  # CU_EVENT_DISABLE_TIMING


class _Thread(threading.local):
    """Thread-local: the context that is current in this thread."""

    context: Any = None


_thread = _Thread()


class CudaDevice:
    """One GPU, in its primary context, which other libraries in this process share."""

    def __init__(self, driver: Driver, index: int) -> None:
        """Open the GPU of this index. UnsupportedError if there are fewer GPUs."""
        count = int(driver("cuDeviceGetCount"))
        if index >= count:
            raise UnsupportedError(f"device 'cuda:{index}' is not here: the driver knows {count} GPUs, counted from 0")
        self.name = f"cuda:{index}"
        self.driver = driver
        self.lost = ""
        self._device = driver("cuDeviceGet", index)
        self.context = driver("cuDevicePrimaryCtxRetain", self._device)
        self.target = self._target()
        self.has_clock = True
        self._pinned: dict[int, int] = {}
        self._allocated: set[int] = set()  # addresses of allocated device memory
        self._peers: dict[str, bool] = {}  # by device name: whether its memory can be read

    @staticmethod
    def open(index: int) -> CudaDevice:
        """The GPU of this index. UnsupportedError that says what is missing: bindings, driver or GPU."""
        return CudaDevice(load_driver(f"cuda:{index}"), index)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver in this device's context, and return its results as `Driver` does.

        A fatal error marks the device as lost; DeviceLost then, and for every later call. DeviceMemoryError if there is
        no memory left, DeviceError for any other failure.
        """
        if self.lost:
            raise DeviceLost(self.lost)
        try:
            self._enter()
            return self.driver(name, *arguments)
        except DeviceLost as error:
            self.lost = self.lost or f"{self.name} was lost: {error}"
            raise DeviceLost(self.lost) from error

    def destroy(self, name: str, handle: Any) -> None:
        """Call a function that destroys an object of the driver.

        No effect on a lost device: its objects are gone already, and other objects may have their addresses and handles
        by now.
        """
        if not self.lost:
            with suppress(DeviceLost):  # a fault may be reported here first
                self.call(name, handle)

    def renew(self) -> None:
        held = len(self._allocated) + len(self._pinned)
        if held:
            raise DeviceLost(f"{self.lost}; sessions that ran there still hold {held} blocks of memory: close them")
        try:
            self.driver("cuDevicePrimaryCtxReset", self._device)
            self.context = self.driver("cuDevicePrimaryCtxRetain", self._device)
            self.driver("cuCtxSetCurrent", self.context)
            _thread.context = self.context
            probe = self.driver("cuMemAlloc", _PROBE)
            self.driver("cuMemFree", probe)
        except DeviceError as error:
            raise DeviceLost(f"{self.lost}; it does not work again in this process ({error}): restart it") from error
        self.__dict__.pop("_vendor_library", None)  # the library's handles belonged to the context
        self._peers.clear()
        self.lost = ""

    def _enter(self) -> None:
        """Make this device's context current in this thread."""
        if _thread.context is not self.context:
            self.driver("cuCtxSetCurrent", self.context)
            _thread.context = self.context

    def _target(self) -> GpuTarget:
        fact = self._fact
        return GpuTarget(
            arch=10 * fact("COMPUTE_CAPABILITY_MAJOR") + fact("COMPUTE_CAPABILITY_MINOR"),
            multiprocessors=fact("MULTIPROCESSOR_COUNT"),
            shared_bytes=fact("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            l2_bytes=fact("L2_CACHE_SIZE"),
        )

    def _fact(self, name: str) -> int:
        return self.driver.attribute(f"CU_DEVICE_ATTRIBUTE_{name}", self._device)

    def peaks(self) -> Peaks:
        """The rates computed from the clock rates, which no program quite reaches.

        Rough guesses if the driver does not report its clock rates.
        """
        clock, memory, width = (
            self._fact(name) for name in ("CLOCK_RATE", "MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH")
        )
        if not (clock and memory and width):
            return _UNKNOWN
        return Peaks(2 * _LANES * self.target.multiprocessors * clock * 1e3, 2 * memory * 1e3 * width / 8)

    def memory(self) -> MemoryInfo:
        free, total = self.call("cuMemGetInfo")
        return MemoryInfo(int(free), int(total))

    def allocate(self, nbytes: int) -> int:
        address = int(self.call("cuMemAlloc", nbytes))
        self._allocated.add(address)
        return address

    def free(self, address: int) -> None:
        self._allocated.discard(address)
        self.destroy("cuMemFree", address)

    def host_bytes(self, nbytes: int) -> HostBytes:
        if nbytes == 0:
            return np.zeros(0, np.uint8)
        address = int(self.call("cuMemHostAlloc", nbytes, _PORTABLE))
        block = array_at(address, _BYTES, (nbytes,))
        self._pinned[address] = nbytes
        return block

    def free_host(self, block: HostBytes) -> None:
        if block.nbytes:
            address = address_of(block)
            del self._pinned[address]
            self.destroy("cuMemFreeHost", address)

    def stream(self) -> Stream:
        return _Stream(self, self.call("cuStreamCreate", _NON_BLOCKING))

    def event(self, timed: bool = False) -> Event:
        return _Event(self, self.call("cuEventCreate", 0 if timed else _UNTIMED))

    def wait_for_stream(self, handle: int) -> None:
        self.call("cuStreamSynchronize", handle)

    def code(self, spec: KernelSpec, cache: ObjectCache | None = None) -> bytes:
        return spec.to_bytes() if isinstance(spec, LibrarySpec) else binary_for(spec, self.target, cache).to_bytes()

    def prepare(self, specs: Iterable[KernelSpec], cache: ObjectCache | None) -> None:
        if cache is not None:
            compile_ahead(specs, self.target, cache)

    def load(self, objects: Mapping[str, bytes]) -> Module:
        return _Module(self, objects)

    def reaches(self, other: Device) -> bool:
        """Whether the driver lets this GPU read the other's memory; if so, access is enabled. The result is cached.

        True for the GPU itself, false for a device of another kind.
        """
        if other is self or not isinstance(other, CudaDevice):
            return other is self
        if other.name not in self._peers:
            self._peers[other.name] = self._enable_peer(other)
        return self._peers[other.name]

    def _enable_peer(self, other: CudaDevice) -> bool:
        try:
            if not self.call("cuDeviceCanAccessPeer", self._device, other._device):
                return False
            self.call("cuCtxEnablePeerAccess", other.context, 0)
        except DeviceError as error:
            return _KNOWN_PEERS in str(error)  # another library of this process has enabled it
        return True

    def library_version(self) -> int:
        return self._vendor_library.version if self._vendor_library is not None else 0

    @cached_property
    def _vendor_library(self) -> Library | None:
        """cuBLASLt, or None if it cannot be used; loaded on first use, because it is hundreds of megabytes."""
        self._enter()
        return open_library()

    def product(self, data: bytes) -> Product:
        """The cuBLASLt product whose spec is in `data`. ArtifactError if the library is missing or cannot be used."""
        spec = LibrarySpec.from_bytes(data)
        if self._vendor_library is None:
            raise ArtifactError(
                f"'{spec.summary}' needs NVIDIA's cuBLASLt, which was not found; compile the model again"
            )
        return Product(self._vendor_library, spec, self._enter)


@dataclass(frozen=True, slots=True)
class _Function:
    handle: Any
    threads: int
    shared_bytes: int


class _Module:
    """Loaded kernels by symbol, one driver module for each, because kernels are cached and shared one by one.

    Products of cuBLASLt need no module.
    """

    def __init__(self, device: CudaDevice, objects: Mapping[str, bytes]) -> None:
        self._device = device
        self._modules: list[Any] = []
        self._functions: dict[str, _Function | Product] = {}
        try:
            for symbol, data in objects.items():
                library = LibrarySpec.is_one(data)
                self._functions[symbol] = device.product(data) if library else self._load(Binary.from_bytes(data))
        except BaseException:
            self.close()
            raise

    def function(self, symbol: str) -> _Function | Product:
        return self._functions[symbol]

    def close(self) -> None:
        while self._functions:
            _, function = self._functions.popitem()
            if isinstance(function, Product):
                function.close()
        while self._modules:
            self._device.destroy("cuModuleUnload", self._modules.pop())

    def _load(self, binary: Binary) -> _Function:
        call = self._device.call
        module = call("cuModuleLoadData", self._image(binary))
        self._modules.append(module)
        handle = call("cuModuleGetFunction", module, binary.symbol.encode())
        if binary.shared_bytes > _PLAIN_SHARED:
            attributes = self._device.driver.module.CUfunction_attribute
            most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", handle, most, binary.shared_bytes)
        return _Function(handle, binary.warps * _WARP, binary.shared_bytes)

    def _image(self, binary: Binary) -> bytes:
        """What the driver loads: the machine code if it is of this GPU's major architecture; otherwise the PTX.

        ArtifactError if the kernel was compiled for a newer GPU, or is of another major architecture and has no PTX.
        """
        mine = self._device.target.arch
        same = binary.arch // 10 == mine // 10
        if binary.arch > mine or not (same or binary.ptx):
            raise ArtifactError(f"a kernel was compiled for sm_{binary.arch}, {self._device.name} is sm_{mine}")
        return binary.cubin if same else binary.ptx.encode() + b"\0"


@dataclass(eq=False)
class _Event:
    device: CudaDevice
    handle: Any

    def synchronize(self) -> None:
        self.device.call("cuEventSynchronize", self.handle)

    def since(self, other: Event) -> int:
        return round(self.device.call("cuEventElapsedTime", _handle(other, _Event), self.handle) * 1e6)

    def close(self) -> None:
        self.device.destroy("cuEventDestroy", self.handle)


@dataclass(eq=False)
class _Graph:
    device: CudaDevice
    handle: Any

    def close(self) -> None:
        """Destroy the graph; the driver frees one that is still running when it has ended."""
        self.device.destroy("cuGraphExecDestroy", self.handle)


@dataclass(eq=False)
class _Stream:
    device: CudaDevice
    handle: Any

    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        self.device.call("cuMemcpyHtoDAsync", address, source, nbytes, self.handle)

    def copy_out(self, target: int, address: int, nbytes: int) -> None:
        self.device.call("cuMemcpyDtoHAsync", target, address, nbytes, self.handle)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self.device.call("cuMemcpyDtoDAsync", target, source, nbytes, self.handle)

    def copy_from(self, target: int, other: Device, source: int, nbytes: int) -> None:
        if not isinstance(other, CudaDevice):
            raise TypeError(f"{other.name} is another kind of device")
        if other is self.device:
            self.copy(target, source, nbytes)
        else:
            contexts = (self.device.context, other.context)
            self.device.call("cuMemcpyPeerAsync", target, contexts[0], source, contexts[1], nbytes, self.handle)

    def launch(self, function: _Function | Product, grid: Grid, addresses: Sequence[int], n: int) -> None:
        """Launch a kernel with the addresses, `n`, and two arguments that Triton would use for scratch memory.

        Each argument has a 64-bit word, of which an int32 is the first half (all machines with GPUs are little-endian).
        """
        if isinstance(function, Product):
            function.launch(int(self.handle), addresses, n)
            return
        words = np.array([*addresses, n, 0, 0], np.uint64)
        places = address_of(words) + 8 * np.arange(len(words), dtype=np.uint64)
        self.device.call(
            "cuLaunchKernel", function.handle, *grid, function.threads, 1, 1, function.shared_bytes, self.handle,
            address_of(places), 0,
        )  # fmt: skip

    def record(self, event: Event) -> None:
        self.device.call("cuEventRecord", _handle(event, _Event), self.handle)

    def wait(self, event: Event) -> None:
        self.device.call("cuStreamWaitEvent", self.handle, _handle(event, _Event), 0)

    def synchronize(self) -> None:
        self.device.call("cuStreamSynchronize", self.handle)

    def capture(self, work: Callable[[], None]) -> Graph:
        """The work that `work` submits to this stream, as a graph that can be replayed.

        The capture is thread-local: only this thread must avoid calls that capturing forbids; others still allocate and
        copy.
        """
        call, module = self.device.call, self.device.driver.module
        call("cuStreamBeginCapture", self.handle, module.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            work()
        except BaseException:
            with suppress(DeviceError):  # a failed capture raises again here, which would hide the first error
                call("cuGraphDestroy", call("cuStreamEndCapture", self.handle))
            raise
        graph = call("cuStreamEndCapture", self.handle)
        try:
            return _Graph(self.device, call("cuGraphInstantiate", graph, 0))
        finally:
            call("cuGraphDestroy", graph)

    def replay(self, graph: Graph) -> None:
        self.device.call("cuGraphLaunch", _handle(graph, _Graph), self.handle)

    def close(self) -> None:
        self.device.destroy("cuStreamDestroy", self.handle)


def _handle(given: object, kind: type[_Event] | type[_Graph]) -> Any:
    if not isinstance(given, kind):
        raise TypeError(f"{given} belongs to another kind of device")
    return given.handle
