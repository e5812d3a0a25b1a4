"""The gRPC server beside the HTTP one, on the same event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError

from server.access.authority import Authority
from server.access.nearest import hinted
from server.access.scopes import CALLS, Scope
from server.api.grpc.accessed import Accessed
from server.api.grpc.calls import RESERVE, Calls
from server.api.grpc.connections import Connections
from server.api.grpc.entrance import Entrance
from server.api.grpc.gate import Gate
from server.api.grpc.health import WATCHERS, HealthService
from server.api.grpc.messages import HEALTH, INFERENCE, Message, message_class
from server.api.grpc.sent import glance
from server.api.grpc.service import InferenceService, Parts
from server.api.grpc.status import errors_as_status
from server.api.received import DOCUMENT
from server.errors import BadRequest, ServerError, TooLarge, UnknownModel
from server.settings import Settings
from server.telemetry.access import AccessLog

ENDING = 2 * RESERVE  # calls of health beyond the limit, and those that have just made room
CROWDED = RESERVE  # connections beyond the limit, until one is seen to be idle
LONGEST = 2**31 - 1  # milliseconds

Read: TypeAlias = Callable[[bytes], Any]
Permit: TypeAlias = Callable[[Any, Any], None]  # of a message and its call's context; raises

log = logging.getLogger("lathe.api")


class GrpcEndpoint:
    """Listens from :meth:`start` on; :meth:`stop` ends it as gracefully as the settings' drain time allows."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._server: Any = None
        self._calls = Calls(parts.settings.max_connections, parts.settings.connections_each)
        self.connections = Connections(parts.settings.max_connections, parts.settings.connections_each)
        self._stopping = asyncio.Event()
        self._stopped: asyncio.Future[None] | None = None
        self.port = 0  # set once it listens

    async def start(self) -> None:
        """Listen; raises RuntimeError when the address is taken."""
        settings = self._parts.settings
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=settings.max_connections + ENDING,  # whose they are is looked at in Calls
            options=list(options(settings).items()),
        )
        authority = self._parts.plane.authority
        entrance = Entrance(self._calls, self.connections, authority, settings)
        inference = InferenceService(self._parts, self._stopping)
        health = HealthService(
            self._parts.plane, self._stopping, watchers=min(WATCHERS, share_of(settings.max_connections))
        )
        self._server.add_generic_rpc_handlers(
            tuple(
                _handlers(file, methods, authority, self._parts.access, entrance)
                for file, methods in ((INFERENCE, inference), (HEALTH, health))
            )
        )
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        credentials, address = _credentials(settings), f"{host}:{settings.grpc_port}"
        if credentials:
            self.port = self._server.add_secure_port(address, credentials)
        else:
            self.port = self._server.add_insecure_port(address)
        await self._server.start()
        self._calls.start()
        self.connections.start(self.port)
        log.info("gRPC on %s:%d", host, self.port)

    async def stop(self) -> None:
        """Take no more calls, end idle streams, wait for those at work; may be called twice."""
        if self._stopped is None:
            self._stopping.set()
            self._calls.stop()
            self.connections.stop()
            self._stopped = asyncio.ensure_future(self._server.stop(self._parts.settings.drain_timeout))
        await asyncio.shield(self._stopped)


def options(settings: Settings) -> dict[str, int]:
    """Return gRPC's options; those of connections have Triton's meanings."""
    found = {
        "grpc.max_receive_message_length": settings.max_body,
        "grpc.max_metadata_size": settings.max_header,
        "grpc.max_concurrent_streams": share_of(settings.max_connections),
        "grpc.so_reuseport": 0,  # else a second server would silently take half of the calls
        "grpc.max_allowed_incoming_connections": settings.max_connections + CROWDED,  # see Connections
        "grpc.server_handshake_timeout_ms": _ms(settings.header_timeout),
        "grpc.max_connection_idle_ms": _ms(settings.keep_alive),
        "grpc.keepalive_time_ms": _ms(settings.grpc_keepalive_time),
        "grpc.keepalive_timeout_ms": _ms(settings.grpc_keepalive_timeout),
        "grpc.max_connection_age_grace_ms": _ms(settings.grpc_max_connection_age_grace),
    }
    if settings.grpc_max_connection_age is not None:
        found["grpc.max_connection_age_ms"] = _ms(settings.grpc_max_connection_age)
    return found


def _ms(seconds: float) -> int:
    return min(int(seconds * 1000), LONGEST)


