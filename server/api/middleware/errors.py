"""Converts every error of the application to `{"error": ...}`; below /api it also has a `code`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lathe.core.validation_errors import error_messages, model_classes
from lathe.server.access.authority import Caller
from lathe.server.access.suggestions import with_suggestion
from lathe.server.api.codec.reply import error_reply
from lathe.server.api.inference.asgi import ClientLeft, send_reply
from lathe.server.api.middleware.access_log import note_refusal
from lathe.server.errors import (
    BadRequest,
    MethodNotAllowed,
    NotFound,
    ServerError,
    UnknownModel,
    UnsupportedMedia,
    drop_frames,
)


def install_error_handlers(app: FastAPI) -> None:
    """Install handlers for Lathe's errors, the framework's errors and unexpected exceptions."""

    @app.exception_handler(ServerError)
    async def refused(request: Request, error: ServerError) -> Response:
        caller = getattr(request.state, "caller", None)
        if isinstance(error, UnknownModel) and isinstance(caller, Caller):
            error = with_suggestion(error, caller)
        return _response(request, error)

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        drop_frames(error)
        return _response(request, _translate(request, error), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        drop_frames(error)
        return _response(request, _invalid(request, error))

    @app.exception_handler(ClientLeft)
    async def left(_request: Request, _error: ClientLeft) -> Response:
        return Response(status_code=400)

    app.add_middleware(UnexpectedErrors)


class UnexpectedErrors:
    """Middleware that answers unexpected exceptions.

    The framework's own handler would raise the exception again after its answer, and the server would then close the
    connection. Here the exception is raised again only if an answer was already begun.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; an exception before the start of the answer is answered with an error."""
        began = False

        async def sent(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception as error:
            if began or scope["type"] != "http":
                raise
            await send_reply(send, error_reply(error, scope["path"]))


def _invalid(request: Request, error: RequestValidationError) -> ServerError:
    """The error for a request that failed validation: BadRequest with the text of each mistake.

    UnsupportedMedia if the body is not parsed because the content type is not JSON.
    """
    problems = error.errors()
    kind = request.headers.get("content-type")
    if any(item["loc"] == ("body",) and item["type"] != "missing" for item in problems) and not _is_json(kind or ""):
        came = repr(kind[:80]) if kind else "none"
        return UnsupportedMedia(f"header content-type: expected application/json, got {came}")
    return BadRequest("; ".join(_problem(request, error, item) for item in problems))


def _problem(request: Request, error: RequestValidationError, item: Mapping[str, Any]) -> str:
    """The text of one mistake; for an unknown key of the body, it suggests the most similar key."""
    where, *place = item["loc"]
    if where != "body":
        return error_messages([item], None, None)[0]
    (text,) = error_messages([{**item, "loc": tuple(place)}], _body_of(request), error.body)
    return f"body.{text}" if place else f"body: {text}"


def _body_of(request: Request) -> type[BaseModel] | None:
    """The model class of the body of a request to this route; None if there is none, or several."""
    route = request.scope.get("route")
    bodies = route.dependant.body_params if isinstance(route, APIRoute) else []
    kinds = [kind for each in bodies for kind in model_classes(each.field_info.annotation)]
    return kinds[0] if len(kinds) == 1 else None


def _is_json(kind: str) -> bool:
    name = kind.partition(";")[0].strip().lower()
    return name == "application/json" or (name.startswith("application/") and name.endswith("+json"))


def _translate(request: Request, error: HTTPException) -> ServerError:
    path = request.scope["path"]  # request.url is built from the Host header, which the client controls
    if error.status_code == 404:
        return NotFound(f"{request.method} {path}: there is no such route")
    if error.status_code == 405:
        return MethodNotAllowed(f"{path}: method {request.method} is not allowed")
    return BadRequest(str(error.detail))


def _response(request: Request, error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    if isinstance(error, ServerError):
        note_refusal(request.scope, error)
    reply = error_reply(error, request.scope["path"])
    extra = {name.decode(): value.decode() for name, value in reply.headers}
    return Response(reply.text, reply.status, extra | dict(headers or {}))
