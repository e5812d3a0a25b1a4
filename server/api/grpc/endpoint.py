"""The gRPC server beside the HTTP one, on the same event loop."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError

from server.api.grpc.health import HealthService
from server.api.grpc.messages import HEALTH, INFERENCE, Message, message_class
from server.api.grpc.service import InferenceService, Parts
from server.api.grpc.status import errors_as_status
from server.errors import BadRequest

Read: TypeAlias = Callable[[bytes], Message]

log = logging.getLogger("lathe.api")


class GrpcEndpoint:
    """Listens from :meth:`start` on; :meth:`stop` ends it as gracefully as the settings' drain time allows."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._server: Any = None
        self._stopping = asyncio.Event()
        self._stopped: asyncio.Future[None] | None = None
        self.port = 0  # set once it listens

    async def start(self) -> None:
        """Listen; raises RuntimeError when the address is taken."""
        settings = self._parts.settings
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=settings.max_connections,
            options=[
                ("grpc.max_receive_message_length", settings.max_body),
                ("grpc.max_metadata_size", settings.max_header),
                ("grpc.so_reuseport", 0),  # else a second server would silently take half of the calls
            ],
        )
        inference = InferenceService(self._parts, self._stopping)
        health = HealthService(self._parts.plane, self._stopping)
        self._server.add_generic_rpc_handlers((_handlers(INFERENCE, inference), _handlers(HEALTH, health)))
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.port = self._server.add_insecure_port(f"{host}:{settings.grpc_port}")
        await self._server.start()
        log.info("gRPC on %s:%d", host, self.port)

    async def stop(self) -> None:
        """Take no more calls, end idle streams, wait for those at work; may be called twice."""
        if self._stopped is None:
            self._stopping.set()
            self._stopped = asyncio.ensure_future(self._server.stop(self._parts.settings.drain_timeout))
        await asyncio.shield(self._stopped)


def _handlers(file: FileDescriptor, methods: object) -> Any:
    """Connect the file's one service with the methods of the same names."""
    (service,) = file.services_by_name.values()
    found = {method.name: _handler(method, getattr(methods, method.name)) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, found)


def _handler(method: Any, call: Callable[..., Any]) -> Any:
    """Wrap a method; messages are read in here, so that what is none is refused like any other bad request."""
    write = message_class(method.output_type).SerializeToString
    read = _reader(message_class(method.input_type))
    if not method.server_streaming:
        return grpc.unary_unary_rpc_method_handler(_unary(read, call), None, write)
    if not method.client_streaming:
        return grpc.unary_stream_rpc_method_handler(_streaming(read, call), None, write)
    return grpc.stream_stream_rpc_method_handler(_streaming(functools.partial(_each, read), call), None, write)


def _reader(kind: Any) -> Read:
    def read(data: bytes) -> Message:
        try:
            return kind.FromString(data)
        except DecodeError:
            raise BadRequest(f"message: expected {kind.DESCRIPTOR.full_name}, got bytes that are none") from None

    return read


async def _each(read: Read, requests: AsyncIterator[bytes]) -> AsyncIterator[Message]:
    async for data in requests:
        yield read(data)


def _unary(read: Read, call: Callable[..., Any]) -> Callable[..., Any]:
    async def answer(request: bytes, context: Any) -> Message:
        async with errors_as_status(context):
            return await call(read(request), context)

    return answer


def _streaming(read: Callable[[Any], Any], call: Callable[..., Any]) -> Callable[..., Any]:
    async def answer(request: Any, context: Any) -> AsyncIterator[Message]:
        async with errors_as_status(context):
            async for message in call(read(request), context):
                yield message

    return answer
