"""A fake of NVIDIA's driver bindings over host memory: every call is checked and recorded.

Functions have the names, parameters and answers of `cuda.bindings.driver` (test_bindings.py compares them where that is
installed). Module images hold reference operators, so launches really compute. Work is done at once; the order of
streams is tested with the simulated device.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np

from lathe.core.codegen.object_cache import ObjectCache
from lathe.core.kernels.call import KernelSpec
from lathe.core.kernels.cuda import Binary
from lathe.core.kernels.gemm.cublaslt_spec import LibrarySpec
from lathe.core.kernels.reference.cpu import ReferenceKernel, object_of
from lathe.core.kernels.target import GpuTarget
from lathe.core.runtime.device.cuda import CudaDevice
from lathe.core.runtime.device.cuda_driver import Driver
from lathe.core.runtime.host.memory import array_at

ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 8, "COMPUTE_CAPABILITY_MINOR": 6, "MULTIPROCESSOR_COUNT": 46,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 101376, "CLOCK_RATE": 1_700_000, "MEMORY_CLOCK_RATE": 7_000_000,
    "GLOBAL_MEMORY_BUS_WIDTH": 256, "L2_CACHE_SIZE": 4096,
}  # fmt: skip
WARPS, SHARED = 4, 64 << 10


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704


class CUstreamCaptureMode(IntEnum):
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1


class CUfunction_attribute(IntEnum):
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class CUdevice_attribute:
    """The device attributes under the names of the bindings."""


for _name in ATTRIBUTES:
    setattr(CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{_name}", _name)


@dataclass(eq=False)
class Handle:
    """A handle of any object of the driver; `alive` until it is destroyed.

    `captured`: the work of the capture that a stream takes part in, or in which an event was recorded, then in the
    stream `recorded`. A stream that has joined a capture is `pending` until the capture's own stream waits for it.
    """

    kind: str
    content: Any = None
    alive: bool = True
    captured: list[Callable[[], None]] | None = None
    recorded: Handle | None = None
    pending: bool = False

    def __int__(self) -> int:
        """The handle as a number, as the handles of the bindings convert to one."""
        return id(self)


@dataclass
class FakeDriver:
    """A driver over host memory. `failing` maps names of calls to the code that they return."""

    total: int = 1 << 20
    count: int = 1  # number of GPUs; all of them share this memory
    peers: bool = True  # whether the GPUs can access each other's memory
    failing: dict[str, CUresult] = field(default_factory=dict)
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    memory: dict[int, Any] = field(default_factory=dict)
    pinned: dict[int, Any] = field(default_factory=dict)
    handles: list[Handle] = field(default_factory=list)
    context: Any = None

    CUresult = CUresult
    CUstreamCaptureMode = CUstreamCaptureMode
    CUfunction_attribute = CUfunction_attribute
    CUdevice_attribute = CUdevice_attribute

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu") or name.startswith("cuGetError"):
            return found

        def recorded(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return (self.failing[name],) if name in self.failing else found(*arguments)

        return recorded

    @property
    def alive(self) -> Counter[str]:
        """The handles that were created and not destroyed."""
        kinds = Counter(handle.kind for handle in self.handles if handle.alive and handle.kind != "context")
        return kinds + Counter(memory=len(self.memory), pinned=len(self.pinned))

    # -- devices and contexts

    def cuInit(self, Flags: int) -> Any:
        return _ok()

    def cuGetErrorName(self, error: CUresult) -> Any:
        return _ok(error.name.encode())

    def cuGetErrorString(self, error: CUresult) -> Any:
        return _ok(b"as the test wants it")

    def cuDeviceGetCount(self) -> Any:
        return _ok(self.count)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return _ok(ordinal)

    def cuDeviceGetAttribute(self, attrib: str, dev: int) -> Any:
        return _ok(ATTRIBUTES[attrib])

    def cuDevicePrimaryCtxRetain(self, dev: int) -> Any:
        return _ok(self._made("context"))

    def cuDevicePrimaryCtxReset(self, dev: int) -> Any:
        """Destroy everything that was made in the context."""
        for handle in self.handles:
            handle.alive = False
        self.memory.clear()
        self.pinned.clear()
        return _ok()

    def cuCtxSetCurrent(self, ctx: Handle) -> Any:
        self.context = _alive(ctx, "context")
        return _ok()

    def cuDeviceCanAccessPeer(self, dev: int, peerDev: int) -> Any:
        assert dev != peerDev
        return _ok(int(self.peers))

    def cuCtxEnablePeerAccess(self, peerContext: Handle, Flags: int) -> Any:
        assert _alive(peerContext, "context") is not self.context and Flags == 0
        return _ok()

    # -- memory

    def cuMemGetInfo(self) -> Any:
        return _ok(self._free(), self.total)

    def cuMemAlloc(self, bytesize: int) -> Any:
        assert bytesize > 0 and self.context is not None
        if bytesize > self._free():
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        return _ok(_allocated(self.memory, bytesize))

    def cuMemFree(self, dptr: int) -> Any:
        del self.memory[dptr]
        return _ok()

    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> Any:
        assert bytesize > 0 and Flags == 1
        return _ok(_allocated(self.pinned, bytesize))

    def cuMemFreeHost(self, p: int) -> Any:
        del self.pinned[p]
        return _ok()

    def cuMemcpyHtoDAsync(self, dstDevice: int, srcHost: int, ByteCount: int, hStream: Handle) -> Any:
        _inside(self.memory, dstDevice, ByteCount), _inside(self.pinned, srcHost, ByteCount)
        return self._give(hStream, lambda: ctypes.memmove(dstDevice, srcHost, ByteCount))

    def cuMemcpyDtoHAsync(self, dstHost: int, srcDevice: int, ByteCount: int, hStream: Handle) -> Any:
        _inside(self.pinned, dstHost, ByteCount), _inside(self.memory, srcDevice, ByteCount)
        return self._give(hStream, lambda: ctypes.memmove(dstHost, srcDevice, ByteCount))

    def cuMemcpyDtoDAsync(self, dstDevice: int, srcDevice: int, ByteCount: int, hStream: Handle) -> Any:
        _inside(self.memory, dstDevice, ByteCount), _inside(self.memory, srcDevice, ByteCount)
        return self._give(hStream, lambda: ctypes.memmove(dstDevice, srcDevice, ByteCount))

    def cuMemcpyPeerAsync(
        self, dstDevice: int, dstContext: Handle, srcDevice: int, srcContext: Handle, ByteCount: int, hStream: Handle
    ) -> Any:
        _alive(dstContext, "context"), _alive(srcContext, "context")
        _inside(self.memory, dstDevice, ByteCount), _inside(self.memory, srcDevice, ByteCount)
        return self._give(hStream, lambda: ctypes.memmove(dstDevice, srcDevice, ByteCount))

    # -- streams and events

    def cuStreamCreate(self, Flags: int) -> Any:
        assert Flags == 1
        return _ok(self._made("stream"))

    def cuStreamDestroy(self, hStream: Handle) -> Any:
        return self._destroyed(hStream, "stream")

    def cuStreamSynchronize(self, hStream: Handle) -> Any:
        _alive(hStream, "stream")
        return _ok()

    def cuStreamWaitEvent(self, hStream: Handle, hEvent: Handle, Flags: int) -> Any:
        assert _alive(hEvent, "event").content is not None and Flags == 0
        if hEvent.recorded is not None:
            hEvent.recorded.pending = False
        if hStream.captured is None and hEvent.captured is not None:
            hStream.captured = hEvent.captured
        assert hStream.captured is hEvent.captured, "the event belongs to another capture"
        return self._give(hStream, lambda: None)

    def cuEventCreate(self, Flags: int) -> Any:
        assert Flags in (0, 2)
        return _ok(self._made("event"))

    def cuEventDestroy(self, hEvent: Handle) -> Any:
        return self._destroyed(hEvent, "event")

    def cuEventRecord(self, hEvent: Handle, hStream: Handle) -> Any:
        _alive(hEvent, "event").content = len(self.calls)
        hEvent.captured, hEvent.recorded = hStream.captured, hStream
        return self._give(hStream, lambda: None)

    def cuEventSynchronize(self, hEvent: Handle) -> Any:
        assert _alive(hEvent, "event").content is not None
        return _ok()

    def cuEventElapsedTime(self, hStart: Handle, hEnd: Handle) -> Any:
        return _ok((hEnd.content - hStart.content) / 1000)  # milliseconds: a microsecond for every call between

    # -- kernels and graphs

    def cuModuleLoadData(self, image: bytes) -> Any:
        return _ok(self._made("module", ReferenceKernel(image)))

    def cuModuleUnload(self, hmod: Handle) -> Any:
        return self._destroyed(hmod, "module")

    def cuModuleGetFunction(self, hmod: Handle, name: bytes) -> Any:
        assert name.startswith(b"lathe_")
        return _ok(_alive(hmod, "module").content)

    def cuFuncSetAttribute(self, hfunc: ReferenceKernel, attrib: CUfunction_attribute, value: int) -> Any:
        assert value == SHARED
        return _ok()

    def cuLaunchKernel(
        self, f: ReferenceKernel, gridDimX: int, gridDimY: int, gridDimZ: int, blockDimX: int, blockDimY: int,
        blockDimZ: int, sharedMemBytes: int, hStream: Handle, kernelParams: int, extra: int,
    ) -> Any:  # fmt: skip
        """Copy the arguments at once, since the caller reuses their memory."""
        assert (blockDimX, blockDimY, blockDimZ, sharedMemBytes, extra) == (32 * WARPS, 1, 1, SHARED, 0)
        grid, count = (gridDimX, gridDimY, gridDimZ), f.operands
        assert min(grid) >= 1
        places = array_at(kernelParams, np.dtype(np.uint64), (count + 3,))
        *addresses, _, scratch, profile = (ctypes.c_uint64.from_address(int(place)).value for place in places)
        n = ctypes.c_int32.from_address(int(places[count])).value
        assert scratch == profile == 0
        for address in addresses:
            _inside(self.memory, address, 1)
        return self._give(hStream, lambda: f.run(grid, addresses, n, lambda at, size: _inside(self.memory, at, size)))

    def cuStreamBeginCapture(self, hStream: Handle, mode: CUstreamCaptureMode) -> Any:
        assert mode is CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _alive(hStream, "stream").captured = []
        return _ok()

    def cuStreamEndCapture(self, hStream: Handle) -> Any:
        work = _alive(hStream, "stream").captured
        for other in self.handles:
            if other.captured is work:
                assert other is hStream or not other.pending, "a stream was not joined to its capture"
                other.captured = other.recorded = None
        return _ok(self._made("graph", work))

    def cuGraphInstantiate(self, hGraph: Handle, flags: int) -> Any:
        return _ok(self._made("executable graph", list(_alive(hGraph, "graph").content)))

    def cuGraphDestroy(self, hGraph: Handle) -> Any:
        return self._destroyed(hGraph, "graph")

    def cuGraphExecDestroy(self, hGraphExec: Handle) -> Any:
        return self._destroyed(hGraphExec, "executable graph")

    def cuGraphLaunch(self, hGraphExec: Handle, hStream: Handle) -> Any:
        for work in _alive(hGraphExec, "executable graph").content:
            self._give(hStream, work)
        return _ok()

    # -- shared by all calls

    def _made(self, kind: str, content: Any = None) -> Handle:
        self.handles.append(Handle(kind, content))
        return self.handles[-1]

    def _destroyed(self, handle: Handle, kind: str) -> Any:
        _alive(handle, kind).alive = False
        return _ok()

    def _give(self, stream: Handle, work: Callable[[], object]) -> Any:
        captured = _alive(stream, "stream").captured
        if captured is not None:
            stream.pending = True
            captured.append(lambda: (work(), None)[1])
        else:
            work()
        return _ok()

    def _free(self) -> int:
        return self.total - sum(block.nbytes for block in self.memory.values())


def _ok(*results: Any) -> tuple[Any, ...]:
    return (CUresult.CUDA_SUCCESS, *results)


def _alive(handle: Handle, kind: str) -> Handle:
    assert isinstance(handle, Handle) and handle.kind == kind and handle.alive, f"no {kind}: {handle}"
    return handle


def _allocated(blocks: dict[int, Any], nbytes: int) -> int:
    block = np.full(nbytes + 256, 0xFF, np.uint8)
    address = block.ctypes.data + -block.ctypes.data % 256
    blocks[address] = block[address - block.ctypes.data :][:nbytes]
    return address


def _inside(blocks: dict[int, Any], address: int, nbytes: int) -> Any:
    for start, block in blocks.items():
        if start <= address and address + nbytes <= start + block.nbytes:
            return block[address - start :][:nbytes]
    raise AssertionError(f"{nbytes} bytes at {address:#x} are not allocated")


class FakeGpu(CudaDevice):
    """The product's device over the fake driver; only the code of kernels differs."""

    def __init__(self, driver: FakeDriver, arch: int | None = None, index: int = 0) -> None:
        self.fake, self._arch = driver, arch
        super().__init__(Driver(driver), index)

    def _target(self) -> GpuTarget:
        found = super()._target()
        return replace(found, device="simulated", arch=self._arch or found.arch)

    def prepare(self, specs: Iterable[KernelSpec], cache: ObjectCache | None) -> None:
        """Compile nothing: reference operators need no compiler."""

    def code(self, spec: KernelSpec, cache: ObjectCache | None = None) -> bytes:
        if isinstance(spec, LibrarySpec):
            return super().code(spec, cache)
        return Binary(spec.symbol, 80, WARPS, SHARED, object_of(spec), object_of(spec).decode()).to_bytes()
