"""``inference.GRPCInferenceService``: each call hands over to what answers the same request over HTTP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TypeAlias

from google.protobuf.json_format import ParseDict

from server.access.addresses import client_of_peer
from server.access.scopes import Scope
from server.api import modelinfo
from server.api.callhead import STICKY_KEY
from server.api.controls import TRACE_SETTINGS, LogSettings, update_trace
from server.api.grpc import tensors
from server.api.grpc.accessed import REQUEST_ID
from server.api.grpc.messages import INFERENCE, Message, message_class
from server.api.grpc.reading import MessageReading
from server.api.grpc.sharedmemory import SharedMemoryCalls
from server.api.grpc.status import known
from server.api.infer import codec_of, deadline_of
from server.api.readers import HERE
from server.api.reading import Reading
from server.api.v2 import RepositoryControl
from server.dataplane import DataPlane
from server.errors import BadRequest, NotFound, ServerError, Unavailable, Unsupported
from server.settings import Settings
from server.telemetry.access import AccessLog
from server.telemetry.statistics import StatsBook

Metadata: TypeAlias = dict[str, Any]
Written: TypeAlias = Message | bytes  # bytes: a message as it travels


@dataclass(frozen=True, slots=True)
class Parts:
    """What the calls work with, all of it shared with HTTP."""

    settings: Settings
    plane: DataPlane
    book: StatsBook
    control: RepositoryControl
    logs: LogSettings
    access: AccessLog
    reading: Reading


_PEER = ":peer"  # no caller's own metadata: those begin with a letter


class InferenceService(SharedMemoryCalls):
    """One method per call, by its name in the .proto file; requests and answers are that file's messages."""

    def __init__(self, parts: Parts, stopping: asyncio.Event) -> None:
        self._parts = parts
        self._plane = parts.plane
        self._regions = parts.plane.regions
        self._reading = MessageReading(parts.reading, parts.plane)
        self._stopping = stopping

    # inference

    async def ModelInfer(self, request: bytes, context: Any) -> bytes:
        """Answer one request, which is read in here, as it may be large.

        When the caller cancels, or its deadline passes, gRPC cancels this task.
        """
        left = context.time_remaining()
        return await self._infer(request, _metadata(context), None if left is None else monotonic() + left)

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Written]:
        """Answer requests in their order while later ones already run; what is wrong with one ends only that one."""
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
        """Return why streams end, once they do: the server stops, or their key is not taken any more."""
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
        """Return the answer as it travels, or as it does in a stream."""
        key, authorization = metadata.get(STICKY_KEY, ""), metadata.get("authorization", "")
        address = metadata.get(_PEER, "")
        with self._parts.reading.ledger.claim(self._whose(authorization, address)) as claim:
            if len(request) > HERE:
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
        """Return whose a request is, before it is known for which model; raises Unauthorized."""
        caller = self._plane.authority.caller(authorization)
        return caller.key.id if caller.key else address

    # the server and its models

    async def ServerLive(self, request: Message, context: Any) -> Message:
        """It answers, so it lives."""
        return _message("ServerLiveResponse", live=True)

    async def ServerReady(self, request: Message, context: Any) -> Message:
        """Whether it wants work."""
        return _message("ServerReadyResponse", ready=self._plane.ready)

    async def ServerMetadata(self, request: Message, context: Any) -> Message:
        """Name, version, extensions."""
        return _parsed("ServerMetadataResponse", modelinfo.server_metadata(self._plane))

    async def ModelReady(self, request: Message, context: Any) -> Message:
        """Whether the model answers; as with Triton, an unknown one is merely not ready."""
        try:
            ready = self._plane.is_ready(request.name, request.version)
        except NotFound:
            ready = False
        return _message("ModelReadyResponse", ready=ready)

    async def ModelMetadata(self, request: Message, context: Any) -> Message:
        """Inputs, outputs and loaded versions."""
        servable = self._plane.resolve(request.name, request.version)
        return _parsed("ModelMetadataResponse", modelinfo.metadata(servable, self._plane.registry.servables()))

    async def ModelConfig(self, request: Message, context: Any) -> Message:
        """The configuration as Triton words it."""
        servable = self._plane.resolve(request.name, request.version)
        return _parsed("ModelConfigResponse", {"config": modelinfo.configuration(servable)})

    async def ModelStatistics(self, request: Message, context: Any) -> Message:
        """Counters of all versions, one model's, or one."""
        found = modelinfo.statistics(self._plane, self._parts.book, request.name, request.version)
        return _parsed("ModelStatisticsResponse", found)

    # the repository

    async def RepositoryIndex(self, request: Message, context: Any) -> Message:
        """Every version and its state."""
        _check_repository(request)
        return _parsed("RepositoryIndexResponse", {"models": await self._parts.control.index(request.ready)})

    async def RepositoryModelLoad(self, request: Message, context: Any) -> Message:
        """Load or reload a model."""
        _check_repository(request)
        await self._parts.control.load(request.model_name, tensors.parameters(request.parameters, "parameters"))
        return _message("RepositoryModelLoadResponse")

    async def RepositoryModelUnload(self, request: Message, context: Any) -> Message:
        """Take a model out of service."""
        _check_repository(request)
        given = tensors.parameters(request.parameters, "parameters")
        await self._parts.control.unload(request.model_name, given.get("unload_dependents", False) is True)
        return _message("RepositoryModelUnloadResponse")

    # settings

    async def TraceSetting(self, request: Message, context: Any) -> Message:
        """Read the trace settings, or try to change them; NotFound for a model that there is not."""
        if request.model_name:
            self._plane.is_ready(request.model_name)
        changes = {name: _trace_value(name, list(entry.value)) for name, entry in request.settings.items()}
        found = update_trace(changes)
        settings = {name: {"value": value if isinstance(value, list) else [value]} for name, value in found.items()}
        return _parsed("TraceSettingResponse", {"settings": settings})

    async def LogSettings(self, request: Message, context: Any) -> Message:
        """Read the log settings, or change them."""
        logs = self._parts.logs
        changes = tensors.parameters(request.settings, "settings")
        found = logs.update(changes) if changes else logs.values
        return _parsed("LogSettingsResponse", {"settings": {name: _log_value(value) for name, value in found.items()}})


