"""The gRPC server, on the same event loop as the HTTP server."""

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

from lathe.server.access.authority import Authority
from lathe.server.access.scopes import GRPC_CHANGES, GRPC_METHODS, Scope
from lathe.server.access.suggestions import with_suggestion
from lathe.server.api.grpc.access_log import CallLogging
from lathe.server.api.grpc.call_admission import CallAdmission
from lathe.server.api.grpc.calls import RESERVE, Calls
from lathe.server.api.grpc.connections import Connections
from lathe.server.api.grpc.early_authorization import EarlyAuthorization
from lathe.server.api.grpc.health import WATCHERS, HealthService
from lathe.server.api.grpc.messages import HEALTH, INFERENCE, Message, message_class
from lathe.server.api.grpc.service import InferenceService, ServiceContext
from lathe.server.api.grpc.split_message import split_small
from lathe.server.api.grpc.status import ErrorsAsStatus
from lathe.server.api.middleware.body_limits import MAX_DOCUMENT
from lathe.server.errors import BadRequest, ServerError, TooLarge, UnknownModel
from lathe.server.settings import Settings
from lathe.server.telemetry.access_log import AccessLog

EXTRA_CALLS = 2 * RESERVE  # calls beyond the limit: health checks, and calls that are being ended to make room
EXTRA_CONNECTIONS = RESERVE  # connections beyond the limit, until the next scan shuts some down
LONGEST = 2**31 - 1  # milliseconds; the largest value of gRPC's options

Read: TypeAlias = Callable[[bytes], Any]
Permit: TypeAlias = Callable[[Any, Any], None]  # of a message and the call's context; raises if it is not permitted

log = logging.getLogger("lathe.api")


