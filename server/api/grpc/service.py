"""The service `inference.GRPCInferenceService`; each call uses the same code as the HTTP route."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TypeAlias

from google.protobuf.json_format import ParseDict

from lathe.server.access.addresses import client_of_peer
from lathe.server.access.scopes import Scope
from lathe.server.api.codec.call_head import STICKY_KEY
from lathe.server.api.codec.reply import answered_error
from lathe.server.api.grpc import tensors
from lathe.server.api.grpc.access_log import REQUEST_ID
from lathe.server.api.grpc.message_reader import MessageReader
from lathe.server.api.grpc.messages import INFERENCE, Message, message_class
from lathe.server.api.grpc.shared_memory import SharedMemoryCalls
from lathe.server.api.inference.body_reader import BodyReader
from lathe.server.api.inference.infer import codec_of, deadline_of
from lathe.server.api.inference.reader_threads import INLINE_BYTES
from lathe.server.api.v2 import model_info
from lathe.server.api.v2.protocol_settings import TRACE_SETTINGS, LogSettings, update_trace
from lathe.server.api.v2.routes import RepositoryControl
from lathe.server.errors import BadRequest, NotFound, ServerError, Unavailable, Unsupported
from lathe.server.serving.dataplane import DataPlane
from lathe.server.settings import Settings
from lathe.server.telemetry.access_log import AccessLog
from lathe.server.telemetry.statistics import StatsBook

Metadata: TypeAlias = dict[str, Any]
SerializedMessage: TypeAlias = Message | bytes  # bytes: a serialized message


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """The objects that the calls use, shared with HTTP."""

    settings: Settings
    plane: DataPlane
    book: StatsBook
    control: RepositoryControl
    logs: LogSettings
    access: AccessLog
    reading: BodyReader


_PEER = ":peer"  # cannot collide with a caller's metadata, whose names begin with a letter


class InferenceService(SharedMemoryCalls):
    """One method per call, with its name in the .proto file; requests and answers are messages of that file.

    A method may raise any ServerError, which ends its call with a status (`ErrorsAsStatus`).
    """

    def __init__(self, parts: ServiceContext, stopping: asyncio.Event) -> None:
        self._parts = parts
        self._plane = parts.plane
        self._regions = parts.plane.regions
        self._reading = MessageReader(parts.reading, parts.plane)
        self._stopping = stopping

    # inference

    async def ModelInfer(self, request: bytes, context: Any) -> bytes:
        """Return the serialized answer of one serialized request, which is parsed here because it may be large.

        gRPC cancels this task when the caller cancels or the deadline of the call passes.
        """
        left = context.time_remaining()
        return await self._infer(request, _metadata(context), None if left is None else monotonic() + left)

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[SerializedMessage]:
        """Answer requests in order; later ones run meanwhile. An error of one request does not end the stream.

        When the server stops or the caller loses the right, the requests that were read are answered, and the stream
        ends with that error.
        """
        metadata = _metadata(context)
        infer = partial(self._infer, metadata=metadata, in_stream=True)
        refused = self._plane.authority.refused(metadata.get("authorization", ""), Scope.INFER)
        stream = _Stream(infer, requests, self._ending(refused), self._parts.settings.max_pipeline)
        try:
            async for response in stream.responses():
                yield response
        finally:
            stream.close()
        if stream.error is not None:
            raise stream.error

    async def _ending(self, refused: Coroutine[Any, Any, ServerError]) -> ServerError:
        """Wait until the server stops (Unavailable) or `refused` returns; returns the error that ends the stream.

        `refused` returns when the caller is no longer authorized (`Authority.refused`).
        """
        stopping, refusal = asyncio.ensure_future(self._stopping.wait()), asyncio.ensure_future(refused)
        try:
            await asyncio.wait([stopping, refusal], return_when=asyncio.FIRST_COMPLETED)
            return refusal.result() if refusal.done() else Unavailable("the server is stopping")
        finally:
            stopping.cancel()
            refusal.cancel()

    async def _infer(
        self, request: bytes, metadata: Metadata, deadline: float | None = None, in_stream: bool = False
    ) -> bytes:
        """Run one request and return its serialized answer, as a message of a stream if `in_stream`.

        `deadline` is the call's (monotonic seconds); the request's own timeout applies if it ends earlier.
        """
        key, authorization = metadata.get(STICKY_KEY, ""), metadata.get("authorization", "")
        address = metadata.get(_PEER, "")
        with self._parts.reading.ledger.claim(self._whose(authorization, address)) as claim:
            if len(request) > INLINE_BYTES:
                claim.add(len(request))
            sent = await self._reading.sent(request, claim.client)
            name, version = sent.message.model_name, sent.message.model_version
            servable, client = self._plane.route(name, version, key=key, authorization=authorization, address=address)
            codec = codec_of(servable, self._regions)
            head, inputs, paid, text = await self._reading.tensors(servable, codec, sent, claim, client)
        wanted = [at for at in (deadline, deadline_of(head)) if at is not None]
        deadline = min(wanted, default=None)
        trace = metadata.get("traceparent", "")
        name = head.id or metadata.get(REQUEST_ID, "")
        outputs = await self._plane.execute(
            servable, inputs, head.group, deadline, head.priority, trace, client, name, paid, text
        )
        return await self._reading.answer(codec, head, outputs, client, in_stream)

    def _whose(self, authorization: str, address: str) -> str:
        """The client of a request: the id of the caller's key, or `address` without a key; may raise Unauthorized."""
        caller = self._plane.authority.caller(authorization)
        return caller.key.id if caller.key else address

    # the server and its models

    async def ServerLive(self, request: Message, context: Any) -> Message:
        """Always true."""
        return _message("ServerLiveResponse", live=True)

    async def ServerReady(self, request: Message, context: Any) -> Message:
        """Whether the server is ready for requests, as its readiness route over HTTP says."""
        return _message("ServerReadyResponse", ready=self._plane.ready)

    async def ServerMetadata(self, request: Message, context: Any) -> Message:
        """Name, version and extensions of the server."""
        return _from_json("ServerMetadataResponse", model_info.server_metadata(self._plane))

    async def ModelReady(self, request: Message, context: Any) -> Message:
        """Whether the model is ready; as in Triton, an unknown model is not ready."""
        try:
            ready = self._plane.is_ready(request.name, request.version)
        except NotFound:
            ready = False
        return _message("ModelReadyResponse", ready=ready)

    async def ModelMetadata(self, request: Message, context: Any) -> Message:
        """Inputs, outputs and loaded versions of a model."""
        servable = self._plane.resolve(request.name, request.version)
        return _from_json("ModelMetadataResponse", model_info.metadata(servable, self._plane.registry.servables()))

    async def ModelConfig(self, request: Message, context: Any) -> Message:
        """The configuration of a model in Triton's format."""
        servable = self._plane.resolve(request.name, request.version)
        return _from_json("ModelConfigResponse", {"config": model_info.configuration(servable)})

    async def ModelStatistics(self, request: Message, context: Any) -> Message:
        """Statistics of all versions, of one model's versions, or of one version."""
        found = model_info.statistics(self._plane, self._parts.book, request.name, request.version)
        return _from_json("ModelStatisticsResponse", found)

    # the repository

    async def RepositoryIndex(self, request: Message, context: Any) -> Message:
        """All versions and their states, or only the ready ones."""
        _check_repository(request)
        return _from_json("RepositoryIndexResponse", {"models": await self._parts.control.index(request.ready)})

    async def RepositoryModelLoad(self, request: Message, context: Any) -> Message:
        """Load a model, or reload it if it is loaded; the answer is an empty message."""
        _check_repository(request)
        await self._parts.control.load(request.model_name, tensors.parameters(request.parameters, "parameters"))
        return _message("RepositoryModelLoadResponse")

    async def RepositoryModelUnload(self, request: Message, context: Any) -> Message:
        """Unload a model; the parameter `unload_dependents` has no effect. The answer is an empty message."""
        _check_repository(request)
        given = tensors.parameters(request.parameters, "parameters")
        await self._parts.control.unload(request.model_name, given.get("unload_dependents", False) is True)
        return _message("RepositoryModelUnloadResponse")

    # settings

    async def TraceSetting(self, request: Message, context: Any) -> Message:
        """Return the constant trace settings; BadRequest for other values, NotFound for an unknown model."""
        if request.model_name:
            self._plane.is_ready(request.model_name)
        changes = {name: _trace_value(name, list(entry.value)) for name, entry in request.settings.items()}
        found = update_trace(changes)
        settings = {name: {"value": value if isinstance(value, list) else [value]} for name, value in found.items()}
        return _from_json("TraceSettingResponse", {"settings": settings})

    async def LogSettings(self, request: Message, context: Any) -> Message:
        """Return the log settings, after changing them if there are changes."""
        logs = self._parts.logs
        changes = tensors.parameters(request.settings, "settings")
        found = logs.update(changes) if changes else logs.values
        return _from_json(
            "LogSettingsResponse", {"settings": {name: _log_value(value) for name, value in found.items()}}
        )


