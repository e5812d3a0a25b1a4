"""Access log middleware for all requests but inference: a line per request, and its ids in all its log lines."""

from __future__ import annotations

import re
from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lathe.server.api.codec.call_head import is_infer_path
from lathe.server.api.inference.asgi import client_address
from lathe.server.errors import ServerError
from lathe.server.telemetry.access_log import AccessLog, ServedRequest
from lathe.server.telemetry.logs import CALLER, Caller, parse_trace_id

_REFUSED = "refused"  # key in a scope's state: the error that answered the request
_MODEL = re.compile(r"/(?:v2|v2/repository|api/v1)/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?(?:/|$)")
_NO_MODEL = "/v2/models/stats"


def note_refusal(scope: Scope, error: ServerError) -> None:
    """Store the error that refuses a request, for its log line."""
    scope.setdefault("state", {})[_REFUSED] = error


class AccessLogging:
    """Middleware that logs requests, except inference, which `lathe.server.api.inference.infer.InferService` logs."""

    def __init__(self, app: ASGIApp, access: AccessLog) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and log its outcome."""
        if scope["type"] != "http" or is_infer_path(scope["raw_path"]):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        caller = Caller(
            headers.get(b"x-request-id", b"").decode("latin-1"),
            parse_trace_id(headers.get(b"traceparent", b"").decode("latin-1")),
        )
        began, status = monotonic(), 0

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = CALLER.set(caller)
        try:
            await self._app(scope, receive, sent)
        finally:
            CALLER.reset(token)
            self._log(scope, status, monotonic() - began, caller)

    def _log(self, scope: Scope, status: int, seconds: float, caller: Caller) -> None:
        ok = 0 < status < 400
        if self._access.wants(ok):
            served = ServedRequest(scope["method"], scope["path"], status, ok, seconds, *caller)
            served.client, served.fault = client_address(scope), status in (0, 500)
            if (error := scope.get("state", {}).get(_REFUSED)) is not None:
                served.code, served.error = error.code, error.message
            if scope["path"] != _NO_MODEL and (found := _MODEL.match(scope["path"])):
                served.model, served.version = found["model"], found["version"] or ""
            self._access.write(served)