class GrpcEndpoint:
    """The gRPC server: `start` listens, `stop` ends it gracefully within the setting `drain_timeout`."""

    def __init__(self, parts: ServiceContext) -> None:
        self._parts = parts
        self._server: Any = None
        self._calls = Calls(parts.settings.max_connections, parts.settings.connections_per_client)
        self.connections = Connections(parts.settings.max_connections, parts.settings.connections_per_client)
        self._stopping = asyncio.Event()
        self._stopped: asyncio.Future[None] | None = None
        self.port = 0  # set once it listens

    async def start(self) -> None:
        """Start to listen.

        RuntimeError if the address or certificate cannot be used, OSError if a TLS file cannot be read.
        """
        settings = self._parts.settings
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=settings.max_connections + EXTRA_CALLS,  # `Calls` limits the calls of each client
            options=list(options(settings).items()),
        )
        authority = self._parts.plane.authority
        entrance = CallAdmission(self._calls, self.connections, authority, settings)
        inference = InferenceService(self._parts, self._stopping)
        health = HealthService(
            self._parts.plane, self._stopping, watchers=min(WATCHERS, quarter_of(settings.max_connections))
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
        """Refuse new calls, end streams, and wait for running calls, which are cancelled after `drain_timeout`.

        May be called twice.
        """
        if self._stopped is None:
            self._stopping.set()
            self._calls.stop()
            self.connections.stop()
            self._stopped = asyncio.ensure_future(self._server.stop(self._parts.settings.drain_timeout))
        await asyncio.shield(self._stopped)


def options(settings: Settings) -> dict[str, int]:
    """The options of the gRPC server by name, from the settings; those of connections mean the same as in Triton."""
    found = {
        "grpc.max_receive_message_length": settings.max_body,
        "grpc.max_metadata_size": settings.max_header,
        "grpc.max_concurrent_streams": quarter_of(settings.max_connections),
        "grpc.so_reuseport": 0,  # otherwise a second server on the port would silently get half of the calls
        "grpc.max_allowed_incoming_connections": settings.max_connections + EXTRA_CONNECTIONS,  # see Connections
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


def quarter_of(calls: int) -> int:
    """A quarter of `calls`, at least 1: the limit of calls per connection, and of health watchers."""
    return max(1, calls // 4)


def _credentials(settings: Settings) -> Any:
    """gRPC's TLS credentials; None without a certificate."""
    if settings.tls_cert is None:
        return None
    clients = settings.tls_client_ca.read_bytes() if settings.tls_client_ca else None
    pair = ((settings.tls_key or settings.tls_cert).read_bytes(), settings.tls_cert.read_bytes())
    return grpc.ssl_server_credentials([pair], clients, clients is not None)


def _handlers(
    file: FileDescriptor, methods: object, authority: Authority, access: AccessLog, entrance: CallAdmission
) -> Any:
    """The gRPC handlers of the only service in `file`: each method is the attribute of `methods` with the same name.

    The methods are wrapped with authorization, suggestions, admission (`entrance`) and the access log unless it is off.
    """
    (service,) = file.services_by_name.values()
    accessed = CallLogging(access) if access.errors else None
    found = {
        method.name: _handler(
            method,
            _with_hints(getattr(methods, method.name), authority),
            _permission(method.name, authority),
            accessed,
            entrance,
        )
        for method in service.methods
    }
    return EarlyAuthorization(grpc.method_handlers_generic_handler(service.full_name, found), authority, accessed)


def _with_hints(call: Callable[..., Any], authority: Authority) -> Callable[..., Any]:
    """The call, but its errors for unknown models suggest the most similar name that the caller may read.

    Streaming calls are returned unchanged, because they answer errors themselves.
    """
    if inspect.isasyncgenfunction(call):
        return call  # streaming inference answers errors itself; see `DataPlane.route`

    @functools.wraps(call)
    async def hinting(message: Any, context: Any) -> Message:
        try:
            return await call(message, context)
        except UnknownModel as error:
            raise with_suggestion(error, authority.caller(_authorization(context))) from None

    return hinting


def _authorization(context: Any) -> str:
    authorization: str = dict(context.invocation_metadata() or ()).get("authorization", "")
    return authorization


def _permission(call: str, authority: Authority) -> Permit:
    """A function that raises Unauthorized or Forbidden for a message (and context) that its caller may not send.

    It checks nothing for methods that need no key, and for inference, which `DataPlane.route` checks for each message.
    """
    to_read, to_change = GRPC_METHODS[call], GRPC_CHANGES.get(call)
    names_region = "SharedMemory" in call  # the names in these messages are no models

    def permit(message: Any, context: Any) -> None:
        need = to_change if to_change is not None and message.settings else to_read
        if need is not None and need is not Scope.INFER:
            authority.check(_authorization(context), need, "" if names_region else _model_of(message))

    return permit


def _model_of(message: Any) -> str:
    return getattr(message, "model_name", "") or getattr(message, "name", "")


def _handler(
    method: Any, call: Callable[..., Any], permit: Permit, accessed: CallLogging | None, entrance: CallAdmission
) -> Any:
    """The gRPC handler of a method (its descriptor) that is answered by `call`, after `permit` has checked the message.

    It parses messages itself, so that an invalid message is answered with a BadRequest. No access log if `accessed` is
    None.
    """
    write = _writer(message_class(method.output_type))
    infers, path = GRPC_METHODS[method.name] is Scope.INFER, f"/{method.containing_service.full_name}/{method.name}"
    read = _unparsed if infers else _reader(message_class(method.input_type))
    if not method.server_streaming:
        answer = _unary(read, call, permit)
        if accessed is not None:
            answer = accessed.unary(answer, path, unless_refused(_parse_for_log if infers else read), not infers)
        return grpc.stream_unary_rpc_method_handler(entrance.unary(answer, method.name), None, write)
    stream = _streaming(functools.partial(_each, read) if method.client_streaming else read, call, permit)
    if accessed is not None:
        stream = accessed.streaming(stream, path)
    taken = entrance.streaming(stream, method.name, one=not method.client_streaming)
    return grpc.stream_stream_rpc_method_handler(taken, None, write)


def _reader(kind: Any) -> Read:
    def read(data: bytes) -> Message:
        if len(data) > MAX_DOCUMENT:
            raise TooLarge(f"message: expected at most {MAX_DOCUMENT} bytes, got {len(data)}")
        try:
            return kind.FromString(data)
        except DecodeError:
            raise BadRequest(f"message: expected {kind.DESCRIPTOR.full_name}, got bytes that do not parse") from None

    return read


def _writer(kind: Any) -> Callable[[Any], bytes]:
    """A function that serializes messages of the class `kind`; it returns bytes (inference answers) unchanged."""

    def write(message: Any) -> bytes:
        return message if isinstance(message, bytes) else kind.SerializeToString(message)

    return write


def _unparsed(data: Any) -> Any:
    """The message as bytes: inference parses it later, possibly on a thread."""
    return data


def _parse_for_log(data: bytes) -> Message | None:
    """The parsed inference request, for the access log; None if parsing takes long; BadRequest if invalid."""
    sent = split_small(data)
    return sent.message if sent is not None else None


async def _each(read: Read, requests: AsyncIterator[bytes]) -> AsyncIterator[Message]:
    async for data in requests:
        yield read(data)


def unless_refused(read: Callable[[Any], Message | None]) -> Callable[[Any], Message | None]:
    """A function like `read`, but None if it gets a ServerError: the call was refused before its message arrived."""
    return lambda request: None if isinstance(request, ServerError) else read(request)


def _unary(read: Read, call: Callable[..., Any], permit: Permit) -> Callable[..., Any]:
    async def answer(request: bytes | ServerError, context: Any) -> Message:
        async with ErrorsAsStatus(context):
            if isinstance(request, ServerError):
                raise request
            message = read(request)
            permit(message, context)
            return await call(message, context)

    return answer


def _streaming(read: Callable[[Any], Any], call: Callable[..., Any], permit: Permit) -> Callable[..., Any]:
    async def answer(request: Any, context: Any) -> AsyncIterator[Message]:
        async with ErrorsAsStatus(context):
            if isinstance(request, ServerError):
                raise request
            asked = read(request)
            permit(asked, context)
            async for message in call(asked, context):
                yield message

    return answer