def _metadata(context: Any) -> Metadata:
    """The call's metadata (as HTTP headers), and the caller's address under `_PEER`."""
    return {**dict(context.invocation_metadata() or ()), _PEER: client_of_peer(context.peer())}


class _Stream:
    """Runs the requests of one stream as tasks of `infer`, at most `depth` of them unanswered.

    When the coroutine `ending` returns an error, no further requests are read, and the attribute `error` is set to it.
    """

    def __init__(
        self, infer: Any, requests: AsyncIterator[bytes], ending: Coroutine[Any, Any, ServerError], depth: int
    ) -> None:
        self.error: ServerError | None = None
        self._infer = infer
        self._requests = requests
        self._depth = asyncio.Semaphore(depth)
        self._turns: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()
        self._waiting: deque[asyncio.Task[bytes]] = deque()
        self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._end(ending))]

    async def responses(self) -> AsyncIterator[SerializedMessage]:
        """Yield the answers, or error messages, in the order of the requests; then raise an error of reading."""
        while (turn := await self._turns.get()) is not None:
            response: SerializedMessage
            try:
                response = await turn
            except Exception as error:
                response = _message("ModelStreamInferResponse", error_message=answered_error(error).message)
            self._waiting.popleft()
            self._depth.release()
            yield response
        reader = self._tasks[0]
        await asyncio.wait([reader])
        if not reader.cancelled():
            reader.result()  # raises the error that ended the reader, if any

    def close(self) -> None:
        """Stop reading, and cancel the requests that are not answered."""
        for task in (*self._tasks, *self._waiting):
            task.cancel()

    async def _read(self) -> None:
        try:
            async for request in self._requests:
                await self._depth.acquire()
                task = asyncio.ensure_future(self._infer(request))
                task.add_done_callback(_retrieve_exception)
                self._waiting.append(task)
                self._turns.put_nowait(task)
        finally:
            self._turns.put_nowait(None)

    async def _end(self, ending: Coroutine[Any, Any, ServerError]) -> None:
        self.error = await ending
        self._tasks[0].cancel()  # reads no more requests; those received are still answered


def _retrieve_exception(task: asyncio.Task[bytes]) -> None:
    """Retrieve the exception, so that asyncio does not log it if the caller has left."""
    if not task.cancelled():
        task.exception()


def _message(name: str, **fields: Any) -> Message:
    return _CLASSES[name](**fields)


def _from_json(name: str, document: dict[str, Any]) -> Message:
    return ParseDict(document, _CLASSES[name]())


def _check_repository(request: Message) -> None:
    if request.repository_name:
        raise Unsupported("repository_name: there is one repository, which has no name")


def _trace_value(name: str, values: list[str]) -> Any:
    """A trace setting's value in the format of HTTP: a list if the setting is one, otherwise its only value.

    None without values, which resets the setting; BadRequest for several values of a setting that is no list.
    """
    if not values:
        return None
    if isinstance(TRACE_SETTINGS.get(name), list):
        return values
    if len(values) > 1:
        raise BadRequest(f"trace.{name}: expected one value, got {len(values)}")
    return values[0]


def _log_value(value: Any) -> dict[str, Any]:
    kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
    return {kind: value}


_CLASSES = {name: message_class(found) for name, found in INFERENCE.message_types_by_name.items()}