def share_of(calls: int) -> int:
    """Return how many of all calls at once may be one connection's, or streams of health."""
    return max(1, calls // 4)


def _credentials(settings: Settings) -> Any:
    """The certificate as gRPC wants it, None without one."""
    if settings.tls_cert is None:
        return None
    clients = settings.tls_client_ca.read_bytes() if settings.tls_client_ca else None
    pair = ((settings.tls_key or settings.tls_cert).read_bytes(), settings.tls_cert.read_bytes())
    return grpc.ssl_server_credentials([pair], clients, clients is not None)


def _handlers(
    file: FileDescriptor, methods: object, authority: Authority, access: AccessLog, entrance: Entrance
) -> Any:
    """Connect the file's one service with the methods of the same names."""
    (service,) = file.services_by_name.values()
    accessed = Accessed(access) if access.errors else None
    found = {
        method.name: _handler(
            method,
            _hinting(getattr(methods, method.name), authority),
            _permission(method.name, authority),
            accessed,
            entrance,
        )
        for method in service.methods
    }
    return Gate(grpc.method_handlers_generic_handler(service.full_name, found), authority, accessed)


def _hinting(call: Callable[..., Any], authority: Authority) -> Callable[..., Any]:
    """Wrap a call: the error of an unknown model names the nearest that the caller may read."""
    if inspect.isasyncgenfunction(call):
        return call  # inference, whose errors are answers; see `DataPlane.route`

    @functools.wraps(call)
    async def hinting(message: Any, context: Any) -> Message:
        try:
            return await call(message, context)
        except UnknownModel as error:
            raise hinted(error, authority.caller(_shown(context))) from None

    return hinting


def _shown(context: Any) -> str:
    shown: str = dict(context.invocation_metadata() or ()).get("authorization", "")
    return shown


def _permission(call: str, authority: Authority) -> Permit:
    """Return the check of one call; inference is checked where it is routed, message by message."""
    need, of_all = CALLS[call], "SharedMemory" in call  # whose names are no models'

    def permit(message: Any, context: Any) -> None:
        if need is not None and need is not Scope.INFER:
            authority.check(_shown(context), need, "" if of_all else _model_of(message))

    return permit


def _model_of(message: Any) -> str:
    return getattr(message, "model_name", "") or getattr(message, "name", "")


def _handler(
    method: Any, call: Callable[..., Any], permit: Permit, accessed: Accessed | None, entrance: Entrance
) -> Any:
    """Wrap a method; messages are read in here, so that what is none is refused like any other bad request."""
    write = _writer(message_class(method.output_type))
    infers, path = CALLS[method.name] is Scope.INFER, f"/{method.containing_service.full_name}/{method.name}"
    read = _as_it_is if infers else _reader(message_class(method.input_type))
    if not method.server_streaming:
        answer = _unary(read, call, permit)
        if accessed is not None:
            answer = accessed.unary(answer, path, entered(_named if infers else read), not infers)
        return grpc.stream_unary_rpc_method_handler(entrance.unary(answer, method.name), None, write)
    stream = _streaming(functools.partial(_each, read) if method.client_streaming else read, call, permit)
    if accessed is not None:
        stream = accessed.streaming(stream, path)
    taken = entrance.streaming(stream, method.name, one=not method.client_streaming)
    return grpc.stream_stream_rpc_method_handler(taken, None, write)


def _reader(kind: Any) -> Read:
    def read(data: bytes) -> Message:
        if len(data) > DOCUMENT:
            raise TooLarge(f"message: expected at most {DOCUMENT} bytes, got {len(data)}")
        try:
            return kind.FromString(data)
        except DecodeError:
            raise BadRequest(f"message: expected {kind.DESCRIPTOR.full_name}, got bytes that are none") from None

    return read


def _writer(kind: Any) -> Callable[[Any], bytes]:
    """Inference has its answers written already, beside the event loop where they are large."""

    def write(message: Any) -> bytes:
        return message if isinstance(message, bytes) else kind.SerializeToString(message)

    return write


def _as_it_is(data: Any) -> Any:
    """Inference reads its messages itself, as it may have to wait for a thread."""
    return data


def _named(data: bytes) -> Message | None:
    """Return a request of inference, for what a line of the log says of it; None where that would take long."""
    sent = glance(data)
    return sent.message if sent is not None else None


async def _each(read: Read, requests: AsyncIterator[bytes]) -> AsyncIterator[Message]:
    async for data in requests:
        yield read(data)


def entered(read: Callable[[Any], Message | None]) -> Callable[[Any], Message | None]:
    """Return what reads a message only if one was received."""
    return lambda request: None if isinstance(request, ServerError) else read(request)


def _unary(read: Read, call: Callable[..., Any], permit: Permit) -> Callable[..., Any]:
    async def answer(request: bytes | ServerError, context: Any) -> Message:
        async with errors_as_status(context):
            if isinstance(request, ServerError):
                raise request
            message = read(request)
            permit(message, context)
            return await call(message, context)

    return answer


def _streaming(read: Callable[[Any], Any], call: Callable[..., Any], permit: Permit) -> Callable[..., Any]:
    async def answer(request: Any, context: Any) -> AsyncIterator[Message]:
        async with errors_as_status(context):
            if isinstance(request, ServerError):
                raise request
            asked = read(request)
            permit(asked, context)
            async for message in call(asked, context):
                yield message

    return answer
