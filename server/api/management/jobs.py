"""The management routes of jobs: submit, list, follow, cancel and delete."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path as File
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from pydantic.json_schema import SkipJsonSchema
from starlette.types import Receive, Scope, Send

from lathe.server.access.authority import Authority, Caller
from lathe.server.access.scopes import Scope as Rights
from lathe.server.api.inference.asgi import client_id
from lathe.server.api.management.job_responses import JobAccepted, JobDetail, JobSummary
from lathe.server.api.management.job_schemas import JobAsked
from lathe.server.api.management.models import FAILURES, IdempotencyKey, origin_of, pattern_schema
from lathe.server.errors import BadRequest, NotFound
from lathe.server.jobs.event_stream import EventStreams, Heartbeat, Line, StateChanged
from lathe.server.jobs.folders import LOG, RESULT
from lathe.server.jobs.job import ID, Job, JobState
from lathe.server.jobs.progress import last_event
from lathe.server.jobs.service import JobService
from lathe.server.repository.manifest import MODEL_FILE

_LOG_TAIL, _LOG_MOST = 64 << 10, 4 << 20  # bytes of a log that are sent: by default, and at most
_RANGE = re.compile(rb"bytes=(\d{1,18})?-(\d{1,18})?")
_REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; sandbox allow-scripts"
)

LastEvent = Annotated[
    str | SkipJsonSchema[None],
    Header(description="The `id` of the last received event.", json_schema_extra={"pattern": "^[0-9]{1,15}$"}),
]
_EVENT = {"type": "object", "properties": {name: {"type": "string"} for name in ("id", "event", "data")}}
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}
JobId = Annotated[str, Path(description="The job's id.", json_schema_extra=pattern_schema(ID))]


def jobs_routes(jobs: JobService, followers: EventStreams) -> APIRouter:
    """The routes below /api/v1/jobs."""
    failures = {**FAILURES, 429: FAILURES[400]}
    routes = APIRouter(prefix="/api/v1", tags=["jobs"], responses=failures)
    _add_changes(routes, jobs)
    _add_reads(routes, jobs)
    _add_files(routes, jobs)
    _add_events(routes, jobs, followers)
    return routes


def _add_changes(routes: APIRouter, jobs: JobService) -> None:
    @routes.post("/jobs", status_code=202)
    async def submit(
        request: Request, response: Response, asked: JobAsked, idempotency_key: IdempotencyKey = None
    ) -> JobAccepted:
        """Submit a job; it is stored durably before the answer."""
        key = origin_of(request, idempotency_key).key
        job, replayed = await jobs.submit(_caller(request), asked.to_request(), key)
        response.headers["location"] = f"/api/v1/jobs/{job.id}"
        return JobAccepted.accepted(job, replayed)

    @routes.post("/jobs/{job}/cancel", status_code=202)
    async def cancel(request: Request, job: JobId) -> JobSummary:
        """Cancel a job: at once if it waits, within seconds if it runs."""
        cancelled = await jobs.cancel(_caller(request), job)
        return JobSummary.of(cancelled, jobs.run_time(cancelled))

    @routes.delete("/jobs/{job}")
    async def delete(request: Request, job: JobId) -> JobSummary:
        """Delete a job that has ended, with its checkpoints and its result; published versions stay."""
        deleted = await jobs.delete(_caller(request), job)
        return JobSummary.of(deleted, deleted.ran)


def _add_reads(routes: APIRouter, jobs: JobService) -> None:
    @routes.get("/jobs")
    async def list_jobs(
        request: Request,
        state: Annotated[JobState | SkipJsonSchema[None], Query(description="Only jobs in this state.")] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> list[JobSummary]:
        """List your jobs, newest first; administrators see the jobs of all owners."""
        return [JobSummary.of(job, jobs.run_time(job)) for job in jobs.list(_caller(request), state)[:limit]]

    @routes.get("/jobs/{job}")
    async def get_job(request: Request, job: JobId) -> JobDetail:
        """Return one job with its recipe, its progress and its metrics."""
        found = jobs.get(_caller(request), job)
        return JobDetail.detail(found, jobs.run_time(found), await asyncio.to_thread(last_event, jobs.events(found)))


def _add_files(routes: APIRouter, jobs: JobService) -> None:
    @routes.get("/jobs/{job}/logs", responses=_content("text/plain"), response_class=Response)
    async def logs(
        request: Request,
        job: JobId,
        tail: Annotated[int, Query(ge=1, le=_LOG_MOST, description="Bytes from the end of the log.")] = _LOG_TAIL,
    ) -> Response:
        """Return the end of the log of the job's process: its epochs or trials, and what it wrote itself."""
        found = jobs.get(_caller(request), job)
        text = await asyncio.to_thread(_tail, jobs.file(found, LOG), tail)
        return Response(text, media_type="text/plain; charset=utf-8", headers={"x-content-type-options": "nosniff"})

    @routes.get("/jobs/{job}/report", responses=_content("text/html"), response_class=Response)
    async def report(request: Request, job: JobId) -> Response:
        """Return the HTML report of the result."""
        file = _result(jobs, jobs.get(_caller(request), job), "report.html")
        return _JobFile(file, media_type="text/html", headers={"content-security-policy": _REPORT_POLICY})

    @routes.get("/jobs/{job}/model", responses=_content("application/octet-stream"), response_class=Response)
    async def model(request: Request, job: JobId) -> Response:
        """Return the resulting ONNX file."""
        file = _result(jobs, jobs.get(_caller(request), job), MODEL_FILE)
        return _JobFile(file, media_type="application/octet-stream", filename=MODEL_FILE)


