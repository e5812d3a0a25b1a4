"""The calls about regions of shared memory; of CUDA's there never are any."""

from __future__ import annotations

from typing import Any

from server.api.grpc.messages import INFERENCE, Message, message_class
from server.api.sharedmemory import NO_CUDA
from server.errors import NotFound, Unsupported
from server.regions import Regions


class SharedMemoryCalls:
    """A part of the service, a method per call."""

    _regions: Regions

    async def SystemSharedMemoryStatus(self, request: Message, context: Any) -> Message:
        """What is registered, or one region."""
        found = {region["name"]: region for region in self._regions.status(request.name)}
        return _message("SystemSharedMemoryStatusResponse", regions=found)

    async def SystemSharedMemoryRegister(self, request: Message, context: Any) -> Message:
        """Open a region."""
        self._regions.register(request.name, request.key, request.offset, request.byte_size)
        return _message("SystemSharedMemoryRegisterResponse")

    async def SystemSharedMemoryUnregister(self, request: Message, context: Any) -> Message:
        """Close a region, or all of them."""
        self._regions.unregister(request.name)
        return _message("SystemSharedMemoryUnregisterResponse")

    async def CudaSharedMemoryStatus(self, request: Message, context: Any) -> Message:
        """There is none."""
        if request.name:
            raise NotFound(f"unknown region of CUDA's shared memory {request.name[:80]!r}")
        return _message("CudaSharedMemoryStatusResponse")

    async def CudaSharedMemoryRegister(self, request: Message, context: Any) -> Message:
        """Refused."""
        raise Unsupported(NO_CUDA)

    async def CudaSharedMemoryUnregister(self, request: Message, context: Any) -> Message:
        """None is left."""
        return _message("CudaSharedMemoryUnregisterResponse")


def _message(name: str, **fields: Any) -> Message:
    return message_class(INFERENCE.message_types_by_name[name])(**fields)
