"""The shared memory calls: system shared memory is supported, CUDA shared memory is not."""

from __future__ import annotations

from typing import Any

from lathe.server.api.grpc.messages import INFERENCE, Message, message_class
from lathe.server.api.v2.shared_memory import NO_CUDA
from lathe.server.errors import NotFound, Unsupported
from lathe.server.shared_memory import Regions


class SharedMemoryCalls:
    """The shared memory part of the service, one method per call."""

    _regions: Regions

    async def SystemSharedMemoryStatus(self, request: Message, context: Any) -> Message:
        """The registered region that the message names, or all regions without a name."""
        found = {region["name"]: region for region in self._regions.status(request.name)}
        return _message("SystemSharedMemoryStatusResponse", regions=found)

    async def SystemSharedMemoryRegister(self, request: Message, context: Any) -> Message:
        """Register the region that the message describes; the answer is an empty message."""
        self._regions.register(request.name, request.key, request.offset, request.byte_size)
        return _message("SystemSharedMemoryRegisterResponse")

    async def SystemSharedMemoryUnregister(self, request: Message, context: Any) -> Message:
        """Unregister the region that the message names, or all regions without a name; the answer is empty."""
        self._regions.unregister(request.name)
        return _message("SystemSharedMemoryUnregisterResponse")

    async def CudaSharedMemoryStatus(self, request: Message, context: Any) -> Message:
        """Return an empty list of regions; NotFound if the message names one."""
        if request.name:
            raise NotFound(f"unknown region of CUDA shared memory {request.name[:80]!r}")
        return _message("CudaSharedMemoryStatusResponse")

    async def CudaSharedMemoryRegister(self, request: Message, context: Any) -> Message:
        """Raise Unsupported: there is no CUDA shared memory."""
        raise Unsupported(NO_CUDA)

    async def CudaSharedMemoryUnregister(self, request: Message, context: Any) -> Message:
        """Do nothing, since there are no regions; the answer is an empty message."""
        return _message("CudaSharedMemoryUnregisterResponse")


def _message(name: str, **fields: Any) -> Message:
    return message_class(INFERENCE.message_types_by_name[name])(**fields)
