"""Every error of the application becomes ``{"error": ...}``; below /api it also carries its code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.mistakes import classes, mistakes
from server.access.authority import Caller
from server.access.nearest import hinted
from server.api.accessed import note_refusal
from server.api.asgi import ClientLeft, send_reply
from server.api.reply import error_reply
from server.errors import BadRequest, MethodNotAllowed, NotFound, ServerError, UnknownModel, UnsupportedMedia


def install_error_handlers(app: FastAPI) -> None:
    """Handle Lathe's errors, the framework's, and those nobody foresaw."""

    @app.exception_handler(ServerError)
    async def refused(request: Request, error: ServerError) -> Response:
        caller = getattr(request.state, "caller", None)
        if isinstance(error, UnknownModel) and isinstance(caller, Caller):
            error = hinted(error, caller)
        return _response(request, error)

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        return _response(request, _translate(request, error), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _response(request, _invalid(request, error))

    @app.exception_handler(ClientLeft)
    async def left(_request: Request, _error: ClientLeft) -> Response:
        return Response(status_code=400)

    app.add_middleware(Unforeseen)


class Unforeseen:
    """Answers what nobody foresaw. The framework's own handler would raise it again, whereupon the server closes a
    connection whose answer was complete; here that happens only to answers that broke off."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; an error before its answer began is its answer."""
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
    """Say what is wrong with a request: a body that does not count as JSON was not read, whatever it holds."""
    problems = error.errors()
    kind = request.headers.get("content-type")
    if any(item["loc"] == ("body",) and item["type"] != "missing" for item in problems) and not _is_json(kind or ""):
        came = repr(kind[:80]) if kind else "none"
        return UnsupportedMedia(f"header content-type: expected application/json, got {came}")
    return BadRequest("; ".join(_problem(request, error, item) for item in problems))


def _problem(request: Request, error: RequestValidationError, item: Mapping[str, Any]) -> str:
    """Return one mistake; for the body, the nearest key in place of one that there is not."""
    where, *place = item["loc"]
    if where != "body":
        return f"{'.'.join(map(str, item['loc']))}: {item['msg']}"
    (text,) = mistakes([{**item, "loc": tuple(place)}], _body_of(request), error.body)
    return f"body.{text}" if place else f"body: {text}"


def _body_of(request: Request) -> type[BaseModel] | None:
    """Return what the body of a request to this route is read as."""
    route = request.scope.get("route")
    bodies = route.dependant.body_params if isinstance(route, APIRoute) else []
    kinds = [kind for each in bodies for kind in classes(each.field_info.annotation)]
    return kinds[0] if len(kinds) == 1 else None


def _is_json(kind: str) -> bool:
    name = kind.partition(";")[0].strip().lower()
    return name == "application/json" or (name.startswith("application/") and name.endswith("+json"))


def _translate(request: Request, error: HTTPException) -> ServerError:
    path = request.scope["path"]  # request.url is built from the Host header, which may say anything
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