def _metadata(context: Any) -> Metadata:
    """What headers are over HTTP, and the caller's address."""
    return {**dict(context.invocation_metadata() or ()), _PEER: client_of_peer(context.peer())}


class _Stream:
    """The requests of one stream as tasks, at most ``depth`` of them unanswered; no more are taken after ``ending``,
    which gives the ``error`` that the stream then ends with."""

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

    async def responses(self) -> AsyncIterator[Written]:
        """Yield the answers, or the errors in their place, in the requests' order."""
        while (turn := await self._turns.get()) is not None:
            response: Written
            try:
                response = await turn
            except Exception as error:
                response = _message("ModelStreamInferResponse", error_message=known(error).message)
            self._waiting.popleft()
            self._depth.release()
            yield response
        reader = self._tasks[0]
        await asyncio.wait([reader])
        if not reader.cancelled():
            reader.result()  # raises what ended the reading, if not the caller

    def close(self) -> None:
        """The stream is over: stop reading, and take out of the queues what nobody waits for any more."""
        for task in (*self._tasks, *self._waiting):
            task.cancel()

    async def _read(self) -> None:
        try:
            async for request in self._requests:
                await self._depth.acquire()
                task = asyncio.ensure_future(self._infer(request))
                task.add_done_callback(_seen)
                self._waiting.append(task)
                self._turns.put_nowait(task)
        finally:
            self._turns.put_nowait(None)

    async def _end(self, ending: Coroutine[Any, Any, ServerError]) -> None:
        self.error = await ending
        self._tasks[0].cancel()  # no more requests; those that are there are answered


def _seen(task: asyncio.Task[bytes]) -> None:
    """Look at the outcome, so that asyncio does not log one whose caller left before it."""
    if not task.cancelled():
        task.exception()


def _message(name: str, **fields: Any) -> Message:
    return _CLASSES[name](**fields)


def _parsed(name: str, document: dict[str, Any]) -> Message:
    return ParseDict(document, _CLASSES[name]())


def _check_repository(request: Message) -> None:
    if request.repository_name:
        raise Unsupported("repository_name: there is one repository, which has no name")


def _trace_value(name: str, values: list[str]) -> Any:
    """Return a setting as HTTP has it; no value means back to what it was."""
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