def _add_events(routes: APIRouter, jobs: JobService, followers: EventStreams) -> None:
    @routes.get("/jobs/{job}/events", responses=_EVENTS, response_class=Response)
    async def events(
        request: Request,
        job: JobId,
        last_event_id: LastEvent = None,
    ) -> Response:
        """Follow a job as server-sent events until it has ended.

        `state` events give its state; every other event was reported by its process, and is named by its kind.
        """
        found = jobs.get(_caller(request), job)
        stream = _stream(jobs, followers, _authorizer(request), found, _offset(last_event_id))
        return _Following(stream, followers, client_id(request.scope))


class _JobFile(FileResponse):
    """A file of a job, or one range of it; NotFound if the job is deleted meanwhile.

    A `Range` header that is invalid, or names several ranges, is ignored (RFC 9110, section 14.2). Starlette would
    answer 400 in plain text.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name != b"range" or _is_range(value)]
        try:
            self.stat_result = await asyncio.to_thread(os.stat, self.path)
        except FileNotFoundError:
            raise NotFound("the job was deleted") from None
        self.set_stat_headers(self.stat_result)
        await super().__call__({**scope, "headers": headers}, receive, send)


def _is_range(value: bytes) -> bool:
    """Whether the value of a `Range` header is one valid range of bytes."""
    found = _RANGE.fullmatch(value)
    if found is None:
        return False
    start, end = found.groups(default=b"")
    return bool(start or end) and (not (start and end) or int(start) <= int(end))


class _Following(StreamingResponse):
    """The event stream of one follower; Overloaded if there are too many followers."""

    def __init__(self, stream: AsyncIterator[bytes], followers: EventStreams, client: str) -> None:
        super().__init__(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._followers = followers
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._followers.place(self._client):
            await super().__call__(scope, receive, send)


async def _stream(
    jobs: JobService, followers: EventStreams, caller_now: Callable[[], Caller], job: Job, offset: int
) -> AsyncIterator[bytes]:
    """Yield the job's events as server-sent events, from `offset` (bytes) in its event file on.

    Ends when the job has ended, the server stops, or `caller_now` raises or returns a caller that may not see the job.
    """
    following = followers.follow(lambda: jobs.get(caller_now(), job.id), jobs.events(job), offset)
    async with aclosing(following) as batches:
        async for batch in batches:
            yield b"".join(map(_encode_event, batch))


def _authorizer(request: Request) -> Callable[[], Caller]:
    """A function that authorizes the request's caller again and returns it.

    It raises Unauthorized or Forbidden if the key is no longer valid or has lost the scope.
    """
    authority: Authority = request.state.authority
    authorization = request.headers.get("authorization", "")

    def ask() -> Caller:
        caller = authority.caller(authorization)
        caller.check(Rights.TRAIN)
        return caller

    return ask


def _encode_event(event: Line | StateChanged | Heartbeat) -> bytes:
    """One event as bytes of the server-sent events format; `Heartbeat` is a comment that keeps the connection alive."""
    match event:
        case StateChanged(state):
            return b"event: state\ndata: " + orjson.dumps({"state": state.value}) + b"\n\n"
        case Line(offset, text):
            return b"id: %d\nevent: %b\ndata: %b\n\n" % (offset, _kind(text), text)
    return b": nothing new\n\n"


def _kind(text: bytes) -> bytes:
    try:
        kind = orjson.loads(text)["kind"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return b"message"
    return kind.encode() if isinstance(kind, str) and kind.isidentifier() else b"message"


def _offset(last_event_id: str | None) -> int:
    if last_event_id is None:
        return 0
    if not last_event_id.isascii() or not last_event_id.isdigit() or len(last_event_id) > 15:
        raise BadRequest(f"header last-event-id: expected the id of an event, got {last_event_id[:40]!r}")
    return int(last_event_id)


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def _content(kind: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {kind: {"schema": {"type": "string"}}}}}


def _result(jobs: JobService, job: Job, name: str) -> File:
    file = jobs.file(job, RESULT, name)
    if not file.is_file():
        raise NotFound(f"job {job.id} is {job.state.value} and has no {name}")
    return file


def _tail(file: File, size: int) -> bytes:
    try:
        with open(file, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - size))
            return log.read(size)
    except FileNotFoundError:
        return b""
